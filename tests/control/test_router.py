"""The router with everything well: bodies, headers, bounds, keys, and what it says of itself."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdrt.control.http import MAX_NESTED
from pdrt.control.sse import DONE
from tests.control.fake_leader import after, good, prefilled, stream
from tests.control.router_rig import KEY, rig, until


async def test_both_legs_get_the_same_room_and_the_client_decodes_answer() -> None:
    async with rig() as r:
        r.decode[0].plays.append(good({"output": "Paris"}))
        got = await r.send(sampling_params={"max_tokens": 4}, request_id="mine")
        assert (got.status, got.json) == (200, {"output": "Paris"})
        assert got.headers["x-request-id"] == "mine"
        assert got.headers["x-pd-path"] == "disagg"
        prefill, decode = r.prefill[0].seen[0], r.decode[0].seen[0]
        assert prefill.room == decode.room < 1 << 63
        assert prefill.attempt == decode.attempt == 0
        assert prefill.body["bootstrap_port"] == r.prefill[0].port
        assert decode.body["disagg_prefill_dp_rank"] == 0
        assert prefill.body["sampling_params"] == decode.body["sampling_params"]
        assert prefill.body["sampling_params"]["seed"] >= 0
        assert prefill.body["time_left_s"] == pytest.approx(600)
        token = decode.body["transfer_token"]
        assert KEY.is_room_token(token, decode.room, 0, r.time.now)
        assert decode.headers["x-request-id"] == "mine"
        await r.at_rest()


@pytest.mark.parametrize("backends", ["plain", "pdrt"])
async def test_decodes_stream_reaches_the_client_byte_for_byte_as_it_comes(backends: str) -> None:
    """Of a leader's, whole events."""
    gate = asyncio.Event()
    chunks = [b'data: {"text":"\xc3', b'\xa9"}\n\n', b"data: [DONE]\n\n"]
    if backends == "pdrt":
        chunks = [b"".join(chunks[:2]), chunks[2]]
    async with rig(policy={"backends": backends}) as r:
        r.decode[0].plays.append(stream(chunks[0], gate, *chunks[1:]))
        async with r.session.post(
            r.url + "/generate", json={"prompt": "hi", "stream": True}
        ) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readany() == chunks[0]
            gate.set()
            assert await answer.read() == b"".join(chunks[1:])
        await r.at_rest()


async def test_nothing_is_answered_before_decode_has_something_to_say() -> None:
    gate = asyncio.Event()
    async with rig() as r:
        r.decode[0].plays.append(after(gate, good({"output": "x"})))
        asked = r.sending()
        await r.decode[0].nth(1)
        await until(lambda: bool(r.router.relays))
        relay = next(iter(r.router.relays))
        await until(lambda: relay.route.state == "awaiting")
        assert relay.first_byte_at is None
        assert not asked.done()
        gate.set()
        assert (await asked).status == 200


async def test_the_prefill_leg_is_built_from_an_allow_list() -> None:
    """CASES 82: a proxy copied `stream` and more into the prefill leg and crashed."""
    async with rig() as r:
        r.decode[0].plays.append(stream(DONE))
        got = await r.send(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "user": "someone",
                "temperature": 0,
                "timeout_s": 5,
                "bootstrap_room": 7,
            },
            path="/v1/chat/completions",
        )
        assert got.status == 200
        prefill, decode = r.prefill[0].seen[0], r.decode[0].seen[0]
        assert prefill.path == decode.path == "/v1/chat/completions"
        leg = {
            *("bootstrap_room", "bootstrap_host", "bootstrap_port", "disagg_prefill_dp_rank"),
            *("attempt", "time_left_s", "transfer_token", "request_id", "client_room"),
            "created",
        }
        asked = {"model", "messages", "temperature", "seed"}
        assert prefill.body.keys() == leg | asked
        answer = {"stream", "stream_options", "path", "marks"}
        assert decode.body.keys() == leg | asked | answer


@pytest.mark.parametrize("field", ["min_tokens", "n_predict", "attempt", "transfer_token"])
async def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    async with rig() as r:
        got = await r.send({"prompt": "hi", field: 1})
        assert got.status == 400
        assert field in got.error["message"]
        assert not r.prefill[0].seen
        assert got.headers["x-pd-path"] == "none"


async def test_a_body_of_too_many_things_is_refused_before_anybody_is_asked() -> None:
    async with rig() as r:
        got = await r.raw(b'{"prompt": [' + b"[1]," * MAX_NESTED + b"[1]]}")
        assert (got.status, got.error["code"]) == (400, "bad_request")
        assert "lists and objects; the limit is" in got.error["message"]
        assert not any(leader.seen for leader in r.leaders)


