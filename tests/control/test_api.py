"""A leader's API: what clients get, what the router's legs get, and how everything ends."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from pdrt.config import Role
from pdrt.control.dispatch import DPDispatcher
from pdrt.messages import Output, Problem, Sampling, Source
from tests.control.leader_rig import (
    BEARER,
    KEY,
    WALL,
    Rig,
    error_of,
    events_of,
    failing,
    out,
    prompt_of,
    rigged,
    scored,
)

HI = {"messages": [{"role": "user", "content": "hi"}]}
GREETING = (
    out("Hel"),
    out("lo, "),
    out("wör".encode()[:2]),
    out("wör".encode()[2:]),
    out("ld", "length"),
)


def rooms(rig: Rig) -> int:
    return rig.leader.dispatcher.load().rooms


async def chunks_of(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    events = await events_of(answer)
    assert {name for name, _ in events} == {"message"}
    assert events[-1][1] == "[DONE]"
    return [json.loads(data) for _, data in events[:-1]]


# Answers.


async def test_generate_answers_with_text_ids_usage_path_and_times() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("Hel", cached_tokens=2), out("lo", "stop", eos=True)]
        answer = await rig.post("/generate", {"prompt": "abc", "request_id": "mine"})
        body = await answer.json()
        times = body.pop("timings_ms")
        room = rig.worker.submitted[0].room
        assert answer.status == 200
        assert body == {
            "request_id": "mine",
            "bootstrap_room": room,
            "output": "Hello",
            "output_ids": [*b"Hello", 256],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "completion_tokens": 6, "cached_tokens": 2},
            "path": "local",
        }
        assert 0 < times["tokenise"] <= times["first_token"] <= times["total"]
        assert (answer.headers["x-request-id"], answer.headers["x-pd-path"]) == ("mine", "local")
        assert (rig.served, rooms(rig), rig.worker.aborted) == (1, 0, [])


async def test_a_stream_of_generate_adds_up_to_the_whole_answer() -> None:
    """CASES 94, 93: text, ids and usage, with characters that are split between tokens."""
    text = "déjà vu 你好 😀 fin".encode()
    script = [out(text[i : i + 1]) for i in range(len(text) - 1)] + [out(text[-1:], "length")]
    async with rigged() as rig:
        rig.worker.script = script
        whole = await (await rig.post("/generate", {"prompt": "abc"})).json()
        answer = await rig.post("/generate", {"prompt": "abc", "stream": True})
        chunks = await chunks_of(answer)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-pd-path"] == "local"
        assert "".join(c["output"] for c in chunks) == whole["output"] == text.decode()
        assert [i for c in chunks for i in c["output_ids"]] == whole["output_ids"] == list(text)
        assert chunks[-1]["usage"] == whole["usage"]
        assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "text", "reason"),
    [
        ([out("", "stop", eos=True)], "", "stop"),  # the first token is EOS
        ([out("x", "stop")], "", "stop"),  # ... or a stop id
        ([out("x", "length")], "x", "length"),  # max_tokens = 1
        ([out("xy", "length")], "xy", "length"),
        ([out("x", eos=True), out("y", "length")], "xy", "length"),  # ignore_eos
    ],
)
async def test_short_answers_end_as_long_ones_do(
    stream: bool, script: list[Output], text: str, reason: str
) -> None:
    """CASES 85, 86, 87."""
    async with rigged() as rig:
        rig.worker.script = script
        tokens = [t for o in script for t in o.tokens]
        answer = await rig.post("/generate", {"prompt": "abc", "stream": stream})
        chunks = await chunks_of(answer) if stream else [await answer.json()]
        assert "".join(c["output"] for c in chunks) == text
        assert chunks[-1]["finish_reason"] == reason
        assert chunks[-1]["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "stop", "text", "ids"),
    [
        ([out("one E"), out("N"), out("D and"), out("more")], "END", "one ", b"one END"),
        ([out("END")], "END", "", b"END"),  # completed by the first output
        ([out("é".encode()[:1]), out("é".encode()[1:])], "é", "", "é".encode()),
        ([out("aXbY")], ["Y", "Xb"], "a", b"aXb"),
    ],
)
async def test_a_stop_string_ends_the_answer_before_it_and_the_worker_at_once(
    stream: bool, script: list[Output], stop: Any, text: str, ids: bytes
) -> None:
    """CASES 86."""
    async with rigged() as rig:
        rig.worker.script = script
        body = {"prompt": "abc", "stream": stream, "sampling_params": {"stop": stop}}
        answer = await rig.post("/generate", body)
        chunks = await chunks_of(answer) if stream else [await answer.json()]
        room = rig.worker.submitted[0].room
        assert "".join(c["output"] for c in chunks) == text
        assert [i for c in chunks for i in c["output_ids"]] == list(ids)
        assert chunks[-1]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
        assert rig.worker.aborted == [(room, "stop")]
        assert rooms(rig) == 0


async def test_a_chat_completion_has_openais_form() -> None:
    async with rigged() as rig:
        rig.worker.script = GREETING
        answer = await rig.post("/v1/chat/completions", {**HI, "model": "null"})
        body = await answer.json()
        assert prompt_of(rig.worker.submitted[0]) == list(b"user: hi\nassistant: ")
        assert body == {
            "id": f"chatcmpl-{answer.headers['x-request-id']}",
            "object": "chat.completion",
            "created": int(WALL),
            "model": "null",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": body_text(), "refusal": None},
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ],
            "usage": {
                "prompt_tokens": 20,
                "completion_tokens": sum(len(o.tokens) for o in GREETING),
                "total_tokens": 20 + sum(len(o.tokens) for o in GREETING),
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }


def body_text() -> str:
    return bytes(t for o in GREETING for t in o.tokens).decode()


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_a_chat_stream_opens_with_the_role_and_ends_with_usage_when_asked(
    options: dict[str, bool] | None,
) -> None:
    async with rigged() as rig:
        rig.worker.script = GREETING
        body = {**HI, "stream": True, "stream_options": options}
        chunks = await chunks_of(await rig.post("/v1/chat/completions", body))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = [c["choices"][0] for c in chunks if c["choices"]]
        assert "".join(c["delta"].get("content", "") for c in said) == body_text()
        assert [c["finish_reason"] for c in said][-2:] == [None, "length"]
        assert [c for c in chunks if not c["choices"]] == ([chunks[-1]] if options else [])
        assert [c.get("usage") for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        if options:
            assert chunks[-1]["usage"]["completion_tokens"] == 13
        else:
            assert all("usage" not in c for c in chunks)


async def test_usage_may_be_in_every_chunk() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("ab"), out("c", "length")]
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "a", "stream": True, "stream_options": options}
        chunks = await chunks_of(await rig.post("/v1/completions", body))
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts in ([2, 3, 3], [3, 3])  # outputs that wait together are told together


async def test_sampling_and_limits_reach_the_worker() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("x", "length")]
        params = {"max_tokens": 5, "temperature": 0, "seed": 9, "stop_token_ids": [3], "top_k": -1}
        await rig.post("/generate", {"prompt": [1, 2], "sampling_params": params, "timeout_s": 7})
        submit = rig.worker.submitted[0]
        want = Sampling(max_tokens=5, temperature=0, seed=9, stop_token_ids=(3,))
        assert submit.sampling == want
        assert (submit.prompt_tokens, submit.attempt, submit.source) == (2, 0, None)
        assert 6 < submit.time_left <= 7


async def test_seeds_and_rooms_nobody_gave_are_minted() -> None:
    minted = iter(range(100, 200))
    async with rigged(mint=lambda: next(minted)) as rig:
        rig.worker.script = [out("x", "length")]
        await rig.post("/generate", {"prompt": "a"})
        assert (rig.worker.submitted[0].room, rig.worker.submitted[0].sampling.seed) == (100, 101)


# Refusals.


@pytest.mark.parametrize(
    ("path", "body", "code", "said"),
    [
        ("/generate", b"{", "bad_request", "no JSON"),
        ("/generate", b"[]", "bad_request", "JSON object"),
        ("/generate", {"prompt": ""}, "bad_request", "prompt is empty"),
        ("/generate", {"prompt": []}, "bad_request", "prompt is empty"),
        ("/generate", {"prompt": [257]}, "bad_request", "vocabulary"),
        ("/generate", {"prompt": "a", "colour": 1}, "bad_request", "colour"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"257": 1}}, "bad_request", "logit_bias"),
        ("/generate", {"prompt": "a" * 1000}, "too_long", "1000"),
        ("/generate", {"prompt": [1] * 996, "sampling_params": {"max_tokens": 5}}, "too_long", "5"),
        (
            "/generate",
            {"prompt": "a", "bootstrap_host": "x", "bootstrap_port": 1},
            "bad_request",
            "x",
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "bad_request", "logprobs"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "bad_request", "echo"),
        ("/v1/chat/completions", {"messages": []}, "bad_request", "messages"),
    ],
)
async def test_what_cannot_be_served_is_400_at_once_and_no_worker_hears_of_it(
    path: str, body: Any, code: str, said: str
) -> None:
    """CASES 2, 55, 57."""
    async with rigged() as rig:
        status, got, message = await error_of(await rig.post(path, body))
        assert (status, got) == (400, code)
        assert said in message
        assert not rig.worker.submitted


async def test_the_limit_itself_is_served() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("x", "length")]
        body = {"prompt": [1] * 995, "sampling_params": {"max_tokens": 5}}
        assert (await rig.post("/generate", body)).status == 200


async def test_what_the_kv_pool_can_never_hold_is_400() -> None:
    async with rigged(pool_tokens=lambda: 64) as rig:
        rig.worker.script = [out("x", "length")]
        body = {"prompt": [1] * 60, "sampling_params": {"max_tokens": 5}}
        assert (await error_of(await rig.post("/generate", body)))[:2] == (400, "too_long")
        assert (await rig.post("/v1/chat/completions", HI)).status == 200
        assert rig.worker.submitted[-1].sampling.max_tokens == 64 - 20  # what fits


async def test_a_body_over_the_limit_is_413() -> None:
    async with rigged(max_body_bytes=100) as rig:
        answer = await rig.post("/generate", {"prompt": "a" * 101})
        assert (await error_of(answer))[:2] == (413, "too_large")


async def test_another_model_is_404() -> None:
    async with rigged() as rig:
        answer = await rig.post("/v1/completions", {"prompt": "a", "model": "gpt"})
        assert (await error_of(answer))[:2] == (404, "not_found")


async def test_a_clients_room_runs_once_at_a_time_and_is_never_the_wires() -> None:
    """CASES 106."""
    async with rigged() as rig:
        body = {"prompt": "a", "bootstrap_room": 5}
        first = asyncio.ensure_future(rig.post("/generate", body))
        submit = await rig.worker.next_submit()
        assert submit.room != 5
        assert (await error_of(await rig.post("/generate", body)))[:2] == (409, "conflict")
        rig.worker.say(submit.room, out("x", "length"))
        assert (await (await first).json())["bootstrap_room"] == 5
        rig.worker.script = [out("x", "length")]
        assert (await rig.post("/generate", body)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("too_long", 400),
        ("overloaded", 429),
        ("peer_lost", 503),
        ("transfer_failed", 503),
        ("deadline", 504),
        ("prompt_mismatch", 500),
    ],
)
async def test_a_failure_before_the_first_output_has_its_own_status(
    stream: bool, code: str, status: int
) -> None:
    """Never HTTP 200 with an error inside."""
    async with rigged() as rig:
        rig.worker.script = [failing(code, "why", "transfer")]
        answer = await rig.post("/generate", {"prompt": "a", "stream": stream})
        error = (await answer.json())["error"]
        assert (answer.status, error["stage"]) == (status, "transfer")
        assert "why" in error["message"]
        assert ("retry-after" in answer.headers) == (status in (429, 503))
        assert rig.served == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_failure_in_a_begun_stream_is_its_last_event(path: str) -> None:
    async with rigged() as rig:
        body = HI if "chat" in path else {"prompt": "a"}
        answer_soon = asyncio.ensure_future(rig.post(path, {**body, "stream": True}))
        submit = await rig.worker.next_submit()
        rig.worker.say(submit.room, out("ab"))
        answer = await answer_soon
        rig.worker.say(submit.room, out("c"), failing("peer_lost", "worker died"))
        events = await events_of(answer)
        assert [name for name, _ in events][-1] == "error"
        assert "[DONE]" not in [data for _, data in events]
        error = json.loads(events[-1][1])["error"]
        assert (error["code"], error["message"]) == ("peer_lost", "worker died")
        assert error["request_id"] == answer.headers["x-request-id"]
        assert '"c"' in events[-2][1]  # what was said before is told
        assert (rooms(rig), rig.served) == (0, 0)


async def test_a_failure_that_comes_with_the_first_output_has_its_own_status() -> None:
    async with rigged() as rig:
        asked = asyncio.ensure_future(rig.post("/generate", {"prompt": "a", "stream": True}))
        submit = await rig.worker.next_submit()
        rig.worker.say(submit.room, out("ab"), failing("peer_lost", "worker died"))
        assert (await error_of(await asked))[:2] == (503, "peer_lost")


async def test_a_client_that_does_not_read_holds_nothing_after_its_deadline() -> None:
    """No answer is buffered without bound for it, and its connection is cut."""
    async with rigged(max_model_len=4_000_000) as rig:
        rig.worker.script = [out(b"x" * 1_000_000)]  # more than socket buffers take
        params = {"max_tokens": 3_000_000}
        body = {"prompt": "a", "stream": True, "timeout_s": 0.5, "sampling_params": params}
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", int(rig.url.rpartition(":")[2])))
            data = json.dumps(body).encode()
            head = f"POST /generate HTTP/1.1\r\nhost: h\r\ncontent-length: {len(data)}\r\n\r\n"
            deaf.sendall(head.encode() + data)
            await rig.worker.until(lambda worker: worker.aborted)
            assert rooms(rig) == 0
            metrics = ""
            while 'code="deadline"' not in metrics:  # counted when its handler has ended
                metrics = await (await rig.client.get("/metrics")).text()


async def test_a_lost_worker_ends_its_requests_at_once() -> None:
    """CASES 33."""
    async with rigged() as rig:
        asked = asyncio.ensure_future(rig.post("/generate", {"prompt": "a"}))
        await rig.worker.next_submit()
        rig.leader.dispatcher.worker_lost(0, Problem(code="peer_lost", message="killed"))
        assert (await error_of(await asked))[:2] == (503, "peer_lost")


async def test_a_draining_or_unconnected_instance_refuses() -> None:
    async with rigged() as rig:
        rig.leader.dispatcher = DPDispatcher([], lambda: 0.0)
        assert (await error_of(await rig.post("/generate", {"prompt": "a"})))[0] == 503
    async with rigged() as rig:
        drain = await rig.post("/admin/drain", {}, headers=BEARER)
        assert (drain.status, (await drain.json())["drained"], rig.drains) == (200, True, 1)
        assert (await error_of(await rig.post("/generate", {"prompt": "a"})))[:2] == (
            503,
            "draining",
        )


async def test_draining_lets_what_runs_finish_and_tells_when_it_has() -> None:
    """CASES 31."""
    async with rigged() as rig:
        asked = asyncio.ensure_future(rig.post("/generate", {"prompt": "a"}))
        submit = await rig.worker.next_submit()
        drain = await rig.post("/admin/drain", {}, headers=BEARER)
        assert (drain.status, (await drain.json())["drained"]) == (202, False)
        rig.worker.say(submit.room, out("x", "length"))
        assert (await asked).status == 200
        drain = await rig.post("/admin/drain", {}, headers=BEARER)
        assert (await drain.json())["drained"]


# Ends that are nobody's answer.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [False, True])
async def test_a_client_that_leaves_ends_its_request_on_the_worker(
    stream: bool, said: bool
) -> None:
    """CASES 30, 95: whether or not anything was said, and while nothing is being said."""
    async with rigged() as rig:
        asked = asyncio.ensure_future(rig.post("/generate", {"prompt": "a", "stream": stream}))
        submit = await rig.worker.next_submit()
        if said:
            rig.worker.say(submit.room, out("x"))
        if stream and said:
            (await asked).close()
        else:
            asked.cancel()
        await rig.worker.until(lambda worker: worker.aborted)
        assert rig.worker.aborted == [(submit.room, "client_gone")]
        assert rooms(rig) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_output_is_504_and_ends_the_worker(stream: bool) -> None:
    async with rigged() as rig:
        body = {"prompt": "a", "stream": stream, "timeout_s": 1.0}
        asked = asyncio.ensure_future(rig.post("/generate", body))
        submit = await rig.worker.next_submit()
        assert (await error_of(await asked))[:2] == (504, "deadline")
        assert [room for room, _ in rig.worker.aborted] == [submit.room]
        assert rooms(rig) == 0


async def test_a_deadline_in_a_begun_stream_is_an_error_event() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("x")]
        answer = await rig.post("/generate", {"prompt": "a", "stream": True, "timeout_s": 1.0})
        events = await events_of(answer)
        assert events[-1][0] == "error"
        assert json.loads(events[-1][1])["error"]["code"] == "deadline"
        assert len(rig.worker.aborted) == 1


# Legs.


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_clients_are_sent_to_the_router(role: Role) -> None:
    async with rigged(role) as rig:
        answer = await rig.post("/generate", {"prompt": "a"}, headers=BEARER)
        status, code, message = await error_of(answer)
        assert (status, code) == (400, "bad_request")
        assert message == f"this is a {role} instance; send requests to the router"


async def test_a_prefill_leg_answers_when_decode_has_the_prompt() -> None:
    async with rigged("prefill") as rig:
        body = {"prompt": "abc", "sampling_params": {"seed": 4}, **rig.leg(7, 65536)}
        asked = asyncio.ensure_future(rig.post("/generate", body, headers=BEARER))
        submit = await rig.worker.next_submit()
        assert (submit.room, submit.attempt, submit.source) == (7, 65536, None)
        rig.worker.say(7, out("", "prefilled", cached_tokens=1))
        answer = await asked
        assert answer.headers["x-request-id"] == "id-1"
        told = await answer.json()
        assert told.pop("timings_ms").keys() == {"tokenise", "total"}
        assert told == {
            "status": "prefilled",
            "request_id": "id-1",
            "bootstrap_room": 7,
            "attempt": 65536,
            "usage": {"prompt_tokens": 3, "cached_tokens": 1},
        }
        assert rig.served == 1


async def test_a_prefill_leg_that_fails_says_why_with_its_status() -> None:
    """CASES 1."""
    async with rigged("prefill") as rig:
        rig.worker.script = [failing("transfer_failed", "room 7, peer d0", "transfer")]
        answer = await rig.post("/generate", {"prompt": "abc", **rig.leg()}, headers=BEARER)
        assert (await error_of(answer))[:2] == (503, "transfer_failed")
        assert (await answer.json())["error"]["stage"] == "transfer"


async def test_a_prefill_instance_needs_room_for_the_prompt_only() -> None:
    async with rigged("prefill", pool_tokens=lambda: 64) as rig:
        rig.worker.script = [out("", "prefilled")]
        body = {"prompt": [1] * 64, "sampling_params": {"max_tokens": 500}}
        assert (await rig.post("/generate", {**body, **rig.leg()}, headers=BEARER)).status == 200
        body["prompt"] = [1] * 65
        answer = await rig.post("/generate", {**body, **rig.leg(8)}, headers=BEARER)
        assert (await error_of(answer))[:2] == (400, "too_long")


async def test_the_routers_choice_of_a_rank_is_honoured() -> None:
    async with rigged("prefill") as rig:
        body = {"prompt": "abc", **rig.leg(disagg_prefill_dp_rank=3)}
        status, _, message = await error_of(await rig.post("/generate", body, headers=BEARER))
        assert status == 400
        assert "disagg_prefill_dp_rank: 3" in message


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_leg_that_is_closed_ends_its_room(side: Role) -> None:
    """CASES 30, 37."""
    async with rigged(side) as rig:
        body = {"prompt": "abc", **rig.leg()}
        asked = asyncio.ensure_future(rig.post("/generate", body, headers=BEARER))
        await rig.worker.next_submit()
        asked.cancel()
        await rig.worker.until(lambda worker: worker.aborted)
        assert rig.worker.aborted == [(7, "client_gone")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_leg_answers_as_the_client_wants_and_knows_who_prefills(
    stream: bool,
) -> None:
    async with rigged("decode") as rig:
        rig.worker.script = GREETING
        body = {"prompt": "abc", "stream": stream, **rig.leg(client_room=3)}
        answer = await rig.post("/generate", body, headers=BEARER)
        chunks = await chunks_of(answer) if stream else [await answer.json()]
        assert "".join(c["output"] for c in chunks) == body_text()
        assert (chunks[-1]["path"], chunks[-1]["bootstrap_room"]) == ("disagg", 3)
        assert answer.headers["x-pd-path"] == "disagg"
        submit = rig.worker.submitted[0]
        assert (submit.room, submit.request_id) == (7, "id-1")
        assert submit.source == Source(host="127.0.0.9", port=18800, dp_rank=0)
        assert 19 < submit.time_left <= 20


async def test_a_decode_leg_without_a_source_is_refused() -> None:
    async with rigged("decode") as rig:
        leg = rig.leg()
        del leg["bootstrap_host"], leg["bootstrap_port"]
        answer = await rig.post("/generate", {"prompt": "abc", **leg}, headers=BEARER)
        assert "bootstrap_host" in (await error_of(answer))[2]


async def test_no_answer_begins_before_the_first_output() -> None:
    """A stream's status is decode's first news, good or bad."""
    async with rigged("decode") as rig:
        body = {"prompt": "abc", "stream": True, **rig.leg()}
        asked = asyncio.ensure_future(rig.post("/generate", body, headers=BEARER))
        await rig.worker.next_submit()
        assert (await rig.client.get("/health")).status == 200
        assert not asked.done()
        rig.worker.say(7, failing("transfer_failed"))
        assert (await asked).status == 503


async def test_a_hybrid_serves_the_routers_legs_under_their_room() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("x", "length")]
        leg = {k: v for k, v in rig.leg().items() if k not in ("bootstrap_host", "bootstrap_port")}
        answer = await rig.post("/generate", {"prompt": "abc", **leg}, headers=BEARER)
        assert (await answer.json())["path"] == "local"
        assert rig.worker.submitted[0].room == 7


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"transfer_token": "1:00"}, 401),
        ({"transfer_token": "\u00e9"}, 401),
        ({"transfer_token": KEY.room_token(8, 0, WALL + 9)}, 401),
        ({"transfer_token": KEY.room_token(7, 1, WALL + 9)}, 401),
        ({"transfer_token": KEY.room_token(7, 0, WALL - 1)}, 401),
        ({"attempt": 1}, 401),
        ({"time_left_s": -1}, 400),
        ({"bootstrap_room": 1 << 63}, 400),
        ({}, 200),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode", "hybrid"])
async def test_only_a_genuine_token_lets_a_leg_work_on_a_room(
    role: Role, change: dict[str, Any], status: int
) -> None:
    """CASES 57: forged, expired and out of range; and no token is generated for them."""
    async with rigged(role) as rig:
        rig.worker.script = [out("", "prefilled") if role == "prefill" else out("x", "length")]
        body = {"prompt": "abc", **rig.leg(), **change}
        assert (await rig.post("/generate", body, headers=BEARER)).status == status
        assert len(rig.worker.submitted) == (status == 200)


async def test_who_may_be_a_client_of_a_hybrid_may_not_therefore_send_it_legs() -> None:
    async with rigged() as rig:
        assert (await rig.post("/generate", {"prompt": "abc", **rig.leg()})).status == 401
        assert not rig.worker.submitted


async def test_a_room_in_flight_is_409() -> None:
    """CASES 106."""
    async with rigged("prefill") as rig:
        body = {"prompt": "abc", **rig.leg()}
        first = asyncio.ensure_future(rig.post("/generate", body, headers=BEARER))
        await rig.worker.next_submit()
        again = await rig.post("/generate", body, headers=BEARER)
        assert (await error_of(again))[:2] == (409, "conflict")
        rig.worker.say(7, out("", "prefilled"))
        assert (await first).status == 200


async def test_a_room_is_rebound_to_another_prefill() -> None:
    async with rigged("decode") as rig:
        body = {"prompt": "abc", **rig.leg()}
        asked = asyncio.ensure_future(rig.post("/generate", body, headers=BEARER))
        await rig.worker.next_submit()
        leg = rig.leg(7, 65536, bootstrap_host="127.0.0.8")
        names = ("bootstrap_room", "attempt", "bootstrap_host", "bootstrap_port", "transfer_token")
        rebind = {name: leg[name] for name in names}
        answer = await rig.post("/internal/rebind", rebind, headers=BEARER)
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        assert rig.worker.rebound[0].source == Source(host="127.0.0.8", port=18800)
        again = await rig.post("/internal/rebind", rebind, headers=BEARER)
        assert (await error_of(again))[:2] == (409, "conflict")
        forged = await rig.post("/internal/rebind", rebind | {"attempt": 131072}, headers=BEARER)
        assert forged.status == 401
        unknown = rebind | {
            "bootstrap_room": 9,
            "transfer_token": KEY.room_token(9, 65536, WALL + 9),
        }
        answer = await rig.post("/internal/rebind", unknown, headers=BEARER)
        assert (await error_of(answer))[:2] == (404, "not_found")
        rig.worker.say(7, out("x", "length"))
        assert (await asked).status == 200


async def test_a_retracted_room_is_prefilled_again_with_its_output() -> None:
    body = {
        "bootstrap_room": 7,
        "attempt": 1,
        "input_ids": [1, 2, 3, 4, 5],
        "prompt_tokens": 3,
        "sampling": {"max_tokens": 9, "temperature": 0.5, "seed": 11},
        "time_left_s": 5.0,
        "transfer_token": KEY.room_token(7, 1, WALL + 9),
    }
    async with rigged("prefill") as rig:
        asked = asyncio.ensure_future(rig.post("/internal/prefill", body, headers=BEARER))
        submit = await rig.worker.next_submit()
        assert (prompt_of(submit), submit.prompt_tokens) == ([1, 2, 3, 4, 5], 3)
        assert submit.sampling == Sampling(max_tokens=9, temperature=0.5, seed=11)
        rig.worker.say(7, out("", "prefilled"))
        assert (await (await asked).json())["status"] == "prefilled"
        forged = await rig.post("/internal/prefill", body | {"attempt": 2}, headers=BEARER)
        assert forged.status == 401
    async with rigged("decode") as rig:
        assert (await rig.post("/internal/prefill", body, headers=BEARER)).status == 404


async def test_a_room_in_flight_is_prefilled_again_only_after_its_end() -> None:
    """The older attempt, whose KV decode has, is not superseded; whoever asked asks again."""
    body = {
        "bootstrap_room": 7,
        "input_ids": [1, 2, 3, 4],
        "prompt_tokens": 3,
        "sampling": {"max_tokens": 9},
        "time_left_s": 5.0,
    }

    def again(attempt: int) -> dict[str, Any]:
        token = KEY.room_token(7, attempt, WALL + 9)
        return body | {"attempt": attempt, "transfer_token": token}

    async with rigged("prefill") as rig:
        first = asyncio.ensure_future(rig.post("/internal/prefill", again(1), headers=BEARER))
        await rig.worker.next_submit()
        refused = await rig.post("/internal/prefill", again(2), headers=BEARER)
        assert (await error_of(refused))[:2] == (409, "conflict")
        assert (rooms(rig), rig.worker.aborted) == (1, [])
        rig.worker.say(7, out("", "prefilled"))
        assert (await first).status == 200
        rig.worker.script = [out("", "prefilled")]
        assert (await rig.post("/internal/prefill", again(2), headers=BEARER)).status == 200


# Who may come in, and what operators see.


@pytest.mark.parametrize("role", ["prefill", "decode", "hybrid"])
@pytest.mark.parametrize(
    ("method", "path", "is_open"),
    [
        ("GET", "/health", True),
        ("GET", "/ready", True),
        ("GET", "/metrics", True),
        ("GET", "/internal/status", False),
        ("POST", "/internal/rebind", False),
        ("POST", "/internal/prefill", False),
        ("POST", "/admin/drain", False),
    ],
)
async def test_strangers_see_health_and_nothing_else(
    role: Role, method: str, path: str, is_open: bool
) -> None:
    """CASES 107."""
    async with rigged(role) as rig:
        assert (await rig.client.request(method, path)).status == (200 if is_open else 401)
        assert (await rig.client.request("POST", "/generate", json={"prompt": ""})).status == (
            400 if role == "hybrid" else 401
        )
        assert rig.drains == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [({}, 401), ({"authorization": "Bearer c1"}, 200), (BEARER, 200)],
)
async def test_a_hybrid_with_client_keys_asks_for_one(sent: dict[str, str], status: int) -> None:
    async with rigged(api_keys=("c0", "c1")) as rig:
        assert (await rig.client.get("/v1/models", headers=sent)).status == status
        assert (await rig.client.get("/v1/models/null", headers=sent)).status == status


async def test_what_is_nowhere_is_not_found_by_the_clients_of_a_hybrid() -> None:
    async with rigged() as rig:
        response = await rig.client.get("/v1/no-such-path")
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_without_a_cluster_key_nothing_is_asked_for() -> None:
    async with rigged("prefill", key=None) as rig:
        rig.worker.script = [out("", "prefilled")]
        leg = rig.leg(transfer_token="none")
        assert (await rig.post("/generate", {"prompt": "abc", **leg})).status == 200


async def test_health_is_503_when_the_loop_has_stalled() -> None:
    """CASES 98."""
    async with rigged(health=lambda: {"workers": {"0": "dead: signal 9"}}) as rig:
        answer = await rig.client.get("/health")
        assert (answer.status, (await answer.json())["workers"]) == (200, {"0": "dead: signal 9"})
        rig.stalled = 10.5
        answer = await rig.client.get("/health")
        assert (answer.status, (await answer.json())["status"]) == (503, "stalled for 10.5 s")


async def test_health_answers_while_requests_wait() -> None:
    """CASES 98, 101: and after a burst of clients that leave, all is as before."""
    async with rigged() as rig:
        asked = [asyncio.ensure_future(rig.post("/generate", {"prompt": "a"})) for _ in range(50)]
        await rig.worker.until(lambda worker: len(worker.submitted) == 50)
        assert (await rig.client.get("/health")).status == 200
        for one in asked:
            one.cancel()
        await rig.worker.until(lambda worker: len(worker.aborted) == 50)
        assert rooms(rig) == 0
        rig.worker.script = [out("x", "length")]
        assert (await rig.post("/generate", {"prompt": "a"})).status == 200


async def test_ready_tells_why_not() -> None:
    async with rigged() as rig:
        assert (await rig.client.get("/ready")).status == 200
        rig.not_ready = "no canary has passed since worker 0 died"
        answer = await rig.client.get("/ready")
        assert answer.status == 503
        assert await answer.json() == {"ready": False, "reason": rig.not_ready}


async def test_status_and_models_are_told() -> None:
    async with rigged() as rig:
        status = await rig.client.get("/internal/status", headers=BEARER)
        assert (await status.json())["role"] == "hybrid"
        models = await (await rig.client.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["null"]
        assert (await rig.client.get("/v1/models/gpt")).status == 404


async def test_metrics_count_what_happened() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("xy", "length")]
        await rig.post("/generate", {"prompt": "abc"})
        await rig.post("/generate", {"prompt": ""})
        text = await (await rig.client.get("/metrics")).text()
        assert 'pdrt_requests_total{code="ok",path="/generate"} 1.0' in text
        assert 'pdrt_requests_total{code="bad_request",path="/generate"} 1.0' in text
        assert "pdrt_prompt_tokens_total 3.0" in text
        assert "pdrt_output_tokens_total 2.0" in text
        assert "pdrt_first_token_seconds_count 1.0" in text


# Paths.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["decode", "hybrid"])
@pytest.mark.parametrize("path", ["disagg", "local", "fallback:no_prefill"])
async def test_header_and_body_say_the_path_that_the_router_told(
    path: str, role: Role, stream: bool
) -> None:
    """CASES 81."""
    async with rigged(role) as rig:
        rig.worker.script = [out("x", "length")]
        body = {"prompt": "abc", "stream": stream, **rig.leg(path=path)}
        answer = await rig.post("/generate", body, headers=BEARER)
        said = (await chunks_of(answer))[-1] if stream else await answer.json()
        assert (answer.headers["x-pd-path"], said["path"]) == (path, path)


@pytest.mark.parametrize("may", [False, True])
async def test_a_decode_leader_takes_a_prompt_without_a_prefill_only_where_it_may(
    may: bool,
) -> None:
    """It has all of the prompt then: it tells what is asked of that, too."""
    async with rigged("decode", takes_prompts=may) as rig:
        leg = rig.leg()
        for name in ("bootstrap_host", "bootstrap_port", "disagg_prefill_dp_rank"):
            del leg[name]
        rig.worker.script = [out("x", "length", scored=scored(b"abc", 0))]
        body = {"prompt": "abc", "sampling_params": {"prompt_logprobs": 0}, **leg}
        answer = await rig.post("/generate", body, headers=BEARER)
        if not may:
            _, code, message = await error_of(answer)
            assert (code, "local_prefill is off" in message) == ("bad_request", True)
            return
        told = await answer.json()
        assert (told["path"], answer.headers["x-pd-path"]) == ("local", "local")
        assert len(told["prompt_logprobs"]) == 3
        assert rig.worker.submitted[0].source is None


@pytest.mark.parametrize("path", ["direct", "fallback:", "local\r\nx: y"])
async def test_a_path_that_nobody_knows_is_refused(path: str) -> None:
    async with rigged() as rig:
        answer = await rig.post("/generate", {"prompt": "a", **rig.leg(path=path)}, headers=BEARER)
        assert answer.status == 400
