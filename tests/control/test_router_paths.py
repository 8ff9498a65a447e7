"""Which path serves a request: both sides, decode alone, a hybrid in their place, or nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from pdrt.config import RouterConfig
from pdrt.control.sse import DONE
from tests.control.fake_leader import Play, after, die, good, hang, status, stream
from tests.control.router_rig import Rig, rig
from tests.control.test_router_merge import told

SHORT, LONG = [1] * 100, [1] * 101


async def allowing(r: Rig) -> None:
    """The decode instances may compute prompts, and the router has heard so."""
    for leader in r.decode:
        leader.status["local_prefill"] = True
    await r.look()


def local(**policy: Any) -> dict[str, Any]:
    return {"policy": {"local_prefill_tokens": 100, **policy}}


async def test_a_short_prompt_is_left_to_decode_and_says_so() -> None:
    async with rig(**local()) as r:
        await allowing(r)
        r.decode[0].plays.append(good({"output": "x"}))
        got = await r.send(prompt=SHORT, sampling_params={"prompt_logprobs": 0})
        assert (got.status, got.headers["x-pd-path"]) == (200, "local")
        assert not r.prefill[0].seen
        leg = r.decode[0].seen[0].body
        assert leg["path"] == "local"
        assert "bootstrap_host" not in leg
        assert leg["sampling_params"]["prompt_logprobs"] == 0  # it has the prompt
        metrics = (await r.get("/metrics")).body.decode()
        assert 'pdrt_router_local_total{reason="short"} 1.0' in metrics
        assert (
            'pdrt_router_requests_total{path="local",route="/generate",status="200"} 1.0' in metrics
        )
        await r.at_rest()


async def test_a_longer_one_and_one_that_is_pinned_go_both_ways() -> None:
    async with rig(**local()) as r:
        await allowing(r)
        long = await r.send(prompt=LONG)
        pinned = r.prefill[0]
        host = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pinned.port}
        chosen = await r.send({"prompt": SHORT, **host})
        assert [got.headers["x-pd-path"] for got in (long, chosen)] == ["disagg"] * 2
        assert len(pinned.seen) == 2


@pytest.mark.parametrize("way", ["decode may not", "router does not"])
async def test_both_have_to_want_it(way: str) -> None:
    async with rig(**(local() if way == "decode may not" else {})) as r:
        if way != "decode may not":
            await allowing(r)
        assert (await r.send(prompt=SHORT)).headers["x-pd-path"] == "disagg"


@pytest.mark.parametrize("loss", [die, status(503, error="peer_lost")])
async def test_when_decode_fails_alone_both_sides_do_it(loss: Any) -> None:
    async with rig(decode=2, **local()) as r:
        await allowing(r)
        for leader in r.decode:
            leader.plays.append(loss if leader is r.decode[0] else good({"output": "x"}))
        both = [await r.send(prompt=SHORT) for _ in range(2)]
        assert [got.status for got in both] == [200, 200]
        assert {got.headers["x-pd-path"] for got in both} == {"local", "disagg"}
        await r.at_rest()


LOSSES: dict[str, tuple[str, Play, str]] = {
    "prefill dies": ("prefill", die, "peer_lost"),
    "prefill fails": ("prefill", status(500, error="internal"), "internal"),
    "decode dies": ("decode", die, "peer_lost"),
    "decode's worker dies": ("decode", status(503, error="peer_lost"), "peer_lost"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_hybrid_takes_over_from_a_pair_before_the_answer(
    loss: str, is_stream: bool
) -> None:
    """All of it, prefill's part too, and it says that it stepped in and why."""
    side, play, why = LOSSES[loss]
    body = {"prompt": "ab", "echo": True, "stream": is_stream, "request_id": "r-1"}
    said = good({"choices": []}) if not is_stream else stream(b"data: {}\n\n" + DONE)
    async with rig(hybrid=1) as r:
        for leader in (*r.prefill, *r.decode):
            leader.plays.append(play if leader.role == side else hang)
        r.hybrid[0].plays.append(said)
        got = await r.send(body, path="/v1/completions")
        assert (got.status, got.headers["x-pd-path"]) == (200, f"fallback:{why}")
        assert got.body == (b"data: {}\n\n" + DONE if is_stream else b'{"choices": []}')
        leg = r.hybrid[0].seen[0].body
        assert (leg["path"], leg["echo"]) == (f"fallback:{why}", True)
        assert "bootstrap_host" not in leg
        await r.at_rest()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_strict_lets_none_take_over_either(side: str) -> None:
    async with rig(hybrid=1, policy={"strict": True}) as r:
        for leader in (*r.prefill, *r.decode):
            leader.plays.append(die if leader.role == side else hang)
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "peer_lost")
        assert not r.hybrid[0].seen
        await r.at_rest()


async def test_a_pair_that_has_come_takes_over_from_the_hybrid_in_its_place() -> None:
    gate = asyncio.Event()
    async with rig(hybrid=1) as r:
        await r.lose(r.decode[0])
        r.hybrid[0].plays.append(after(gate, die))
        asked = r.sending(sampling_params={"prompt_logprobs": 0})
        await r.hybrid[0].nth(1)
        await r.find(r.decode[0])
        await r.ready()
        r.prefill[0].plays.append(told({"prompt_logprobs": []}))
        r.decode[0].plays.append(good({"output": "x"}))
        gate.set()
        got = await asked
        assert (got.status, got.headers["x-pd-path"]) == (200, "disagg")
        assert got.json == {"output": "x", "prompt_logprobs": []}
        await r.at_rest()


async def test_strict_lets_no_hybrid_step_in() -> None:
    """CASES 81: 503 instead, with the reason."""
    async with rig(hybrid=1, policy={"strict": True}) as r:
        assert (await r.send()).headers["x-pd-path"] == "disagg"
        await r.lose(r.prefill[0])
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "no_prefill")
        assert not r.hybrid[0].seen


async def test_what_a_hybrid_says_in_its_place_is_what_the_header_says() -> None:
    async with rig(hybrid=1) as r:
        await r.lose(r.prefill[0])
        got = await r.send()
        assert got.headers["x-pd-path"] == "fallback:no_prefill"
        assert r.hybrid[0].seen[0].body["path"] == "fallback:no_prefill"


async def test_hybrids_alone_are_no_fallback_whatever_is_strict() -> None:
    async with rig(prefill=0, decode=0, hybrid=1, policy={"strict": True}) as r:
        assert (await r.send()).headers["x-pd-path"] == "local"


def test_strict_and_prompts_that_decode_computes_contradict_each_other() -> None:
    targets = {"prefill": [{"http": "a:1"}], "decode": [{"http": "a:2"}]}
    with pytest.raises(ValidationError, match="local_prefill_tokens = 0"):
        RouterConfig.model_validate(
            {**targets, "policy": {"strict": True, "local_prefill_tokens": 9}}
        )
