"""A colocated instance proves itself: one token through each of its ranks, by the real path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdrt.control.dispatch import DPDispatcher
from pdrt.errors import PdrtError
from pdrt.messages import Sampling, Submit, pack_ids

_LAST_ROOM: Final = (1 << 63) - 1  # rooms are random: nobody else will draw these few
_TIME_S: Final = 30.0


async def self_test(dispatcher: DPDispatcher, dp_ranks: Iterable[int]) -> str:
    """Why a request would not succeed, or nothing when each rank has answered one."""
    for dp_rank in dp_ranks:
        submit = Submit(
            room=_LAST_ROOM - dp_rank,
            attempt=0,
            request_id="self-test",
            tokens=pack_ids([1]),
            prompt_tokens=1,
            sampling=Sampling(max_tokens=1, temperature=0),
            time_left=_TIME_S,
        )
        try:
            with dispatcher.submit(submit, dp_rank) as stream:
                outputs = [output async for output in stream]
        except PdrtError as error:
            return f"rank {dp_rank}: {error}"
        if problem := outputs[-1].problem:
            return f"rank {dp_rank}: {problem.message}"
    return ""
