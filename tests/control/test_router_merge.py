"""What only prefill can tell of a prompt is put before decode's answer; no other is touched.

CASES 90: streamed and whole; decode never hears of it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pdrt.control.legs import State
from tests.control.fake_leader import Json, Play, Seen, after, die, good, hang, status, stream
from tests.control.router_rig import Rig, rig, until

COMPLETIONS = "/v1/completions"
ASK: Json = {"prompt": "ab", "echo": True, "logprobs": 1, "request_id": "r-1"}
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
PART = {
    "text": "ab",
    "logprobs": {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5}],
        "text_offset": [0, 1],
    },
}
ODDS = {"prompt_logprobs": [None, {"id": 98, "token": "b", "logprob": -0.5, "top_logprobs": []}]}


def told(prompt: Json | None, **more: Any) -> Play:
    """A prefill leader's answer."""
    usage = {"prompt_tokens": 2, "cached_tokens": 1}
    body = {"status": "prefilled", "usage": usage, "model": "tiny", **more}
    return good(body if prompt is None else {**body, "prompt": prompt})


def choice(index: int, text: str, at: int, finish: str | None = "length") -> Json:
    odds = {
        "tokens": [text],
        "token_logprobs": [-1.0],
        "top_logprobs": [{text: -1.0}],
        "text_offset": [at],
    }
    return {"index": index, "text": text, "logprobs": odds, "finish_reason": finish}


def events(body: bytes) -> list[Json]:
    parts = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def event(chunk: Json) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def sent(found: Rig) -> tuple[Json, Json]:
    """What prefill and decode were sent."""
    return found.prefill[0].seen[-1].body, found.decode[0].seen[-1].body


@pytest.mark.parametrize("n", [1, 2])
async def test_a_whole_completion_begins_with_the_prompt(n: int) -> None:
    async with rig() as found:
        found.prefill[0].plays.append(told(PART))
        answer = {"id": "x", "choices": [choice(i, f"c{i}", 2) for i in range(n)], "usage": {}}
        found.decode[0].plays.append(good(answer))
        got = await found.send({**ASK, "n": n}, COMPLETIONS)
        assert got.status == 200
        assert got.headers["x-pd-path"] == "disagg"
        for index, one in enumerate(got.json["choices"]):
            assert (one["index"], one["text"]) == (index, f"abc{index}")
            own = choice(index, f"c{index}", 2)["logprobs"]
            assert one["logprobs"] == {k: PART["logprobs"][k] + own[k] for k in COLUMNS}  # type: ignore[index]
        assert (got.json["id"], got.json["usage"]) == ("x", {})
        prefill, decode = sent(found)
        assert (prefill["echo"], prefill["logprobs"]) == (True, 1)
        assert "echo" not in decode
        assert decode["text_starts_after_prompt"] is True
        assert prefill["created"] == decode["created"] == 1000  # one time for one answer
        await found.at_rest()


async def test_a_stream_begins_with_the_prompt_and_goes_on_byte_for_byte() -> None:
    async with rig() as found:
        found.prefill[0].plays.append(told(PART))
        decoded = b'data: {"odd":   "spacing"}\n\ndata: [DONE]\n\n'
        found.decode[0].plays.append(stream(decoded[:9], decoded[9:]))
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**ASK, "n": 2, "stream": True, "stream_options": options}
        got = await found.send(body, COMPLETIONS)
        assert got.headers["content-type"] == "text/event-stream"
        opening, whole = got.body.removesuffix(decoded), got.body
        assert whole == opening + decoded
        first, second, _ = events(got.body)
        usage = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
        assert first == {
            "id": "cmpl-r-1",
            "object": "text_completion",
            "created": 1000,
            "model": "tiny",
            "choices": [{"index": 0, **PART, "finish_reason": None}],
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": 1}},
        }
        assert second["choices"] == [{"index": 1, **PART, "finish_reason": None}]
        assert "stream_options" not in sent(found)[0]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_generate_has_the_prompts_odds(is_stream: bool) -> None:
    async with rig() as found:
        found.prefill[0].plays.append(told(ODDS))
        answer = {"request_id": "r-1", "output": "c", "output_ids": [99]}
        last = event(answer) + b"data: [DONE]\n\n"
        found.decode[0].plays.append(stream(last) if is_stream else good(answer))
        params = {"prompt_logprobs": 0, "logprobs": 0}
        body = {"prompt": "ab", "sampling_params": params, "request_id": "r-1"}
        got = await found.send({**body, "stream": is_stream, "bootstrap_room": 77})
        if is_stream:
            first, second = events(got.body)
            assert first == {
                "request_id": "r-1",
                "bootstrap_room": 77,
                "output": "",
                "output_ids": [],
                "finish_reason": None,
                **ODDS,
            }
            assert second == answer
        else:
            assert got.json == answer | ODDS
        prefill, decode = sent(found)
        assert prefill["sampling_params"]["prompt_logprobs"] == 0
        assert "prompt_logprobs" not in decode["sampling_params"]
        assert decode["sampling_params"]["logprobs"] == 0
        assert "text_starts_after_prompt" not in decode


