"""Requests with a grammar wait beside the loop, and what is said of them keeps its order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdrt.errors import BadRequest, Overloaded, PdrtError
from pdrt.foyer import Foyer
from pdrt.messages import (
    AbortRoom,
    Drain,
    Grammar,
    Rebind,
    ResumeLocally,
    Sampling,
    Source,
    Submit,
    ToWorker,
    pack_ids,
)

DIGITS = Grammar(kind="regex", text="[0-9]+")


def submit(room: int, grammar: Grammar | None = DIGITS, attempt: int = 0) -> Submit:
    return Submit(
        room=room,
        attempt=attempt,
        request_id=f"r{room}",
        tokens=pack_ids([1]),
        prompt_tokens=1,
        sampling=Sampling(grammar=grammar),
        time_left=10.0,
    )


class Rig:
    """A compiler that takes until it is told, and a clock."""

    def __init__(self) -> None:
        self.foyer = Foyer(self._prepare, self.hear, self._refuse, lambda: self.now)
        self.now = 0.0
        self.heard = list[ToWorker]()
        self.refused = list[tuple[int, str]]()
        self.problem = ""
        self.may_go, self._done = asyncio.Event(), asyncio.Event()

    async def _prepare(self, _grammar: Grammar) -> None:
        await self.may_go.wait()
        if self.problem:
            raise BadRequest(self.problem)

    def hear(self, message: ToWorker) -> None:
        self.heard.append(message)
        self._done.set()

    def _refuse(self, message: Submit, error: PdrtError) -> None:
        self.refused.append((message.room, str(error)))
        self._done.set()

    def tell(self, message: ToWorker) -> None:
        if not self.foyer.takes(message):
            self.hear(message)

    async def until(self, heard: int = 0, refused: int = 0) -> None:
        while len(self.heard) < heard or len(self.refused) < refused:
            self._done.clear()
            await self._done.wait()


@asynccontextmanager
async def rigged() -> AsyncIterator[Rig]:
    rig = Rig()
    running = asyncio.create_task(rig.foyer.run())
    try:
        yield rig
    finally:
        running.cancel()


async def test_what_is_said_of_a_room_comes_after_its_submit() -> None:
    async with rigged() as rig:
        source = Source(host="h", port=1)
        said: list[ToWorker] = [
            submit(1),
            Rebind(room=1, attempt=1, source=source),
            ResumeLocally(room=1),
            AbortRoom(room=1, reason="client gone"),
            Drain(),
        ]
        for message in said:
            rig.tell(message)
        assert rig.heard == []
        rig.may_go.set()
        await rig.until(heard=5)
        assert rig.heard == said


async def test_rooms_without_a_grammar_wait_for_nothing() -> None:
    async with rigged() as rig:
        rig.tell(submit(1))
        others: list[ToWorker] = [submit(2, None), AbortRoom(room=2, reason="client gone")]
        for message in others:
            rig.tell(message)
        assert rig.heard == others
        rig.may_go.set()
        await rig.until(heard=3)
        rig.tell(submit(1, None))  # nothing is left of the room here
        rig.tell(Drain())
        assert len(rig.heard) == 5


async def test_a_later_attempt_waits_for_the_one_before() -> None:
    async with rigged() as rig:
        said = [submit(1), submit(1, None, attempt=1)]
        for message in said:
            rig.tell(message)
        assert rig.heard == []
        rig.may_go.set()
        await rig.until(heard=2)
        assert rig.heard == said


async def test_the_time_that_it_waited_is_gone() -> None:
    async with rigged() as rig:
        rig.tell(submit(1))
        rig.now = 4.0
        rig.may_go.set()
        await rig.until(heard=1)
        (heard,) = rig.heard
        assert isinstance(heard, Submit)
        assert heard.time_left == 6.0


async def test_a_grammar_that_cannot_be_is_refused_and_the_next_one_served() -> None:
    async with rigged() as rig:
        rig.problem = "no such thing"
        rig.tell(submit(1))
        rig.may_go.set()
        await rig.until(refused=1)
        rig.problem = ""
        rig.tell(submit(2))
        await rig.until(heard=1)
        assert rig.refused == [(1, "no such thing")]
        assert rig.heard == [submit(2)]


async def test_so_many_wait_and_no_more() -> None:
    async with rigged() as rig:
        for room in range(256):
            rig.tell(submit(room))
        with pytest.raises(Overloaded):
            rig.tell(submit(256))
        rig.tell(AbortRoom(room=3, reason="client gone"))
        rig.may_go.set()
        await rig.until(heard=257)
