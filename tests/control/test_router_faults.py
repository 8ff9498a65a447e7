"""What clients are told when a leg fails, and what becomes of the other leg."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import cast

import pytest
from aiohttp import web

from pdrt.control import askany
from pdrt.control.sse import DONE
from pdrt.data.peer import Health
from tests.control.fake_leader import (
    FakeLeader,
    Play,
    Seen,
    after,
    die,
    good,
    hang,
    prefilled,
    status,
    stream,
    text,
)
from tests.control.router_rig import Rig, rig, until

OK = good({"output": "x"})


# One pair: the first failure reaches the client, and the other leg is let go at once.


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, "too_long"),
        (429, "overloaded"),
        (500, "internal"),
        (503, "draining"),
        (504, "deadline"),
    ],
)
async def test_prefills_failure_is_the_answer_and_decode_is_let_go(code: int, error: str) -> None:
    """CASES 1 and 2: the router went on waiting for decode."""
    async with rig() as r:
        r.prefill[0].plays.append(status(code, "because of this", error))
        r.decode[0].plays.append(hang)
        got = await r.send()
        assert (got.status, got.error["code"]) == (code, error)
        assert got.error["message"] == "because of this"
        assert got.error["stage"] == "leader"
        assert got.headers["x-pd-path"] == "disagg"
        for seen in r.decode[0].seen:  # or it never got there
            await seen.gone.wait()
        await r.at_rest()


@pytest.mark.parametrize(
    ("code", "error"),
    [(400, "bad_request"), (409, "conflict"), (500, "internal"), (503, "draining")],
)
async def test_decodes_failure_is_the_answer_and_prefill_is_let_go(code: int, error: str) -> None:
    """CASES 43: decode refuses, and prefill is told at once."""
    async with rig() as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(status(code, "because of this", error))
        got = await r.send()
        assert (got.status, got.error["code"]) == (code, error)
        assert got.error["message"] == "because of this"
        for seen in r.prefill[0].seen:
            await seen.gone.wait()
        await r.at_rest()


async def test_a_full_decode_instance_is_429_with_its_own_retry_after() -> None:
    """CASES 79: present but full is 429."""
    async with rig() as r:
        r.decode[0].plays.append(status(429, "full", "overloaded", retry_after="7"))
        got = await r.send()
        assert (got.status, got.headers["retry-after"]) == (429, "7")
        assert r.instance(r.decode[0]).is_full


async def test_no_decode_instance_is_503_no_decode() -> None:
    """CASES 79: none present is 503."""
    async with rig() as r:
        await r.lose(r.decode[0])
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "no_decode")
        assert r.decode[0].target.http in got.error["message"]
        assert "retry-after" in got.headers


async def test_no_prefill_instance_is_503_no_prefill() -> None:
    async with rig() as r:
        await r.lose(r.prefill[0])
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "no_prefill")


async def test_an_answer_that_is_no_typed_error_becomes_one() -> None:
    async with rig() as r:
        r.prefill[0].plays.append(text(500, "Traceback: boom"))
        r.decode[0].plays.append(hang)
        got = await r.send()
        assert got.status == 500
        assert "boom" in got.error["message"]
        assert r.instance(r.prefill[0]).name in got.error["message"]


async def test_a_leader_that_refuses_the_cluster_token_is_not_the_clients_fault() -> None:
    async with rig() as r:
        r.decode[0].plays.append(status(401, "wrong token", "unauthorized"))
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "unavailable")


async def test_a_prefill_answer_that_vouches_for_nothing_is_a_failure() -> None:
    async with rig() as r:
        r.prefill[0].plays.append(good({"output": "I am no prefill instance"}))
        r.decode[0].plays.append(hang)
        assert (await r.send()).status == 500


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_leg_whose_process_dies_is_a_typed_error(side: str) -> None:
    async with rig() as r:
        r.prefill[0].plays.append(die if side == "prefill" else hang)
        r.decode[0].plays.append(die if side == "decode" else hang)
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "peer_lost")
        assert side in got.error["message"]
        await r.at_rest()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_refused_connection_counts_at_once(side: str) -> None:
    async with rig() as r:
        lost = r.prefill[0] if side == "prefill" else r.decode[0]
        other = r.decode[0] if side == "prefill" else r.prefill[0]
        other.plays.append(hang)
        await lost.stop()
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "peer_lost")
        assert r.instance(lost).health is Health.DEAD
        assert (await r.get("/ready")).status == 503
        assert (await r.send()).error["code"] == f"no_{side}"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_leg_on_a_silent_instance_ends_when_its_heartbeat_does(side: str) -> None:
    """A stopped process keeps its connections open: only the heartbeat tells."""
    async with rig() as r:
        stuck = r.prefill[0] if side == "prefill" else r.decode[0]
        r.prefill[0].plays.append(hang if side == "prefill" else prefilled())
        r.decode[0].plays.append(hang)
        asked = r.sending()
        await stuck.nth(1)
        r.instance(stuck).missed("no answer")
        r.instance(stuck).missed("no answer")
        got = await asked
        assert (got.status, got.error["code"]) == (503, "peer_lost")


async def test_the_deadline_is_the_routers_own_and_frees_both_legs() -> None:
    async with rig() as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(hang)
        asked = r.sending(timeout_s=3)
        legs = [await r.prefill[0].nth(1), await r.decode[0].nth(1)]
        assert legs[0].body["time_left_s"] == pytest.approx(3)
        assert r.time.alarms[-1].delay == pytest.approx(3)
        r.time.pass_deadlines()
        got = await asked
        assert (got.status, got.error["code"]) == (504, "deadline")
        for seen in legs:
            await seen.gone.wait()
        await r.at_rest()


async def test_one_bad_request_does_not_touch_the_others() -> None:
    """CASES 3."""
    gate = asyncio.Event()
    async with rig() as r:
        for _ in range(20):
            r.decode[0].plays.append(after(gate, OK))
        good_ones = [r.sending() for _ in range(20)]
        await r.decode[0].nth(20)
        r.prefill[0].plays.append(status(400, "bad", "too_long"))
        r.decode[0].plays.append(hang)
        assert (await r.send()).status == 400
        gate.set()
        assert {(await each).status for each in good_ones} == {200}
        await r.at_rest()


# In the middle of the answer.


async def _stream_of(r: Rig) -> tuple[int, bytes]:
    body = {"prompt": "hi", "stream": True}
    async with r.session.post(r.url + "/generate", json=body) as answer:
        return answer.status, await answer.read()


async def test_a_decode_that_dies_in_mid_stream_ends_it_with_an_error_event() -> None:
    async with rig() as r:
        r.decode[0].plays.append(stream(b"data: 1\n\n", ending="die"))
        code, body = await _stream_of(r)
        assert code == 200
        assert body.startswith(b"data: 1\n\nevent: error\ndata: {")
        assert b'"peer_lost"' in body
        assert body.endswith(b"\n\n")
        await r.at_rest()


async def test_an_error_event_never_hides_in_a_half_written_one() -> None:
    async with rig(policy={"backends": "plain"}) as r:
        r.decode[0].plays.append(stream(b"data: {half", ending="die"))
        _, body = await _stream_of(r)
        assert body.startswith(b"data: {half\n\nevent: error\n")


async def test_the_deadline_ends_a_stream_with_an_error_event() -> None:
    async with rig() as r:
        r.decode[0].plays.append(stream(b"data: 1\n\n", ending="hang"))
        asked = asyncio.create_task(_stream_of(r))
        await until(lambda: any(relay.first_byte_at is not None for relay in r.router.relays))
        r.time.pass_deadlines()
        _, body = await asked
        assert b"event: error" in body
        assert b'"deadline"' in body
        await r.decode[0].seen[0].gone.wait()


async def test_what_prefill_says_after_decodes_answer_has_begun_does_not_matter() -> None:
    gate, more = asyncio.Event(), asyncio.Event()
    async with rig() as r:
        r.prefill[0].plays.append(after(gate, status(500, "late", "internal")))
        r.decode[0].plays.append(stream(b"data: 1\n\n", more, b"data: 2\n\n", DONE))
        asked = asyncio.create_task(_stream_of(r))
        await until(lambda: any(relay.first_byte_at is not None for relay in r.router.relays))
        gate.set()
        await until(lambda: r.instance(r.prefill[0]).load.requests == 0)
        more.set()
        assert await asked == (200, b"data: 1\n\ndata: 2\n\n" + DONE)


def bytes_of(answer: bytes) -> Play:
    """These, in one write, and the connection's end."""

    async def play(request: web.Request, seen: Seen) -> web.StreamResponse:
        cast("asyncio.Transport", request.transport).write(answer)
        return await die(request, seen)

    return play