async def test_a_clients_room_is_never_the_wire_identity() -> None:
    async with rig() as r:
        assert (await r.send(bootstrap_room=42)).status == 200
        assert r.decode[0].seen[0].room != 42
        assert r.decode[0].seen[0].body["client_room"] == 42


async def test_a_room_in_flight_is_refused_and_free_again_afterwards() -> None:
    """CASES 106: the second gets 409, and nothing runs twice."""
    gate = asyncio.Event()
    async with rig() as r:
        r.decode[0].plays.append(after(gate, good({"output": "x"})))
        first = r.sending(bootstrap_room=42)
        await r.decode[0].nth(1)
        second = await r.send(bootstrap_room=42)
        assert (second.status, second.error["code"]) == (409, "conflict")
        assert len(r.decode[0].seen) == 1
        gate.set()
        assert (await first).status == 200
        assert (await r.send(bootstrap_room=42)).status == 200


async def test_a_client_may_pin_a_registered_prefill_instance_and_nothing_else() -> None:
    async with rig(prefill=2) as r:
        for _ in range(3):
            port = r.prefill[1].port
            got = await r.send(bootstrap_host="127.0.0.1", bootstrap_port=port)
            assert got.status == 200
        assert (len(r.prefill[0].seen), len(r.prefill[1].seen)) == (0, 3)
        got = await r.send(bootstrap_host="10.6.6.6", bootstrap_port=18800)
        assert got.status == 400
        assert "bootstrap_host" in got.error["message"]


async def test_a_hybrid_instance_serves_alone() -> None:
    async with rig(prefill=0, decode=0, hybrid=1) as r:
        r.hybrid[0].plays.append(good({"output": "x"}))
        got = await r.send()
        assert got.status == 200
        assert "bootstrap_host" not in r.hybrid[0].seen[0].body


async def test_a_hybrid_standing_in_for_a_missing_pair_says_so() -> None:
    """CASES 81: which path served is told with each answer, and counted."""
    async with rig(hybrid=1) as r:
        assert (await r.send()).headers["x-pd-path"] == "disagg"
        await r.lose(r.prefill[0])
        got = await r.send()
        assert (got.status, got.headers["x-pd-path"]) == (200, "fallback:no_prefill")
        text = (await r.get("/metrics")).body.decode()
        line = 'requests_total{path="fallback:no_prefill",route="/generate",status="200"} 1.0'
        assert line in text


@pytest.mark.parametrize("path", ["/v1/chat/completion", "/v1/embeddings", "/v2"])
async def test_an_unknown_path_is_refused_and_says_so(path: str) -> None:
    """CASES 81: an unsupported path silently ran decode alone."""
    async with rig() as r:
        got = await r.send(path=path)
        assert (got.status, got.error["code"]) == (404, "not_found")
        assert got.headers["x-pd-path"] == "none"
        assert not r.decode[0].seen


async def test_bodies_that_are_no_json_objects_are_refused() -> None:
    async with rig() as r:
        for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000):
            got = await r.raw(data)
            assert (got.status, got.error["type"]) == (400, "invalid_request_error")
        assert (await r.get("/generate")).status == 405


async def test_a_body_over_the_limit_is_refused() -> None:
    async with rig(security={"max_body_bytes": 1000}) as r:
        got = await r.send(prompt="x" * 2000)
        assert (got.status, got.error["code"]) == (413, "too_large")


async def test_over_max_in_flight_comes_429_with_retry_after() -> None:
    """CASES 77: overload sheds, and opens no circuit."""
    gate = asyncio.Event()
    async with rig(policy={"max_in_flight": 2}) as r:
        for _ in range(2):
            r.decode[0].plays.append(after(gate, good({"output": "x"})))
        running = [r.sending() for _ in range(2)]
        await r.decode[0].nth(2)
        for _ in range(5):
            got = await r.send()
            assert (got.status, got.error["code"]) == (429, "overloaded")
            assert int(got.headers["retry-after"]) >= 1
        assert (await r.get("/ready")).status == 200
        gate.set()
        assert [(await each).status for each in running] == [200, 200]
        assert (await r.send()).status == 200


async def test_api_keys_are_asked_for_when_there_are_any() -> None:
    async with rig(security={"api_keys": ["good-key", "other"]}) as r:
        for headers in ({}, {"authorization": "Bearer bad"}, {"authorization": "good"}):
            got = await r.send(headers=headers)
            assert (got.status, got.error["code"]) == (401, "unauthorized")
        assert (await r.send(headers={"authorization": "Bearer good-key"})).status == 200
        assert (await r.get("/v1/models")).status == 401
        assert (await r.get("/health")).status == 200
        assert (await r.get("/ready")).status == 200


