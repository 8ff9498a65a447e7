"""Log-probabilities, echo and several choices, as clients read them: whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.likely import MAX_PROMPT_ODDS
from pdrt.control.reply import long_json_of
from pdrt.messages import Output
from tests.control.leader_rig import BEARER, WALL, events_of, odd, out, rigged, scored

HI = {"messages": [{"role": "user", "content": "hi"}]}
CUT = "one你END and more"  # a stop string and half characters, cut anywhere
ENTRY = dict[str, Any]


def script(text: str, sizes: tuple[int, ...], top: int, finish: str = "length") -> list[Output]:
    """The text in outputs of so many bytes, the rest in the last."""
    data, found, at = text.encode(), list[Output](), 0
    for size in sizes:
        found.append(odd(data[at : at + size], at, top=top))
        at += size
    return [*found, odd(data[at:], at, finish, top)]


async def chunks_of(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    assert answer.status == 200, await answer.text()
    events = await events_of(answer)
    assert [name for name, _ in events] == ["message"] * len(events), events
    assert events[-1][1] == "[DONE]"
    return [json.loads(data) for _, data in events[:-1]]


def completion_odds(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns of all chunks, end to end."""
    found: dict[str, list[Any]] = {}
    for choice in choices:
        for name, column in (choice["logprobs"] or {}).items():
            found.setdefault(name, []).extend(column)
    return found


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=9,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.integers(0, 700))
def test_json_that_is_made_in_pieces_is_the_same(body: dict[str, Any], count: int) -> None:
    body["long"] = [{"n": list(range(count)), "m": [{"a": None}] * count}, 1]
    whole = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    assert long_json_of(body) == whole.encode()


# OpenAI's forms.


async def test_a_completion_has_openais_columns() -> None:
    async with rigged() as rig:
        rig.worker.script = script("ab", (), 2)
        answer = await rig.post("/v1/completions", {"prompt": "p", "logprobs": 2})
        body = await answer.json()
        assert body["choices"] == [
            {
                "index": 0,
                "text": "ab",
                "logprobs": {
                    "tokens": ["a", "b"],
                    "token_logprobs": [0.0, -0.125],
                    "top_logprobs": [{"a": 0.0, "X": -1.0}, {"b": -0.125, "X": -1.125}],
                    "text_offset": [0, 1],
                },
                "finish_reason": "length",
            }
        ]
        assert rig.worker.submitted[0].sampling.top_logprobs == 2
        assert rig.worker.submitted[0].scoring == -1


async def test_a_chat_has_openais_entries_with_bytes() -> None:
    async with rigged() as rig:
        rig.worker.script = [odd("é".encode()[:1]), odd("é".encode()[1:], 1), odd("", 2, "length")]
        plain = await (await rig.post("/v1/chat/completions", HI | {"logprobs": True})).json()
        assert plain["choices"][0]["logprobs"] == {
            "content": [
                {"token": "\ufffd", "logprob": 0.0, "bytes": [0xC3], "top_logprobs": []},
                {"token": "\ufffd", "logprob": -0.125, "bytes": [0xA9], "top_logprobs": []},
            ],
            "refusal": None,
        }
        assert plain["choices"][0]["message"]["content"] == "é"
        rig.worker.script = script("a", (), 1)
        asked = HI | {"logprobs": True, "top_logprobs": 1}
        told = await (await rig.post("/v1/chat/completions", asked)).json()
        (entry,) = told["choices"][0]["logprobs"]["content"]
        assert entry["top_logprobs"] == [{"token": "a", "logprob": 0.0, "bytes": [97]}]


async def test_generate_tells_ids_with_the_odds() -> None:
    async with rigged() as rig:
        rig.worker.script = script("a", (), 2)
        body = {"prompt": "p", "sampling_params": {"logprobs": 2}}
        told = await (await rig.post("/generate", body)).json()
        assert told["logprobs"] == [
            {
                "id": 97,
                "token": "a",
                "logprob": 0.0,
                "top_logprobs": [
                    {"id": 97, "token": "a", "logprob": 0.0},
                    {"id": 88, "token": "X", "logprob": -1.0},
                ],
            }
        ]


async def test_without_being_asked_nothing_is_told() -> None:
    async with rigged() as rig:
        rig.worker.script = script("a", (), 0)
        assert "logprobs" not in await (await rig.post("/generate", {"prompt": "p"})).json()
        for path, body in (("/v1/completions", {"prompt": "p"}), ("/v1/chat/completions", HI)):
            told = await (await rig.post(path, body)).json()
            assert told["choices"][0]["logprobs"] is None