async def test_a_json_answer_cut_short_is_an_error_and_no_200() -> None:
    """Never HTTP 200 with half an answer in it."""

    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
    async with rig() as r:
        r.decode[0].plays.append(bytes_of(head + b"{"))
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "peer_lost")


# Two of a kind: what is lost before the first byte is tried elsewhere.


FAULTS = [
    pytest.param(die, id="dies"),
    pytest.param(status(500, "boom", "internal"), id="500"),
    pytest.param(status(503, "going", "draining"), id="draining"),
]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_lost_prefill_is_replaced_and_decode_keeps_its_reservation(fault: Play) -> None:
    answer = asyncio.Event()
    async with rig(prefill=2) as r:
        first, second = r.prefill  # the first one listed has its turn
        arrived = asyncio.Event()
        first.plays.append(after(arrived, fault))
        r.decode[0].plays.append(after(answer, OK))
        asked = r.sending()
        seen = await r.decode[0].nth(1)
        arrived.set()
        again = await second.nth(1)
        await until(lambda: len(r.decode[0].seen_rebinds) == 1)
        rebind = r.decode[0].seen_rebinds[0]
        assert again.room == rebind.room == seen.room
        assert again.attempt == rebind.attempt == 65536
        assert rebind.body["bootstrap_port"] == second.port
        assert not seen.gone.is_set()
        answer.set()
        assert (await asked).status == 200
        assert len(r.decode[0].seen) == 1
        await r.at_rest()