async def test_whoever_asks_for_nothing_of_it_gets_decodes_bytes() -> None:
    async with rig() as found:
        found.prefill[0].plays.append(hang)
        body = b'{"choices":  []}'
        found.decode[0].plays.append(stream(body))
        got = await found.send({"prompt": "ab", "logprobs": 3}, COMPLETIONS)
        assert got.body == body
        assert "created" not in sent(found)[1]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_decodes_answer_waits_for_a_prefill_that_is_late(is_stream: bool) -> None:
    async with rig() as found:
        may = asyncio.Event()
        found.prefill[0].plays.append(after(may, told(PART)))
        ending = b"data: [DONE]\n\n"
        found.decode[0].plays.append(
            stream(ending) if is_stream else good({"choices": [choice(0, "c", 2)]})
        )
        asked = asyncio.create_task(found.send({**ASK, "stream": is_stream}, COMPLETIONS))
        await until(lambda: any(r.route.state is State.HELD for r in found.router.relays))
        assert not asked.done()
        may.set()
        got = await asked
        assert b'"ab' in got.body
        await found.at_rest()


@pytest.mark.parametrize(
    ("play", "code", "error"),
    [
        (status(500, "lost", "bad_logits"), 500, "bad_logits"),
        (told(None), 500, "internal"),
        (told(PART, model=None), 500, "internal"),
        (die, 503, "peer_lost"),
    ],
)
async def test_a_prefill_that_fails_after_decode_answered_is_a_typed_error(
    play: Play, code: int, error: str
) -> None:
    async with rig() as found:
        may = asyncio.Event()
        found.prefill[0].plays.append(after(may, play))
        found.decode[0].plays.append(stream(b"data: {}\n\n", ending="hang"))
        asked = asyncio.create_task(found.send({**ASK, "stream": True}, COMPLETIONS))
        await until(lambda: any(r.route.state is State.HELD for r in found.router.relays))
        may.set()
        got = await asked
        assert (got.status, got.error["code"]) == (code, error)
        await found.decode[0].seen[0].gone.wait()
        await found.at_rest()


async def test_another_pair_may_serve_it_when_prefill_is_lost_after_decode_answered() -> None:
    async with rig(prefill=2) as found:
        may = asyncio.Event()
        play_in_turn(found, after(may, die), told(PART))
        for _ in range(2):
            found.decode[0].plays.append(good({"choices": [choice(0, "c", 2)]}))
        asked = asyncio.create_task(found.send(ASK, COMPLETIONS))
        await until(lambda: any(r.route.state is State.HELD for r in found.router.relays))
        may.set()
        got = await asked
        assert (got.status, got.json["choices"][0]["text"]) == (200, "abc")
        assert len({seen.room for seen in found.decode[0].seen}) == 2  # nothing was kept
        await found.at_rest()


async def test_a_prefill_that_takes_a_lost_ones_place_tells_it() -> None:
    async with rig(prefill=2) as found:
        may = asyncio.Event()
        play_in_turn(found, status(500, "out of order", "internal"), told(PART))
        found.decode[0].plays.append(after(may, good({"choices": [choice(0, "c", 2)]})))
        asked = asyncio.create_task(found.send(ASK, COMPLETIONS))
        await until(lambda: bool(found.decode[0].seen_rebinds))
        may.set()
        got = await asked
        assert (got.status, got.json["choices"][0]["text"]) == (200, "abc")
        assert len(found.decode[0].seen) == 1


