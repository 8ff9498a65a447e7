"""The overview of a real router between scripted leaders, and the page at `/`."""

from __future__ import annotations

import asyncio
import json

from pdrt.control.dashboard.serve import FRESH_S
from pdrt.control.http import Json
from pdrt.control.overview import Running
from pdrt.control.screen import MOST_ERRORS
from pdrt.control.sse import DONE
from tests.control.fake_leader import after, good, hang, status, stream
from tests.control.router_rig import Rig, rig, until


async def view(r: Rig, query: str = "") -> Json:
    """Half a second later."""
    r.time.now += FRESH_S
    got = await r.get(f"/overview{query}")
    assert got.status == 200, got.json
    body: Json = got.json
    return body


def running(r: Rig) -> list[Running]:
    return r.router.screen.running(r.router.relays)


async def test_the_overview_tells_the_router_its_instances_and_its_pairs() -> None:
    async with rig(prefill=1, decode=2) as r:
        body = await view(r)
        assert body["version"] == 1
        assert body["router"]["is_ready"]
        assert body["models"] == ["tiny"]
        assert [row["condition"] for row in body["instances"]] == ["ready"] * 3
        assert [row["trust"] for row in body["pairs"]] == ["passed", "passed"]
        assert all(row["canary_ms"] is not None for row in body["pairs"])
        assert (body["requests"], body["errors"]) == ([], [])


async def test_canaries_are_no_clients_requests() -> None:
    async with rig() as r:
        r.time.now += FRESH_S
        series = (await view(r))["series"]
        assert series["requests_per_s"] == [0]


async def test_an_answer_that_is_not_streamed_is_not_shown_as_kv_that_moves() -> None:
    """It is silent until its end, and most of that time it decodes."""
    async with rig() as r:
        ended = asyncio.Event()
        r.decode[0].plays.append(after(ended, good({"output": "x"})))
        sending = r.sending()
        await until(lambda: any(each.state == "awaiting" for each in running(r)))
        assert (await view(r))["requests"][0]["stage"] == "decode"
        ended.set()
        await sending


async def test_a_request_is_shown_where_it_is_until_it_is_over() -> None:
    async with rig() as r:
        prefill, first, more = asyncio.Event(), asyncio.Event(), asyncio.Event()
        r.prefill[0].plays.append(after(prefill, r.prefill[0]._well()))  # noqa: SLF001 - as usual
        r.decode[0].plays.append(after(first, stream(b"data: 1\n\n", more, b"data: 2\n\n" + DONE)))
        sending = r.sending(stream=True)
        await r.decode[0].nth(1)
        r.time.now += 0.25
        (row,) = (await view(r))["requests"]
        assert (row["stage"], row["age_s"], row["first_ms"]) == ("prefill", 0.75, None)
        assert (row["prefill"], row["decode"]) == tuple(i.name for i in r.router.fleet.instances)
        prefill.set()
        await until(lambda: running(r)[0].state == "awaiting")
        assert (await view(r))["requests"][0]["stage"] == "transfer"
        first.set()
        await until(lambda: running(r)[0].pieces == 1)
        (row,) = (await view(r))["requests"]
        assert (row["stage"], row["pieces"], row["first_ms"]) == ("decode", 1, 1250.0)
        r.time.now += 0.1
        more.set()
        await sending
        await r.at_rest()
        body = await view(r)
        assert (body["requests"], body["requests_total"]) == ([], 0)
        assert 1190 < body["series"]["last_minute"]["ttft_ms"]["p50"] < 1310
        assert 570 < body["series"]["last_minute"]["itl_ms"]["p50"] < 630  # a look and 0.1 s


async def test_each_prompt_of_a_batch_is_shown_by_itself() -> None:
    async with rig() as r:
        r.decode[0].plays.extend([hang, hang])
        sending = r.sending(prompt=["one", "two"])
        await r.decode[0].nth(2)
        body = await view(r)
        assert (body["requests_total"], body["router"]["in_flight"]) == (2, 1)
        assert len({row["request_id"] for row in body["requests"]}) == 1
        sending.cancel()
        await r.at_rest()
        assert (await view(r))["requests_total"] == 0


async def test_an_answer_that_is_no_stream_has_no_first_token_time() -> None:
    async with rig() as r:
        await r.send()
        r.time.now += FRESH_S
        series = (await view(r))["series"]
        assert (series["requests_per_s"], series["ended_per_s"]) == ([1], [1])
        assert (series["pieces_per_s"], series["ttft_ms"]["p50"]) == ([0], [None])