async def test_what_json_cannot_hold_is_a_very_small_number() -> None:
    async with rigged() as rig:
        rig.worker.script = [Output(room=0, tokens=(97,), logprobs=(-float("inf"),))]
        rig.worker.script += [odd("", 1, "length")]
        body = {"prompt": "p", "sampling_params": {"logprobs": 0}}
        told = await (await rig.post("/generate", body)).json()
        assert told["logprobs"][0]["logprob"] == -9999.0


async def test_a_worker_that_tells_no_odds_is_our_fault_and_no_shorter_list() -> None:
    """CASES 89."""
    async with rigged() as rig:
        rig.worker.script = [odd("a"), out("b", "length")]
        answer = await rig.post("/v1/completions", {"prompt": "p", "logprobs": 0})
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal")


# As many as tokens, in any chunks.


@pytest.mark.parametrize("sizes", [(), (1,) * 16, (4, 2, 3)])
@pytest.mark.parametrize("stop", [None, "END", "e"])
async def test_each_token_has_its_odds_streamed_or_whole_stopped_or_not(
    sizes: tuple[int, ...], stop: str | None
) -> None:
    """CASES 89, 86: the first token too, and those that a stop string takes out of the text."""
    body: dict[str, Any] = {"prompt": "p", "logprobs": 1, "stop": stop, "max_tokens": 40}
    async with rigged() as rig:
        rig.worker.script = script(CUT, sizes, 1)
        whole = await (await rig.post("/v1/completions", body)).json()
        chunks = await chunks_of(await rig.post("/v1/completions", body | {"stream": True}))
        streamed = [chunk["choices"][0] for chunk in chunks]
        odds = completion_odds(streamed)
        assert odds == whole["choices"][0]["logprobs"]
        assert "".join(choice["text"] for choice in streamed) == whole["choices"][0]["text"]
        count = whole["usage"]["completion_tokens"]
        assert [len(column) for column in odds.values()] == [count] * 4
        assert odds["token_logprobs"] == [-i / 8 for i in range(count)]


async def test_a_token_that_is_no_text_yet_is_told_in_its_chunk() -> None:
    async with rigged() as rig:
        rig.worker.script = script("é", (1,), 0)
        asked = HI | {"logprobs": True, "stream": True}
        submitted = rig.worker.submitted
        chunks = await chunks_of(await rig.post("/v1/chat/completions", asked))
        content = [c["choices"][0] for c in chunks]
        told = [e["bytes"] for c in content for e in (c["logprobs"] or {"content": []})["content"]]
        assert told == [[0xC3], [0xA9]]
        assert "".join(c["delta"].get("content", "") for c in content) == "é"
        assert submitted[0].sampling.top_logprobs == 0


# The prompt.


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_tells_the_prompts_odds(stream: bool) -> None:
    async with rigged() as rig:
        rig.worker.script = [Output(room=0, tokens=(97,), scored=scored(b"xyz", 1))]
        rig.worker.script += [out("b", "length")]
        params = {"prompt_logprobs": 1}
        body = {"prompt": "xyz", "sampling_params": params, "stream": stream}
        answer = await rig.post("/generate", body)
        parts = await chunks_of(answer) if stream else [await answer.json()]
        assert [name for part in parts for name in part if name == "prompt_logprobs"] != []
        first, *entries = parts[0]["prompt_logprobs"]
        assert first is None
        assert [(e["id"], e["logprob"]) for e in entries] == [(121, -0.0625), (122, -0.125)]
        assert [len(e["top_logprobs"]) for e in entries] == [1, 1]
        assert "".join(part["output"] for part in parts) == "ab"
        assert rig.worker.submitted[0].scoring == 1
        assert rig.worker.submitted[0].sampling.top_logprobs == 0