async def test_a_prefill_that_refuses_connections_is_replaced_too() -> None:
    answer = asyncio.Event()
    async with rig(prefill=2) as r:
        await r.prefill[0].stop()
        r.decode[0].plays.append(after(answer, OK))
        asked = r.sending()
        await r.prefill[1].nth(1)
        await until(lambda: len(r.decode[0].seen_rebinds) == 1)
        answer.set()
        assert (await asked).status == 200
        assert r.instance(r.prefill[0]).health is Health.DEAD


async def test_a_rebind_that_comes_before_its_room_is_asked_again() -> None:
    answer = asyncio.Event()
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(die)
        r.decode[0].rebinds.append(status(404, "no such room", "not_found"))
        r.decode[0].plays.append(after(answer, OK))
        asked = r.sending()
        await until(lambda: len(r.time.pauses) == 1)
        r.time.wake()
        await until(lambda: len(r.decode[0].seen_rebinds) == 2)
        answer.set()
        assert (await asked).status == 200


async def test_a_rebind_that_gets_no_answer_is_an_error() -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(die)
        r.decode[0].rebinds.append(die)
        r.decode[0].plays.append(hang)
        r.prefill[1].plays.append(hang)
        async with asyncio.timeout(10):
            got = await r.send()
        assert (got.status, got.error["code"]) == (503, "peer_lost")
        await r.at_rest()


async def test_a_rebind_that_never_finds_its_room_is_an_error() -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(die)
        r.decode[0].rebinds.append(status(404, "no such room", "not_found"))
        r.decode[0].plays.append(hang)
        r.prefill[1].plays.append(hang)
        asked = r.sending()
        await until(lambda: len(r.time.pauses) == 1)
        r.time.now += 60
        r.time.wake()
        got = await asked
        assert (got.status, got.error["code"]) == (503, "unavailable")
        assert "no such room" in got.error["message"]
        await r.at_rest()


async def test_a_rebind_that_decode_does_not_need_leaves_the_answer_to_decode() -> None:
    answer = asyncio.Event()
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(die)
        r.prefill[1].plays.append(hang)
        r.decode[0].rebinds.append(status(409, "it has its prompt", "conflict"))
        r.decode[0].plays.append(after(answer, OK))
        asked = r.sending()
        await (await r.prefill[1].nth(1)).gone.wait()
        answer.set()
        assert (await asked).status == 200


async def test_prefill_instances_are_not_tried_for_ever() -> None:
    async with rig(prefill=5) as r:
        for leader in r.prefill:
            leader.plays.append(status(500, leader.target.http, "internal"))
        r.decode[0].plays.append(hang)
        got = await r.send()
        assert got.status == 500
        assert sum(len(leader.seen) for leader in r.prefill) == 3
        await r.at_rest()