async def test_what_clients_were_told_is_among_the_errors() -> None:
    async with rig() as r:
        r.decode[0].plays.append(status(500, "it broke", "internal"))
        refused = await r.send(headers={"x-request-id": "mine"})
        assert refused.status == 500
        await r.send(nonsense=1)
        await r.get("/no/such/path")
        r.time.now += FRESH_S
        body = await view(r)
        bad, broke = body["errors"]
        assert (broke["code"], broke["status"], broke["stage"]) == ("internal", 500, "leader")
        assert (broke["message"], broke["request_id"]) == ("it broke", "mine")
        assert (bad["code"], bad["status"]) == ("bad_request", 400)
        assert body["series"]["errors_per_s"] == [2]


async def test_a_stream_that_broke_is_an_error_too() -> None:
    async with rig() as r:
        r.decode[0].plays.append(stream(b"data: 1\n\n", ending="die"))
        await r.send(stream=True)
        (error,) = (await view(r))["errors"]
        assert (error["code"], error["status"]) == ("peer_lost", 200)


async def test_a_client_that_left_is_no_error_and_leaves_nothing() -> None:
    async with rig() as r:
        r.decode[0].plays.append(hang)
        sending = r.sending()
        await r.decode[0].nth(1)
        assert (await view(r))["requests_total"] == 1
        sending.cancel()
        await r.at_rest()
        body = await view(r)
        assert (body["requests_total"], body["errors"]) == (0, [])


async def test_a_refused_request_is_an_error_and_not_one_under_way() -> None:
    async with rig(policy={"max_in_flight": 1}) as r:
        r.decode[0].plays.append(hang)
        sending = r.sending()
        await r.decode[0].nth(1)
        assert (await r.send()).status == 429
        body = await view(r)
        assert (body["requests_total"], body["errors"][0]["code"]) == (1, "overloaded")
        sending.cancel()
        await r.at_rest()


async def test_errors_are_kept_within_bounds() -> None:
    async with rig() as r:
        for _ in range(MOST_ERRORS + 5):
            await r.send(nonsense=1)
        assert len((await view(r))["errors"]) == MOST_ERRORS


async def test_what_leaders_tell_becomes_rates() -> None:
    async with rig() as r:
        for second in range(4):
            r.decode[0].status["totals"] = {"at": float(second), "tokens_out": 100.0 * second}
            r.prefill[0].status["totals"] = {"at": float(second), "sent_bytes": 2e9 * second}
            await r.look()
            r.router.screen.look(r.router.fleet.instances)
        r.time.now += FRESH_S
        body = await view(r)
        prefill, decode = body["instances"]
        assert (decode["tokens_per_s"], prefill["sent_gb_per_s"]) == (100, 2)
        assert body["series"]["tokens_per_s"] == [100]
        assert body["series"]["sent_gb_per_s"] == [2]


async def test_a_lost_instance_is_told_with_the_reason() -> None:
    async with rig() as r:
        await r.lose(r.decode[0])
        body = await view(r)
        assert body["instances"][1]["condition"] == "down"
        assert not body["router"]["is_ready"]
        assert r.instance(r.decode[0]).name in body["router"]["reason"]
        assert not body["pairs"][0]["is_routable"]


async def test_fewer_seconds_can_be_asked_for() -> None:
    async with rig() as r:
        r.time.now += 60
        assert len((await view(r))["series"]["tokens_per_s"]) == 60
        assert len((await view(r, "?seconds=5"))["series"]["tokens_per_s"]) == 5
        for odd in ("0", "301", "-1", "1e3", "x", "²", "9" * 5000):
            got = await r.get(f"/overview?seconds={odd}")
            assert (got.status, got.error["code"]) == (400, "bad_request")


async def test_many_who_look_cost_no_more_than_one() -> None:
    async with rig() as r:
        first = await view(r)
        r.decode[0].status["load"] = {"running": 7}
        await r.look()
        assert (await r.get("/overview")).json == first
        assert (await view(r))["instances"][1]["running"] == 7


async def test_plain_backends_are_shown_as_far_as_they_tell() -> None:
    async with rig(key=None, policy={"backends": "plain"}) as r:
        body = await view(r)
        assert body["router"]["is_plain"]
        assert [row["condition"] for row in body["instances"]] == ["ready", "ready"]


async def test_the_overview_needs_a_key_where_clients_do_and_the_page_does_not() -> None:
    async with rig(security={"api_keys": ["k1"]}) as r:
        assert (await r.get("/overview")).status == 401
        assert (await r.get("/overview", {"authorization": "Bearer k1"})).status == 200
        page = await r.get("/")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b"k1" not in page.body


async def test_the_page_says_what_a_browser_may_do_with_it() -> None:
    async with rig() as r:
        page = await r.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-cache"
        told = await r.get("/overview")
        assert told.headers["cache-control"] == "no-store"
        assert json.loads(told.body)["version"] == 1