@pytest.mark.parametrize("prompt", ["xé", list("xé".encode())])
@pytest.mark.parametrize("max_tokens", [2, 0])
async def test_echo_puts_the_prompt_and_its_odds_before_the_answer(
    prompt: Any, max_tokens: int
) -> None:
    async with rigged() as rig:
        first = odd("a", 0, top=1)
        rig.worker.script = [
            Output(
                room=0,
                tokens=first.tokens,
                logprobs=first.logprobs,
                tops=first.tops,
                scored=scored("xé".encode(), 1),
                finish=None if max_tokens else "length",
            ),
            *([odd("b", 1, "length", 1)] if max_tokens else []),
        ]
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        whole = await (await rig.post("/v1/completions", body)).json()
        (choice,) = whole["choices"]
        assert choice["text"] == "xé" + "ab"[:max_tokens]
        assert (
            choice["logprobs"]["tokens"]
            == (["x", "bytes:\\xc3", "bytes:\\xa9", "a", "b"][: 3 + max_tokens])
        )
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.0625, -0.125]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3][: 3 + max_tokens]
        assert whole["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
        chunks = await chunks_of(await rig.post("/v1/completions", body | {"stream": True}))
        streamed = [chunk["choices"][0] for chunk in chunks]
        assert "".join(one["text"] for one in streamed) == choice["text"]
        assert completion_odds(streamed) == choice["logprobs"]
        assert streamed[-1]["finish_reason"] == "length"


async def test_echo_without_logprobs_is_the_text_alone() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("b", "length")]
        body = {"prompt": "a ", "echo": True}
        (choice,) = (await (await rig.post("/v1/completions", body)).json())["choices"]
        assert (choice["text"], choice["logprobs"]) == ("a b", None)
        assert rig.worker.submitted[0].scoring == -1


async def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("b", "length")]
        params = {"prompt_logprobs": 3}
        body = {"prompt": "a", "sampling_params": params}
        assert (await (await rig.post("/generate", body)).json())["prompt_logprobs"] == [None]


async def test_a_worker_that_does_not_score_the_prompt_is_our_fault() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("b", "length")]
        body = {"prompt": "abc", "sampling_params": {"prompt_logprobs": 0}}
        answer = await rig.post("/generate", body)
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal")


async def test_a_prompt_with_more_odds_than_a_message_takes_is_400() -> None:
    limit = MAX_PROMPT_ODDS // 2
    async with rigged(max_model_len=1 << 20) as rig:
        rig.worker.script = [Output(room=0, tokens=(1,), scored=scored(b"a" * limit, 1))]
        rig.worker.script += [out("b", "length")]
        body = {"prompt": [97] * (limit + 1), "sampling_params": {"prompt_logprobs": 1}}
        refused = await rig.post("/generate", body)
        assert refused.status == 400
        assert str(MAX_PROMPT_ODDS) in (await refused.json())["error"]["message"]
        assert not rig.worker.submitted
        body["prompt"] = [97] * limit
        served = await (await rig.post("/generate", body)).json()
        assert len(served["prompt_logprobs"]) == limit


async def test_a_prefill_leg_answers_with_its_part_and_a_decode_leg_begins_after_it() -> None:
    """CASES 90."""
    body = {"prompt": "xy", "logprobs": 1, "model": "null"}
    async with rigged("prefill") as rig:
        rig.worker.script = [Output(room=0, finish="prefilled", scored=scored(b"xy", 1))]
        sent = body | rig.leg() | {"echo": True}
        told = await (await rig.post("/v1/completions", sent, headers=BEARER)).json()
        assert told["status"] == "prefilled"
        assert told["prompt"] == {
            "text": "xy",
            "logprobs": {
                "tokens": ["x", "y"],
                "token_logprobs": [None, -0.0625],
                "top_logprobs": [None, {"y": -0.0625}],
                "text_offset": [0, 1],
            },
        }
        sent = {"prompt": "xy", "sampling_params": {"prompt_logprobs": 0}} | rig.leg(8)
        told = await (await rig.post("/generate", sent, headers=BEARER)).json()
        assert [bool(entry) for entry in told["prompt"]["prompt_logprobs"]] == [False, True]
        rig.worker.script = [Output(room=0, finish="prefilled")]
        told = await (
            await rig.post("/generate", {"prompt": "xy"} | rig.leg(9), headers=BEARER)
        ).json()
        assert "prompt" not in told
    async with rigged("decode") as rig:
        rig.worker.script = script("ab", (), 0)
        leg = rig.leg(text_starts_after_prompt=True, created=5)
        told = await (await rig.post("/v1/completions", body | leg, headers=BEARER)).json()
        assert told["choices"][0]["logprobs"]["text_offset"] == [2, 3]
        assert (told["choices"][0]["text"], told["created"]) == ("ab", 5)
        assert rig.worker.submitted[0].scoring == -1


# Several choices.