@pytest.mark.parametrize("code", [400, 413, 422, 429, 504])
async def test_what_would_be_the_same_elsewhere_is_not_tried_again(code: int) -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(text(code, "no"))
        r.decode[0].plays.append(hang)
        assert (await r.send()).status == code
        assert not r.prefill[1].seen


async def test_a_pinned_prefill_instance_is_not_replaced() -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(die)
        r.decode[0].plays.append(hang)
        port = r.prefill[0].port
        got = await r.send(bootstrap_host="127.0.0.1", bootstrap_port=port)
        assert got.status == 503
        assert not r.prefill[1].seen


async def test_a_decode_lost_before_its_answer_is_replaced_in_a_fresh_room() -> None:
    async with rig(decode=2) as r:
        gate = asyncio.Event()
        r.decode[0].plays.append(after(gate, die))
        r.prefill[0].plays.append(hang)
        asked = r.sending()
        first = await r.decode[0].nth(1)
        await r.prefill[0].nth(1)
        gate.set()
        assert (await asked).status == 200
        assert r.decode[1].seen[0].room != first.room
        assert r.prefill[0].seen[0].gone.is_set()
        assert r.prefill[0].seen[1].room == r.decode[1].seen[0].room
        await r.at_rest()


async def test_a_transfer_that_failed_is_tried_with_another_prefill() -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(status(503, "bytes lost", "transfer_failed"))
        assert (await r.send()).status == 200
        assert len(r.prefill[1].seen) == 1


DIED = "decode worker at tcp://10.0.0.7:1: its process has died"


async def test_a_prefill_that_tells_of_decodes_death_is_asked_again_with_another_decode() -> None:
    """Whoever is left of a transfer may say so first; with one prefill nobody else can serve."""
    async with rig(decode=2) as r:
        r.prefill[0].plays.append(status(503, DIED, "peer_lost", "decode"))
        r.decode[0].plays.append(hang)
        assert (await r.send()).status == 200
        assert len(r.decode[1].seen) == 1
        assert len(r.prefill[0].seen) == 2
        assert r.decode[0].seen[0].gone.is_set()
        await r.at_rest()


async def test_a_decode_that_tells_of_prefills_death_is_served_by_another_prefill() -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(status(503, "rank 0: it died", "peer_lost", "prefill"))
        assert (await r.send()).status == 200
        assert len(r.prefill[1].seen) == 1
        await r.at_rest()


@pytest.mark.parametrize("stage", ["dispatch", "prefill"])
async def test_a_prefill_that_tells_of_its_own_loss_is_not_asked_again(stage: str) -> None:
    async with rig(prefill=2, decode=2) as r:
        r.prefill[0].plays.append(status(503, "its worker died", "peer_lost", stage))
        assert (await r.send()).status == 200
        assert (len(r.prefill[1].seen), len(r.decode[1].seen)) == (1, 0)


async def test_a_hybrid_lost_before_its_answer_is_replaced() -> None:
    async with rig(prefill=0, decode=0, hybrid=2) as r:
        r.hybrid[0].plays.append(die)
        assert (await r.send()).status == 200
        assert len(r.hybrid[1].seen) == 1
        await r.at_rest()


async def test_one_of_two_decodes_refusing_connections_costs_no_request() -> None:
    async with rig(decode=2) as r:
        await r.decode[0].stop()
        for _ in range(6):
            assert (await r.send()).status == 200


# Plain backends: decode's answer proves nothing about prefill.


async def test_a_plain_decodes_answer_is_held_until_prefill_is_known() -> None:
    gate = asyncio.Event()
    async with rig(policy={"backends": "plain"}) as r:
        r.prefill[0].plays.append(after(gate, text(400, "no")))
        r.decode[0].plays.append(stream(b"data: 1\n\n", ending="hang"))
        asked = r.sending(stream=True)
        await until(lambda: any(relay.route.state == "held" for relay in r.router.relays))
        gate.set()
        assert (await asked).status == 400
        await r.decode[0].seen[0].gone.wait()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_redirect_is_told_as_what_it_was(side: str) -> None:
    async with rig(policy={"backends": "plain"}) as r:
        getattr(r, side)[0].plays.append(text(302, "elsewhere"))
        got = await r.send()
        assert (got.status, got.error["code"]) == (502, "unavailable")
        assert f"{side} " in str(got.error["message"])
        assert "answered 302" in str(got.error["message"])
        assert str(got.error["stage"]).startswith(side)


