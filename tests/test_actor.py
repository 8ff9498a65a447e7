"""An ask always ends, a full mailbox refuses at once, and an ended actor says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from pdrt.actor import Actor, Ask, ask
from pdrt.errors import BadRequest, Overloaded, PeerLost


@dataclass(slots=True, kw_only=True, eq=False)
class Double(Ask[int]):
    number: int


@dataclass(slots=True, kw_only=True, eq=False)
class Keep(Ask[int]):
    """Answered never, or later."""


@dataclass(slots=True, kw_only=True, eq=False)
class AnswerAndFail(Ask[int]):
    pass


@dataclass(frozen=True, slots=True)
class Fail:
    pass


Message: TypeAlias = Double | Keep | AnswerAndFail | Fail | int


class Worker(Actor[Message]):
    def __init__(self, depth: int = 8) -> None:
        super().__init__("worker", depth)
        self.told: list[int] = []
        self.kept: list[Keep] = []

    async def on(self, message: Message) -> None:
        match message:
            case Double(number=number) if number < 0:
                message.refuse(BadRequest("number"))
            case Double(number=number):
                message.answer(2 * number)
            case Keep():
                self.kept.append(message)
            case AnswerAndFail():
                message.answer(1)
                raise ZeroDivisionError
            case Fail():
                raise ZeroDivisionError
            case int():
                self.told.append(message)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_ask_is_answered_or_refused() -> None:
    worker = Worker()
    task = asyncio.create_task(worker.run())
    assert await ask(worker, Double(number=21)) == 42
    with pytest.raises(BadRequest):
        await ask(worker, Double(number=-1))
    await ended(task)


async def test_messages_are_read_in_order() -> None:
    worker = Worker()
    for number in range(5):
        worker.tell(number)
    assert worker.depth == 5
    task = asyncio.create_task(worker.run())
    await ask(worker, Double(number=1))
    assert (worker.told, worker.depth) == ([0, 1, 2, 3, 4], 0)
    await ended(task)


async def test_a_full_mailbox_refuses_at_once() -> None:
    worker = Worker(depth=2)
    worker.tell(1)
    worker.tell(2)
    with pytest.raises(Overloaded, match="worker: 2 messages waiting"):
        worker.tell(3)
    with pytest.raises(Overloaded):
        await ask(worker, Double(number=1))


async def test_every_open_ask_ends_when_the_actor_is_cancelled() -> None:
    """Read and kept for later, being dealt with, or still in the mailbox."""
    worker = Worker()
    task = asyncio.create_task(worker.run())
    asks = [asyncio.create_task(ask(worker, Keep())) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asks.append(asyncio.create_task(ask(worker, Keep())))
    task.cancel()
    results = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(result) for result in results] == [PeerLost] * 3
    await asyncio.gather(task, return_exceptions=True)


async def test_every_open_ask_ends_when_the_actor_fails() -> None:
    worker = Worker()
    worker.tell(Fail())
    asked = asyncio.create_task(ask(worker, Double(number=1)))
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        await worker.run()
    with pytest.raises(PeerLost, match="worker has ended"):
        await asked


async def test_an_answer_stays_given_when_the_actor_fails_right_after() -> None:
    worker = Worker()
    asked = asyncio.create_task(ask(worker, AnswerAndFail()))
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        await worker.run()
    assert await asked == 1


async def test_an_actor_that_has_ended_takes_nothing() -> None:
    worker = Worker()
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    await ended(task)
    with pytest.raises(PeerLost, match="worker has ended"):
        worker.tell(1)


async def test_an_answer_to_who_has_left_is_no_error() -> None:
    worker = Worker()
    task = asyncio.create_task(worker.run())
    asked = asyncio.create_task(ask(worker, Keep()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    (kept,) = worker.kept
    kept.answer(1)
    kept.refuse(BadRequest("late"))
    assert await ask(worker, Double(number=1)) == 2
    await ended(task)


async def test_a_kept_ask_can_be_answered_later_but_once() -> None:
    worker = Worker()
    task = asyncio.create_task(worker.run())
    asked = asyncio.create_task(ask(worker, Keep()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    worker.kept[0].answer(1)
    worker.kept[0].answer(2)
    assert await asked == 1
    await ended(task)