def woven() -> list[Output]:
    """Two sequences, the second one shorter, in turns."""
    return [
        odd("ab", 0, index=0),
        odd("x", 0, index=1),
        odd("y", 1, "length", index=1),
        odd("cd", 2, "length", index=0),
    ]


async def test_choices_are_indexed_and_all_are_counted() -> None:
    async with rigged() as rig:
        rig.worker.script = woven()
        body = {"prompt": "p", "n": 2, "logprobs": 0}
        told = await (await rig.post("/v1/completions", body)).json()
        assert [(c["index"], c["text"]) for c in told["choices"]] == [(0, "abcd"), (1, "xy")]
        assert told["choices"][1]["logprobs"]["token_logprobs"] == [-0.125, -0.25]
        assert told["usage"]["completion_tokens"] == 6
        assert rig.worker.submitted[0].sampling.n == 2
        chat = await (await rig.post("/v1/chat/completions", HI | {"n": 2})).json()
        assert [c["message"]["content"] for c in chat["choices"]] == ["abcd", "xy"]
        plain = await (
            await rig.post("/generate", {"prompt": "p", "sampling_params": {"n": 2}})
        ).json()
        assert [(o["index"], o["output"]) for o in plain["outputs"]] == [(0, "abcd"), (1, "xy")]
        assert "output" not in plain
        assert plain["usage"]["completion_tokens"] == 6
        assert (rig.worker.aborted, rig.leader.dispatcher.load().rooms) == ([], 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_streams_of_choices_interleave_and_each_has_its_finish(path: str) -> None:
    async with rigged() as rig:
        rig.worker.script = woven()
        usage = {"stream_options": {"include_usage": True}}
        body: dict[str, Any] = {
            "/v1/completions": {"prompt": "p", "n": 2, "stream": True, **usage},
            "/v1/chat/completions": HI | {"n": 2, "stream": True, **usage},
            "/generate": {"prompt": "p", "sampling_params": {"n": 2}, "stream": True},
        }[path]
        chunks = await chunks_of(await rig.post(path, body))
        choices = [c for chunk in chunks for c in chunk.get("choices", [chunk])]
        for index, text in enumerate(["abcd", "xy"]):
            own = [c for c in choices if c["index"] == index]
            said = [c.get("text", c.get("output", c.get("delta", {}).get("content"))) for c in own]
            assert "".join(one or "" for one in said) == text
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
            assert own[-1]["finish_reason"] == "length"
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
        assert (counts, bool(chunks[-1]["usage"])) == ([6], True)


async def test_each_choice_is_told_its_role_and_the_prompt() -> None:
    async with rigged() as rig:
        rig.worker.script = woven()
        chunks = await chunks_of(
            await rig.post("/v1/chat/completions", HI | {"n": 2, "stream": True})
        )
        opening = [c["choices"][0] for c in chunks[:2]]
        assert [(c["index"], c["delta"].get("role")) for c in opening] == [
            (0, "assistant"),
            (1, "assistant"),
        ]
        body = {"prompt": "p>", "n": 2, "echo": True}
        told = await (await rig.post("/v1/completions", body)).json()
        assert [c["text"] for c in told["choices"]] == ["p>abcd", "p>xy"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_own_choice_and_no_other(stream: bool) -> None:
    """CASES 86: the worker is told to stop that one at once."""
    async with rigged() as rig:
        body = {"prompt": "p", "n": 3, "stop": "END", "stream": stream}
        asked = rig.post("/v1/completions", body)
        rig.worker.script = [
            odd("one END", 0, index=1),
            odd("two", 0, "length", index=0),
            odd(" late", 7, index=1),
            odd("three E", 0, index=2),
            odd("ND", 7, index=2),
        ]
        answer = await asked
        if stream:
            choices = [c for chunk in await chunks_of(answer) for c in chunk["choices"]]
        else:
            choices = (await answer.json())["choices"]
        texts = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(3)]
        assert texts == ["two", "one ", "three "]
        reasons = {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}
        assert reasons == {0: "length", 1: "stop", 2: "stop"}
        (submit,) = rig.worker.submitted
        assert rig.worker.stopped == [1]
        assert rig.worker.aborted == [(submit.room, "stop")]  # the last one that went on
        assert rig.leader.dispatcher.load().rooms == 0


async def test_the_created_time_is_the_clocks() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("a", "length")]
        told = await (await rig.post("/v1/completions", {"prompt": "p"})).json()
        assert told["created"] == int(WALL)
