"""A colocated instance proves itself: one token through each of its ranks, by the real path."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from pdrt.control.dispatch import DPDispatcher
from pdrt.errors import PdrtError
from pdrt.messages import Sampling, Submit, pack_ids

_LAST_ROOM: Final = (1 << 63) - 1  # rooms are random: nobody else will draw these few
_TIME_S: Final = 30.0


async def self_test(
    dispatcher: DPDispatcher, dp_ranks: Iterable[int], time_s: float = _TIME_S
) -> str:
    """Why a request would not succeed, or nothing when each rank has answered one.

    `time_s` is for each rank: one that is stuck would not keep the request's own deadline.
    """
    for dp_rank in dp_ranks:
        submit = Submit(
            room=_LAST_ROOM - dp_rank,
            attempt=0,
            request_id="self-test",
            tokens=pack_ids([1]),
            prompt_tokens=1,
            sampling=Sampling(max_tokens=1, temperature=0),
            time_left=time_s,
        )
        try:
            async with asyncio.timeout(time_s):
                with dispatcher.submit(submit, dp_rank) as stream:
                    outputs = [output async for output in stream]
        except PdrtError as error:
            return f"rank {dp_rank}: {error}"
        except TimeoutError:
            return f"rank {dp_rank}: no answer within {time_s:g} s"
        if problem := outputs[-1].problem:
            return f"rank {dp_rank}: {problem.message}"
    return ""