@pytest.mark.parametrize(
    ("code", "told", "error"),
    [(404, 404, "not_found"), (500, 500, "internal"), (403, 503, "unavailable")],
)
async def test_a_plain_servers_refusal_of_other_questions_is_typed(
    code: int, told: int, error: str
) -> None:
    async with rig(policy={"backends": "plain"}) as r:
        for server in (*r.prefill, *r.decode):
            server.plays.append(text(code, "no such page"))
        got = await r.send(path="/tokenize")
        assert (got.status, got.error["code"]) == (told, error)
        assert f"answered {code}: no such page" in str(got.error["message"])
        r.prefill[0].plays.clear()
        r.decode[0].plays.clear()
        assert (await r.send(path="/tokenize")).status == 200


RETRY_AFTER = [("17", "17"), ("99999999", "3600"), ("9" * 5000, "1"), ("soon", "1"), ("-3", "1")]


@pytest.mark.parametrize(("said", "told"), RETRY_AFTER)
async def test_when_to_come_again_is_told_in_seconds_or_by_us(said: str, told: str) -> None:
    async with rig() as r:
        r.decode[0].plays.append(status(429, "full", "overloaded", retry_after=said))
        got = await r.send()
        assert (got.status, got.headers["retry-after"]) == (429, told)


@pytest.mark.parametrize(("after", "told"), RETRY_AFTER)
async def test_a_question_refused_as_one_too_many_leaves_the_server_in_use(
    after: str, told: str
) -> None:
    async def full(_request: web.Request, _seen: Seen) -> web.StreamResponse:
        return web.Response(status=429, text="slow down", headers={"retry-after": after})

    async with rig(policy={"backends": "plain"}) as r:
        for server in (*r.prefill, *r.decode):
            server.plays.append(full)
        got = await r.send(path="/tokenize")
        assert (got.status, got.error["code"]) == (429, "overloaded")
        assert got.headers["retry-after"] == told
        assert not any(each.is_full for each in r.router.fleet.instances)


@pytest.mark.parametrize(("code", "body"), [(200, "<html>"), (200, ""), (204, "")])
async def test_what_is_no_answer_to_a_question_is_told_as_that(code: int, body: str) -> None:
    async with rig(policy={"backends": "plain"}) as r:
        for server in (*r.prefill, *r.decode):
            server.plays.append(text(code, body))
        got = await r.send(path="/tokenize")
        assert (got.status, got.error["code"]) == (502, "unavailable")


async def test_a_question_that_one_does_not_answer_is_put_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(askany, "EACH_S", 0.05)
    async with rig(policy={"backends": "plain"}) as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(good({"tokens": [1]}))
        assert (await r.send(path="/tokenize")).status == 200
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(hang)
        got = await r.send(path="/tokenize")
        assert (got.status, got.error["code"]) == (503, "peer_lost")


