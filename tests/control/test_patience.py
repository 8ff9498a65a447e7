"""What we have no time to read is not held against who sent it."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdrt.control.patience import patience
from tests.fake_time import stand_still


async def test_who_does_not_answer_is_given_up_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with patience(0.05):
            await asyncio.Event().wait()
    assert 0.04 < time.monotonic() - began < 2


async def test_an_answer_that_is_there_when_we_look_again_is_in_time() -> None:
    async with patience(0.02):
        for _ in range(3):
            stand_still(0.05)
            await asyncio.sleep(0)


async def test_what_ended_has_no_limit_any_more() -> None:
    loop, faults = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _loop, fault: faults.append(fault))
    async with patience(0.005):
        pass
    with pytest.raises(ValueError, match="its own"):
        async with patience(0.005):
            raise ValueError("its own")
    later = asyncio.Event()
    loop.call_later(0.02, later.set)
    await later.wait()
    assert not faults