@pytest.mark.parametrize("has_answered", [False, True])
async def test_what_was_lost_with_a_prefill_that_decode_needs_no_more_is_an_error(
    has_answered: bool,
) -> None:
    """Decode refuses another one (409): it has its tokens, and the prompt's part is nowhere."""
    async with rig(prefill=2) as found:
        play_in_turn(found, status(500, "out of order", "internal"), hang)
        answered = good({"choices": [choice(0, "c", 2)]})
        may = asyncio.Event()
        found.decode[0].plays.append(after(may, answered) if has_answered else hang)
        refuses = asyncio.Event()
        found.decode[0].rebinds.append(after(refuses, status(409, "not needed", "conflict")))
        asked = asyncio.create_task(found.send(ASK, COMPLETIONS))
        await until(lambda: bool(found.decode[0].seen_rebinds))
        may.set()
        if has_answered:
            await until(lambda: any(r.route.state is State.HELD for r in found.router.relays))
        refuses.set()
        got = await asked
        assert (got.status, got.error["code"]) == (503, "transfer_failed")
        await found.at_rest()


def play_in_turn(found: Rig, *plays: Play) -> None:
    """Whichever prefill leader is asked."""
    left = iter(plays)

    async def play(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await next(left)(request, seen)

    for leader in found.prefill:
        leader.plays.extend([play] * len(plays))


async def test_the_deadline_bounds_the_wait_for_prefill() -> None:
    async with rig() as found:
        found.prefill[0].plays.append(hang)
        found.decode[0].plays.append(good({"choices": [choice(0, "c", 2)]}))
        asked = asyncio.create_task(found.send(ASK, COMPLETIONS))
        await until(lambda: any(r.route.state is State.HELD for r in found.router.relays))
        found.time.pass_deadlines()
        got = await asked
        assert (got.status, got.error["code"]) == (504, "deadline")
        await found.at_rest()


async def test_an_answer_of_decode_that_cannot_be_read_is_an_error() -> None:
    async with rig() as found:
        found.prefill[0].plays.append(told(PART))
        found.decode[0].plays.append(stream(b"no json"))
        got = await found.send(ASK, COMPLETIONS)
        assert (got.status, got.error["code"]) == (500, "internal")
        await found.at_rest()


UNFIT: list[Json] = [
    {},
    {"choices": [{"index": 0}]},
    {"choices": [choice(0, "c", 2) | {"text": 1}]},
]


@pytest.mark.parametrize("answer", UNFIT)
async def test_an_answer_of_decode_that_the_prompt_does_not_fit_is_an_error(answer: Json) -> None:
    async with rig() as found:
        found.prefill[0].plays.append(told(PART))
        found.decode[0].plays.append(good(answer))
        got = await found.send(ASK, COMPLETIONS)
        assert (got.status, got.error["code"]) == (500, "internal")
        assert "decode's answer" in got.error["message"]
        await found.at_rest()


@pytest.mark.parametrize("part", [{"text": "ab"}, {**PART, "logprobs": {"tokens": 1}}])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prefill_that_tells_something_else_of_the_prompt_is_an_error(
    part: Json, is_stream: bool
) -> None:
    async with rig() as found:
        found.prefill[0].plays.append(told(part))
        found.decode[0].plays.append(good({"choices": [choice(0, "c", 2)]}))
        got = await found.send({**ASK, "stream": is_stream}, COMPLETIONS)
        assert (got.status, got.error["code"]) == (500, "internal")
        assert "prefill told nothing" in got.error["message"]
        await found.at_rest()


async def test_a_hybrid_instance_says_all_of_it_by_itself() -> None:
    async with rig(prefill=0, decode=0, hybrid=1) as found:
        body = b'{"choices":   []}'
        found.hybrid[0].plays.append(stream(body))
        got = await found.send(ASK, COMPLETIONS)
        assert got.body == body
        assert found.hybrid[0].seen[0].body["echo"] is True


@pytest.mark.parametrize(("more", "most"), [({}, 1 << 20), ({"echo": True}, 1 << 25)])
async def test_prefill_may_answer_at_length_only_where_it_has_something_to_tell(
    more: Json, most: int
) -> None:
    body = {"prompt": "ab", "logprobs": 1, **more}
    async with rig() as found:
        found.prefill[0].plays.append(told(PART, padding="x" * (most - 4096)))
        found.decode[0].plays.append(good({"choices": [choice(0, "c", 2)]}))
        assert (await found.send(body, COMPLETIONS)).status == 200
        found.prefill[0].plays.append(told(PART, padding="x" * most))
        found.decode[0].plays.append(hang)
        got = await found.send(body, COMPLETIONS)
        assert (got.status, f"more than {most} bytes" in got.json["error"]["message"]) == (
            503,
            True,
        )