async def test_a_whole_answer_to_who_asked_for_a_stream_is_checked_whole() -> None:
    async def cut(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = 100
        await response.prepare(request)
        await response.write(b'{"half": ')
        return await die(request, seen)

    async with rig(policy={"backends": "plain"}) as r:
        r.decode[0].plays.append(cut)
        got = await r.send(stream=True)
        assert (got.status, got.error["code"]) == (503, "peer_lost")


async def test_a_stream_nobody_asked_for_is_passed_on_as_it_comes() -> None:
    gate = asyncio.Event()
    async with rig(policy={"backends": "plain"}) as r:
        r.decode[0].plays.append(stream(b"data: 1\n\n", gate, b"data: 2\n\n"))
        async with r.session.post(r.url + "/generate", json={"prompt": "hi"}) as answer:
            assert await answer.content.readexactly(9) == b"data: 1\n\n"
            gate.set()
            assert await answer.read() == b"data: 2\n\n"


async def test_a_lost_plain_prefill_is_replaced_with_both_legs_anew() -> None:
    async with rig(prefill=2, policy={"backends": "plain"}) as r:
        r.prefill[0].plays.append(die)
        assert (await r.send()).status == 200
        assert not r.decode[0].seen_rebinds
        assert r.decode[0].seen[-1].room == r.prefill[1].seen[0].room


@pytest.mark.parametrize("last", [b"data: 2\n\n", b"data: {half", b"data: {half\n"])
async def test_a_plain_stream_that_is_passed_on_unread_ends_with_an_event_of_its_own(
    last: bytes,
) -> None:
    came = asyncio.Event(), asyncio.Event()
    told = b"data: 0\n\n", b"data: 1\n\n", last
    async with rig(policy={"backends": "plain"}) as r:
        r.decode[0].plays.append(stream(told[0], came[0], told[1], came[1], last, ending="die"))
        body = {"prompt": "hi", "stream": True}
        async with r.session.post(r.url + "/generate", json=body) as answer:
            for chunk, event in zip(told, came, strict=False):
                assert await answer.content.readexactly(len(chunk)) == chunk
                event.set()
            rest = await answer.content.read()
        gap = b"" if last.endswith(b"\n\n") else b"\n\n"
        assert rest.startswith(last + gap + b"event: error\ndata: {")
        assert rest.endswith(b"\n\n")
        await r.at_rest()


# What servers that are not pdrt may do.

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def plain_rig(hybrid: int) -> AbstractAsyncContextManager[Rig]:
    pair = 1 - hybrid
    return rig(prefill=pair, decode=pair, hybrid=hybrid, policy={"backends": "plain"})


@pytest.mark.parametrize("hybrid", [0, 1])
@pytest.mark.parametrize("length", [9, 12, 500])
async def test_a_stream_that_says_its_length_still_ends_whole(length: int, hybrid: int) -> None:
    """An error event is no part of that length, and the connection stays good for the next."""
    async with plain_rig(hybrid) as r:
        server = (r.hybrid or r.decode)[0]
        server.plays.append(bytes_of(EVENTS + b"content-length: %d\r\n\r\ndata: 1\n\n" % length))
        code, body = await _stream_of(r)
        assert code == 200
        assert body.startswith(b"data: 1\n\n")
        assert (b"event: error" in body) == (length > 9)
        server.plays.append(stream(b"data: 2\n\n"))
        assert await _stream_of(r) == (200, b"data: 2\n\n")
        await r.at_rest()


@pytest.mark.parametrize("hybrid", [0, 1])
@pytest.mark.parametrize("more", [b"EVIL", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nEVIL"])
async def test_what_follows_an_answer_is_not_of_it(more: bytes, hybrid: int) -> None:
    async with plain_rig(hybrid) as r:
        server = (r.hybrid or r.decode)[0]
        chunks = b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n"
        server.plays.append(bytes_of(EVENTS + chunks + more))
        assert await _stream_of(r) == (200, b"data: 1\n\n")
        json = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        server.plays.append(bytes_of(json + more))
        got = await r.send()
        assert (got.status, got.body) == (200, b"{}")
        await r.at_rest()


@pytest.mark.parametrize("hybrid", [0, 1])
async def test_a_long_answer_need_not_say_its_length(hybrid: int) -> None:
    body = b'{"text": "%b"}' % (b"x" * (5 << 20))

    async def play(request: web.Request, _seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(body)
        await response.write_eof()
        return response

    async with plain_rig(hybrid) as r:
        (r.hybrid or r.decode)[0].plays.append(play)
        got = await r.send()
        assert (got.status, got.body == body) == (200, True)
        await r.at_rest()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_whoever_failed_and_has_been_heard_of_since_may_take_over_again(
    side: str, is_stream: bool
) -> None:
    """Two are lost one after the other, the first of which is well again by then."""
    is_well = asyncio.Event()
    async with rig(prefill=2, decode=2, timeouts={"heartbeat_s": 3600.0}) as r:
        lossy, others = (r.prefill, r.decode) if side == "prefill" else (r.decode, r.prefill)
        whole = stream(b"data: {}\n\n" + DONE) if is_stream else OK
        answer = {"prefill": prefilled(), "decode": whole}
        for leader in lossy:
            leader.plays.append(hang)
        for leader in others:
            leader.plays.extend([after(is_well, answer[leader.role])] * 3)
        asked = r.sending(prompt="hi", stream=is_stream)
        first = await one_asked(lossy)
        await r.lose(first)
        second = await one_asked([leader for leader in lossy if leader is not first])
        await r.find(first)
        await r.ready()
        first.plays.append(answer[side])
        await r.lose(second)
        await until(lambda: len(first.seen) == 2)
        is_well.set()
        assert (await asked).status == 200
        await r.at_rest()


async def one_asked(leaders: Sequence[FakeLeader]) -> FakeLeader:
    await until(lambda: any(leader.seen for leader in leaders))
    return next(leader for leader in leaders if leader.seen)