async def test_loads_count_from_dispatch_so_a_burst_is_spread_evenly() -> None:
    """CASES 73: 32k-in, 1-out over four prefill instances: each gets its quarter."""
    gate = asyncio.Event()
    async with rig(prefill=4) as r:
        for leader in r.prefill:
            leader.plays.extend(after(gate, prefilled()) for _ in range(40))
        for _ in range(40):
            r.decode[0].plays.append(after(gate, good({"output": "x"})))
        prompt = list(range(32_000))
        asked = [r.sending(prompt=prompt, sampling_params={"max_tokens": 1}) for _ in range(40)]
        await r.decode[0].nth(40)
        await until(lambda: sum(len(leader.seen) for leader in r.prefill) == 40)
        assert [len(leader.seen) for leader in r.prefill] == [10, 10, 10, 10]
        gate.set()
        assert {(await each).status for each in asked} == {200}
        await r.at_rest()


async def test_prefill_ranks_are_a_real_choice() -> None:
    async with rig() as r:
        r.prefill[0].status["ready_ranks"] = [0, 1]
        await r.look()
        for _ in range(4):
            await r.send()
        ranks = [seen.body["disagg_prefill_dp_rank"] for seen in r.prefill[0].seen]
        assert sorted(ranks) == [0, 0, 1, 1]


async def test_models_come_from_what_instances_say() -> None:
    async with rig() as r:
        got = await r.get("/v1/models")
        assert [model["id"] for model in got.json["data"]] == ["tiny"]


async def test_metrics_count_requests_by_status_and_path() -> None:
    async with rig() as r:
        await r.send()
        await r.send(bad=1)
        text = (await r.get("/metrics")).body.decode()
        assert 'requests_total{path="disagg",route="/generate",status="200"} 1.0' in text
        assert 'requests_total{path="none",route="/generate",status="400"} 1.0' in text
        assert 'errors_total{code="bad_request"} 1.0' in text
        assert "pdrt_router_ready 1.0" in text


async def test_a_draining_router_refuses_new_work_and_finishes_the_old() -> None:
    gate = asyncio.Event()
    async with rig() as r:
        r.decode[0].plays.append(after(gate, good({"output": "x"})))
        running = r.sending()
        await r.decode[0].nth(1)
        draining = asyncio.create_task(r.router.drain(30))
        await until(lambda: r.router.draining)
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "draining")
        assert (await r.get("/ready")).status == 503
        assert (await r.get("/health")).status == 200
        assert not draining.done()
        gate.set()
        assert (await running).status == 200
        await draining


async def test_what_a_drain_does_not_see_end_is_cut_with_a_typed_error() -> None:
    async with rig() as r:
        r.decode[0].plays.append(after(asyncio.Event(), good({})))
        running = r.sending()
        seen = await r.decode[0].nth(1)
        await r.router.drain(0)
        got = await running
        assert (got.status, got.error["code"]) == (503, "draining")
        await seen.gone.wait()


async def test_plain_backends_get_the_clients_own_fields_and_a_meeting_place() -> None:
    """`policy.backends = "plain"`: no token, no canary, bodies as they came."""
    async with rig(policy={"backends": "plain"}) as r:
        got = await r.send({"text": "hi", "stream": True, "any": {"thing": 1}})
        assert got.status == 200
        prefill, decode = r.prefill[0].seen[0], r.decode[0].seen[0]
        assert prefill.body["any"] == decode.body["any"] == {"thing": 1}
        assert prefill.room == decode.room
        assert decode.body["stream"] is True
        assert not prefill.body.get("stream")
        assert "transfer_token" not in decode.body
        assert "authorization" not in decode.headers
        assert not r.decode[0].seen_canaries


async def test_a_large_body_passes() -> None:
    async with rig() as r:
        prompt = list(range(300_000))
        body = json.dumps({"prompt": prompt}).encode()
        assert len(body) > 1 << 20
        assert (await r.raw(body)).status == 200
        assert r.prefill[0].seen[0].body["prompt"] == prompt


async def test_what_the_router_took_is_no_bigger_for_a_leader() -> None:
    """Escaped, four bytes of text were twelve, and a leader refused what the router had taken."""
    async with rig() as r:
        prompt = "\N{GRINNING FACE}" * 100
        assert (await r.send(prompt=prompt)).status == 200
        for leader in (r.prefill[0], r.decode[0]):
            assert leader.seen[0].body["prompt"] == prompt
            assert int(leader.seen[0].headers["content-length"]) < 400 + 600
