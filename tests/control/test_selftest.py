"""A colocated instance proves itself rank by rank, and says of the first that fails why."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdrt.control.dispatch import DPDispatcher
from pdrt.control.selftest import self_test
from pdrt.errors import Overloaded, PeerLost
from pdrt.messages import Output, Outputs, Problem, Rank, Ready, Submit, ToWorker
from tests.control.leader_rig import READY


class Worker:
    """Ends each request with `end`, or not at all."""

    def __init__(self, dp: int, end: Output | None) -> None:
        self.rank, self.end = Rank(dp=dp), end
        self.ready: Ready | None = READY
        self.is_full = False
        self.told: list[ToWorker] = []
        self.dispatcher: DPDispatcher

    def tell(self, message: ToWorker) -> None:
        if self.ready is None:
            raise PeerLost("gone")
        if self.is_full:
            raise Overloaded("full")
        self.told.append(message)
        if isinstance(message, Submit) and self.end is not None:
            said = Outputs(items=(replace(self.end, room=message.room),))
            asyncio.get_running_loop().call_soon(self.dispatcher.deliver, self.rank.dp, said)


GOOD = Output(room=0, tokens=(7,), finish="length")
BAD = Output(room=0, problem=Problem(code="bad_logits", message="no number"))


def made(*ends: Output | None) -> tuple[DPDispatcher, list[Worker]]:
    workers = [Worker(dp, end) for dp, end in enumerate(ends)]
    dispatcher = DPDispatcher(workers, lambda: 0.0)
    for worker in workers:
        worker.dispatcher = dispatcher
    return dispatcher, workers


async def test_each_rank_answers_one_token_and_nothing_is_left() -> None:
    dispatcher, workers = made(GOOD, GOOD)
    assert await self_test(dispatcher, [0, 1]) == ""
    for worker in workers:
        (submit,) = worker.told
        assert isinstance(submit, Submit)
        assert (submit.sampling.max_tokens, submit.prompt_tokens) == (1, 1)
    assert dispatcher.load().rooms == 0


@pytest.mark.parametrize(("end", "why"), [(BAD, "rank 1: no number"), (None, "rank 1: no answer")])
async def test_a_rank_that_fails_or_is_stuck_is_named(end: Output | None, why: str) -> None:
    dispatcher, _ = made(GOOD, end)
    assert (await self_test(dispatcher, [0, 1], time_s=0.01)).startswith(why)
    assert dispatcher.load().rooms == 0


async def test_a_rank_that_is_gone_or_full_is_named() -> None:
    dispatcher, (worker,) = made(GOOD)
    worker.is_full = True
    assert await self_test(dispatcher, [0]) == "rank 0: full"
    worker.ready = None
    assert await self_test(dispatcher, [0]) == "rank 0: the worker of dp rank 0 is not connected"


async def test_it_can_be_done_again() -> None:
    dispatcher, (worker,) = made(BAD)
    assert await self_test(dispatcher, [0])
    worker.end = GOOD
    assert not await self_test(dispatcher, [0])
