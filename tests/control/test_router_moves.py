"""Streams whose decode instance is lost: who goes on, with what, and what the client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from pdrt.control.moving import LOOK_EVERY_S
from pdrt.control.sse import DONE
from tests.control.fake_leader import FakeLeader, Play, after, die, good, hang, status, stream
from tests.control.router_rig import Rig, rig, until

ENDS = {"done", "die", "hang"}


def told(token: int, finish: str = "-", index: int = 0, cached: int = 4) -> bytes:
    """An event that tells one token, as a leader marks it."""
    return f":t {index} 1 {cached} {finish} {token}\n".encode() + said(token)


def said(*tokens: int) -> bytes:
    """The same as the client reads it."""
    return b"".join(f'data: {{"output_ids":[{token}]}}\n\n'.encode() for token in tokens)


def failed(code: str) -> bytes:
    error = {"error": {"type": "t", "code": code, "message": "why", "stage": "decode"}}
    return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"


def used(r: Rig) -> list[FakeLeader]:
    """The decode side's leaders that were asked, in order."""
    return [leader for leader in (*r.decode, *r.hybrid) if leader.seen]


def everywhere(r: Rig, *plays: Play) -> None:
    """Whoever is asked first plays the first, and so on: the order is the policy's."""
    left = list(plays)

    async def play(request: Any, seen: Any) -> Any:
        return await left.pop(0)(request, seen)

    for leader in (*r.decode, *r.hybrid):
        leader.plays.extend([play] * len(plays))


def losses(tell: Callable[[int], bytes]) -> dict[str, Play]:
    """After two events."""
    return {
        "connection": stream(tell(1), tell(2), ending="die"),
        "half an event": stream(tell(1), tell(2), tell(3)[:-1], ending="die"),
        "half a mark": stream(tell(1), tell(2), b":t 0", ending="die"),
        "its worker": stream(tell(1), tell(2), failed("peer_lost")),
        "at once with what it told": stream(tell(1) + tell(2) + failed("peer_lost")),
        "its KV": stream(tell(1), tell(2), failed("bad_logits")),
        "an end without one": stream(tell(1), tell(2)),
        "nonsense": stream(tell(1), tell(2), b":t what\n"),
    }


LOSSES = losses(told)
REST = stream(told(3, cached=0), told(4, "length", cached=0), DONE)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["pair", "hybrid"])
async def test_another_instance_goes_on_and_the_client_reads_one_answer(
    loss: str, kind: str
) -> None:
    prefill, decode, hybrid = (1, 2, 0) if kind == "pair" else (0, 0, 2)
    async with rig(prefill, decode, hybrid) as r:
        everywhere(r, LOSSES[loss], REST)
        got = await r.send(stream=True, bootstrap_room=77)
        assert got.status == 200
        assert got.body == said(1, 2, 3, 4) + DONE
        assert got.headers["x-pd-path"] == ("disagg" if kind == "pair" else "local")
        first, second = sorted((leader.seen[0].body for leader in used(r)), key=len)
        assert second["resumed"]["choices"] == [{"ids": [1, 2]}]
        assert second["resumed"]["cached_tokens"] == 4
        assert first["bootstrap_room"] != second["bootstrap_room"]
        for name in ("client_room", "created", "seed", "path", "request_id", "marks"):
            names = first if name != "seed" else first.get("sampling_params", first)
            others = second if name != "seed" else second.get("sampling_params", second)
            assert names[name] == others[name]
        assert sum(len(leader.seen) for leader in r.prefill) == prefill  # decode asks it
        metrics = (await r.get("/metrics")).body.decode()
        assert "pdrt_router_moved_total 1.0" in metrics
        await r.at_rest()


async def test_only_the_streams_own_end_was_missing() -> None:
    async with rig(decode=2) as r:
        everywhere(r, stream(told(1), told(2, "length"), ending="die"))
        got = await r.send(stream=True)
        assert got.body == said(1, 2) + DONE
        assert len(used(r)) == 1


async def test_each_of_two_sequences_is_told_where_it_was() -> None:
    async with rig(decode=2) as r:
        first = stream(told(1), told(5, index=1), told(6, "stop", index=1), ending="die")
        everywhere(r, first, stream(told(2, "length"), DONE))
        got = await r.send(stream=True, sampling_params={"n": 2})
        assert got.body == said(1, 5, 6, 2) + DONE
        (leg,) = (s.body for leader in used(r) for s in leader.seen if "resumed" in s.body)
        assert leg["resumed"]["choices"] == [{"ids": [1]}, {"ids": [5, 6], "finish": "stop"}]


