"""What a request was made of goes when it ends: no collection needs to look for it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pdrt.control.exchange import PrefillLeg
from pdrt.control.instances import Hold
from pdrt.control.passon import DecodeLeg
from pdrt.control.relay import Relay
from pdrt.control.wire.client import Call
from pdrt.control.wire.exchange import Exchange
from tests.control.fake_leader import good, status, stream
from tests.control.router_rig import rig

_PARTS = (Relay, PrefillLeg, DecodeLeg, Hold, Call, Exchange)


def alive() -> list[str]:
    """By type alone: to ask some objects of other modules for their class makes them warn."""
    return [type(each).__name__ for each in gc.get_objects() if type(each) in _PARTS]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_good", [True, False])
async def test_reference_counts_alone_free_a_request(*, is_stream: bool, is_good: bool) -> None:
    async with rig() as r:
        play = stream(b"data: 1\n\n") if is_stream else good({"output": "x"})
        gc.collect()
        gc.disable()
        try:
            r.decode[0].plays.append(play if is_good else status(400))
            await r.send(stream=is_stream)
            await r.at_rest()
            r.time.alarms.clear()  # which keep what would ring
            assert alive() == []
        finally:
            gc.enable()


async def test_and_a_plain_stream_whose_chunks_are_passed_on_unread() -> None:
    async with rig(policy={"backends": "plain"}) as r:
        came = asyncio.Event()
        gc.collect()
        gc.disable()
        try:
            r.decode[0].plays.append(stream(b"data: 1\n\n", came, b"data: 2\n\n"))
            body = {"prompt": "hi", "stream": True}
            async with r.session.post(r.url + "/generate", json=body) as answer:
                await answer.content.readexactly(9)
                came.set()
                await answer.read()
            await r.at_rest()
            r.time.alarms.clear()
            assert alive() == []
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "hi", "model": "nobody's"}, 404),
        ({"prompt": "hi", "no such field": 1}, 400),
        ({"prompt": ["hi", "you", "there"]}, 200),
    ],
)
async def test_and_one_that_is_refused_or_has_several_prompts(
    body: dict[str, object], status: int
) -> None:
    async with rig() as r:
        gc.collect()
        gc.disable()
        try:
            choice = {"index": 0, "text": "x", "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            r.decode[0].plays += [good({"choices": [choice], "usage": usage})] * 3
            got = await r.send(body, path="/v1/completions")
            assert got.status == status
            await r.at_rest()
            r.time.alarms.clear()
            assert alive() == []
        finally:
            gc.enable()