async def test_a_stream_moves_as_often_as_policy_allows() -> None:
    async with rig(decode=5, policy={"max_moves": 2}) as r:
        everywhere(r, *(stream(told(i), ending="die") for i in range(5)))
        got = await r.send(stream=True)
        assert got.body.startswith(said(0, 1, 2))
        assert b"event: error" in got.body
        assert b"peer_lost" in got.body
        await r.at_rest()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("migrate", [True, False])
async def test_a_stream_that_may_not_move_ends_with_an_error_and_counts_as_one(
    loss: str, migrate: bool
) -> None:
    """Its leader does not say what it tells, or moving is switched off."""
    async with rig(decode=2, policy={"migrate": migrate}) as r:
        everywhere(r, losses(said)[loss], REST)
        got = await r.send(stream=True)
        begun, error = got.body.split(b"event: error\ndata: ")
        assert begun == said(1, 2)
        code = "bad_logits" if loss == "its KV" else "peer_lost"
        assert json.loads(error)["error"]["code"] == code
        (leader,) = used(r)
        assert ("marks" in leader.seen[0].body) == migrate
        metrics = (await r.get("/metrics")).body.decode()
        assert f'pdrt_router_errors_total{{code="{code}"}} 1.0' in metrics
        assert r.instance(leader).breaker.faults
        await r.at_rest()


@pytest.mark.parametrize("code", ["bad_request", "deadline", "too_long"])
async def test_an_error_that_is_the_same_everywhere_is_told(code: str) -> None:
    async with rig(decode=2) as r:
        everywhere(r, stream(told(1), failed(code)), REST)
        got = await r.send(stream=True)
        assert got.body.startswith(said(1) + b"event: error\n")
        assert json.loads(got.body.split(b"data: ")[-1])["error"]["code"] == code
        assert len(used(r)) == 1


@pytest.mark.parametrize("refusal", [status(429), status(400), status(503), die])
async def test_one_that_does_not_take_it_is_passed_by(refusal: Play) -> None:
    async with rig(decode=3) as r:
        everywhere(r, stream(told(1), told(2), ending="die"), refusal, REST)
        got = await r.send(stream=True)
        assert got.body == said(1, 2, 3, 4) + DONE
        assert len(used(r)) == 3


SILENT_LOSSES = {
    "half an event": stream(told(1)[:-1], ending="die"),
    "its worker": stream(failed("peer_lost")),
    "its worker, a byte at a time": stream(*map(bytes, zip(failed("peer_lost"), strict=True))),
    "an end": stream(),
    "a status": status(503),
}


@pytest.mark.parametrize("loss", SILENT_LOSSES)
@pytest.mark.parametrize("migrate", [True, False])
async def test_before_the_first_event_the_request_starts_over(loss: str, migrate: bool) -> None:
    """Its client has heard nothing: a fresh room, both legs, and no word of a move."""
    async with rig(decode=2, policy={"migrate": migrate}) as r:
        everywhere(r, SILENT_LOSSES[loss], stream(told(7, "stop") if migrate else said(7), DONE))
        got = await r.send(stream=True)
        assert got.body == said(7) + DONE
        assert len(r.prefill[0].seen) == 2
        assert not any("resumed" in s.body for leader in used(r) for s in leader.seen)


@pytest.mark.parametrize("migrate", [True, False])
async def test_without_another_instance_its_error_has_its_own_status(migrate: bool) -> None:
    """Never HTTP 200 with nothing but an error in it."""
    async with rig(policy={"migrate": migrate}) as r:
        r.decode[0].plays.append(stream(failed("peer_lost")))
        got = await r.send(stream=True)
        assert (got.status, got.error["code"]) == (503, "peer_lost")
        await r.at_rest()


async def test_what_is_held_for_prefills_part_is_told_before_the_move() -> None:
    async with rig(decode=2) as r:
        r.prefill[0].plays.append(
            _telling({"prompt_logprobs": []}),
        )
        everywhere(r, stream(told(1) + told(2), ending="die"), REST)
        got = await r.send(stream=True, sampling_params={"prompt_logprobs": 0})
        opening, rest = got.body.split(b"\n\n", 1)
        assert b"prompt_logprobs" in opening
        assert rest == said(1, 2, 3, 4) + DONE


async def test_what_is_held_when_its_instance_is_lost_is_told_before_the_move() -> None:
    gate = asyncio.Event()
    async with rig(decode=2) as r:
        r.prefill[0].plays.append(after(gate, _telling({"prompt_logprobs": []})))
        everywhere(r, stream(told(1) + told(2), ending="hang"), REST)
        asked = r.sending(stream=True, sampling_params={"prompt_logprobs": 0})
        await until(lambda: bool(used(r)))
        (relay,) = r.router.relays
        await until(lambda: relay.route.state == "held")
        r.instance(used(r)[0]).died("its connections are open, and nothing comes")
        gate.set()
        async with asyncio.timeout(10):
            got = await asked
        assert got.body.split(b"\n\n", 1)[1] == said(1, 2, 3, 4) + DONE
        await r.at_rest()


def _telling(prompt: Any) -> Play:
    usage = {"prompt_tokens": 3, "cached_tokens": 0}
    return good({"status": "prefilled", "model": "tiny", "prompt": prompt, "usage": usage})


# Nobody else.


async def stranded(r: Rig) -> aiohttp.ClientResponse:
    """A stream, a while after its beginning, that has lost the only decode instance there is."""
    later = asyncio.Event()
    r.decode[0].plays.append(stream(told(1), later, told(2), ending="hang"))
    body = {"prompt": "hi", "stream": True}
    answer = await r.session.post(f"{r.url}/generate", json=body)
    assert await answer.content.readuntil(b"\n\n") == said(1)
    r.time.now += 10
    later.set()
    while (await answer.content.readuntil(b"\n\n")) != said(2):
        pass
    await r.lose(r.decode[0])
    await until(lambda: any(relay.route.state == "stranded" for relay in r.router.relays))
    return answer


def look_again(r: Rig) -> None:
    alarm = next(alarm for alarm in reversed(r.time.alarms) if alarm.delay == LOOK_EVERY_S)
    alarm.ring()


async def test_a_stream_waits_for_an_instance_that_comes_back() -> None:
    async with rig() as r:
        answer = await stranded(r)
        r.decode[0].plays.append(REST)
        await r.find(r.decode[0])
        await r.ready()
        look_again(r)
        assert await answer.read() == said(3, 4) + DONE
        await r.at_rest()


async def test_it_does_not_wait_for_ever() -> None:
    async with rig(timeouts={"move_s": 1.5, "heartbeat_s": 3600.0}) as r:
        answer = await stranded(r)
        r.time.now += 1.4
        look_again(r)
        r.time.now += 0.2
        look_again(r)
        body = await answer.read()
        assert b"event: error" in body
        assert b"peer_lost" in body
        await r.at_rest()


async def test_nor_for_longer_when_one_that_came_back_refuses() -> None:
    """The time is that since the loss, however often somebody seems to be there."""
    async with rig(timeouts={"move_s": 1.5, "heartbeat_s": 3600.0}) as r:
        answer = await stranded(r)
        r.time.now += 1.4
        r.decode[0].plays += [status(503)]
        await r.find(r.decode[0])
        await r.ready()
        look_again(r)
        await until(lambda: len(r.decode[0].seen) == 2)
        await r.lose(r.decode[0])
        r.time.now += 0.2
        look_again(r)
        await until(lambda: not r.router.relays)
        assert b"event: error" in await answer.read()


@pytest.mark.parametrize("silent", ["instance", "worker"])
async def test_it_does_not_wait_after_one_that_fell_silent(silent: str) -> None:
    """Its fault is old by the time that it is noticed: a client hears within 2 s of it."""
    noticed = asyncio.Event()
    play = stream(told(1), told(2), noticed, failed("peer_lost"), ending="hang")
    async with rig(timeouts={"move_s": 1.5, "heartbeat_s": 3600.0}) as r:
        r.decode[0].plays.append(play)
        body = {"prompt": "hi", "stream": True}
        answer = await r.session.post(f"{r.url}/generate", json=body)
        while (await answer.content.readuntil(b"\n\n")) != said(2):
            pass
        r.time.now += 1.6
        if silent == "worker":
            noticed.set()
        else:
            for _miss in range(2):
                r.instance(r.decode[0]).missed("no answer")
        told_last = await answer.read()
        assert b"event: error" in told_last
        error = json.loads(told_last.split(b"data: ")[-1])["error"]
        assert (error["code"], error["stage"]) == ("peer_lost", "decode")
        await r.at_rest()


async def test_a_client_that_leaves_meanwhile_leaves_nothing() -> None:
    async with rig() as r:
        answer = await stranded(r)
        answer.close()
        await r.at_rest()
        assert all(alarm.is_off for alarm in r.time.alarms)


async def test_a_client_that_leaves_during_the_move_ends_the_new_leg() -> None:
    async with rig(decode=2) as r:
        everywhere(r, stream(told(1), ending="die"), hang)
        body = {"prompt": "hi", "stream": True}
        answer = await r.session.post(f"{r.url}/generate", json=body)
        await until(lambda: any(relay.route.state == "moving" for relay in r.router.relays))
        await until(lambda: len(used(r)) == 2)
        answer.close()
        (moved,) = (s for leader in used(r) for s in leader.seen if "resumed" in s.body)
        await moved.gone.wait()
        await r.at_rest()
