"""An answer that moves to another leader: its client reads what it would have read, byte for byte.

Each stream is cut at every byte. What the router then knows is all that the next leader gets, and
the worker behind that says the tokens that were not told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pdrt.control.answer import Delta
from pdrt.control.marks import Heard, Marks
from pdrt.control.moving import Moving
from pdrt.control.sse import DONE, MAX_EVENT
from pdrt.errors import BadMessage, PdrtError, PeerLost
from pdrt.messages import Finish, Output, unpack_ids
from tests.control.leader_rig import BEARER, Rig, error_of, odd, rigged

TEXT = "Grüße, 你: wonder, world. No".encode()
CALLS = b'ab <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>.'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TIMES = re.compile(rb'"timings_ms":\{[^}]*\}')
CHAT = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]
    texts: Sequence[bytes] = (TEXT,)  # what each sequence would say
    sizes: Sequence[int] = (1,)  # tokens an output, in turn
    end: Finish = "length"  # with "stop" the last token is no text


ASKS = {
    "generate": Ask("/generate", {"prompt": "abc", "sampling_params": {"logprobs": 1}}),
    "generate, tokens grouped": Ask("/generate", {"prompt": "abc"}, sizes=(3, 1, 2)),
    "generate, a stop string": Ask(
        "/generate", {"prompt": "abc", "sampling_params": {"stop": ["world", "wonders"]}}
    ),
    "completions": Ask(
        "/v1/completions",
        {
            "prompt": "abc",
            "max_tokens": 99,
            "stop": "world",
            "logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "completions, no odds": Ask("/v1/completions", {"prompt": "abc", "max_tokens": 99}),
    "chat": Ask(
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "stop": ["world"],
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True},
        },
    ),
    "chat, tools": Ask(
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "tools": TOOLS,
            "stream_options": {"include_usage": True},
        },
        (CALLS,),
    ),
    "chat, two at once": Ask(
        "/v1/chat/completions",
        {"messages": CHAT, "n": 2, "stop": ["world"], "stream_options": {"include_usage": True}},
        (TEXT, b"Short."),
    ),
    "chat, one of two calls tools": Ask(
        "/v1/chat/completions",
        {"messages": CHAT, "n": 2, "tools": TOOLS},
        (CALLS, TEXT),
        end="stop",
    ),
    "generate, two at once": Ask(
        "/generate", {"prompt": "abc", "sampling_params": {"n": 2, "logprobs": 0}}, (b"ab", TEXT)
    ),
}


def said_by_worker(ask: Ask, told: Sequence[int]) -> list[Output]:
    """All that it says after so many tokens of each sequence; sequences take turns."""
    found: list[list[Output]] = []
    for index, text in enumerate(ask.texts):
        at, turn, outputs = 0, 0, list[Output]()
        while at < len(text):
            size = ask.sizes[turn % len(ask.sizes)]
            finish = ask.end if at + size >= len(text) else None
            if at >= told[index]:
                outputs.append(odd(text[at : at + size], at, finish, 2, index))
            at, turn = at + size, turn + 1
        found.append(outputs)
    longest = max(map(len, found))
    return [one[turn] for turn in range(longest) for one in found if turn < len(one)]


async def stream(rig: Rig, ask: Ask, told: Sequence[int], **leg: Any) -> bytes:
    rig.worker.script, rig.worker.pause = said_by_worker(ask, told), 3
    room = len(rig.worker.submitted)  # what an earlier worker still says is of no room here
    body = {**ask.body, "stream": True, **rig.leg(room, created=5, client_room=9, **leg)}
    answer = await rig.post(ask.path, body, headers=BEARER)
    assert answer.status == 200, await answer.text()
    return TIMES.sub(b"", await answer.read())


def cuts(marked: bytes, sequences: int) -> list[tuple[Heard, bytes]]:
    """What the router knows and what its client has after each byte, each state once."""
    found: dict[tuple[bytes, str], Heard] = {}
    for end in range(len(marked)):
        heard = Heard(sequences)
        client = heard.take(marked[: end // 2]) + heard.take(marked[end // 2 : end])
        found.setdefault((client, json.dumps(heard.choices())), heard)
    return [(heard, client) for (client, _), heard in found.items()]


def by_choice(ask: Ask, client: bytes) -> list[list[bytes]]:
    """The events of each sequence, in order, and those of none."""
    events = client.split(b"\n\n")
    marks = [f'"index":{index}'.encode() for index in range(len(ask.texts))]
    each = [[event for event in events if mark in event] for mark in marks]
    return [*each, [event for event in events if not any(mark in event for mark in marks)]]


@pytest.mark.parametrize("name", ASKS)
async def test_a_stream_goes_on_from_wherever_it_was_cut(name: str) -> None:
    """CASES 85, 89, 93, 94: text, ids, odds, offsets, usage and end; nothing twice."""
    ask, n = ASKS[name], len(ASKS[name].texts)
    async with rigged("decode") as rig:
        plain = await stream(rig, ask, [0] * n)
        marked = await stream(rig, ask, [0] * n, marks=True)
        whole = Heard(n)
        assert (whole.take(marked), whole.is_over, whole.is_whole) == (plain, True, True)
        tried = 0
        for heard, client in cuts(marked, n):
            told = [len(choice["ids"]) for choice in heard.choices()]
            if heard.is_whole or not client:
                continue  # only [DONE] is missing, or the request simply starts again
            choices = heard.choices()
            resumed = {"choices": choices, "cached_tokens": heard.cached_tokens}
            rest = await stream(rig, ask, told, marks=True, resumed=resumed)
            going = {one.index: unpack_ids(one.tokens) for one in rig.worker.submitted[-1].said}
            assert going == {
                i: list(ask.texts[i][: told[i]])
                for i, choice in enumerate(choices)
                if not choice["finish"]
            }
            heard.forget_part()
            both = client + heard.take(rest)
            assert heard.is_over, told
            if n == 1:
                assert both == plain, told
            assert by_choice(ask, both) == by_choice(ask, plain), told
            tried += 1
        assert tried > 4


async def test_a_second_move_starts_from_both_parts() -> None:
    ask = ASKS["generate, a stop string"]
    async with rigged("decode") as rig:
        plain = await stream(rig, ask, [0])
        heard, client = Heard(1), b""
        for share in (0.3, 0.5, 1.0):
            told = [len(heard.choices()[0]["ids"])]
            leg = {"resumed": {"choices": heard.choices()}} if client else {}
            part = await stream(rig, ask, told, marks=True, **leg)
            heard.forget_part()
            client += heard.take(part[: int(len(part) * share)])
        assert client == plain


async def test_times_are_counted_from_the_clients_first_leg() -> None:
    async with rigged("decode") as rig:
        rig.worker.script = [odd("b", 1, "length")]
        resumed = {"choices": [{"ids": [97]}], "elapsed_s": 20.0, "first_s": 0.5}
        body = {"prompt": "a", "stream": True, **rig.leg(resumed=resumed)}
        answer = await rig.post("/generate", body, headers=BEARER)
        times = json.loads((await answer.text()).split("\n")[0][6:])["timings_ms"]
        assert times["first_token"] == 500
        assert 20_000 <= times["total"] < 21_000
        assert times.keys() == {"first_token", "total"}


async def test_an_answer_whose_beginning_was_put_before_it_goes_on_without_another() -> None:
    """The opening event has been told, and no token after it."""
    ask = ASKS["chat"]
    async with rigged("decode") as rig:
        rest = await stream(rig, ask, [0], resumed={"choices": [{"ids": []}]})
        assert b'"role"' not in rest
        plain = await stream(rig, ask, [0])
        assert plain.endswith(rest)
        assert plain.count(b"\n\n") == rest.count(b"\n\n") + 1


@pytest.mark.parametrize(
    ("fields", "resumed", "names"),
    [
        ({}, {"choices": []}, "choices"),
        ({}, {"choices": [{"ids": [1]}, {"ids": [1]}]}, "2 sequences of 1"),
        ({}, {"choices": [{"ids": [1], "finish": "stop"}]}, "no sequence is left"),
        ({}, {"choices": [{"ids": [-1]}]}, "ids"),
        ({}, {"choices": [{"ids": [1], "finish": "never"}]}, "finish"),
        ({"stream": False}, {"choices": [{"ids": [1]}]}, "stream = true"),
        ({"sampling_params": {"stop": "ab"}}, {"choices": [{"ids": [*b"ab"]}]}, "stop string"),
    ],
)
async def test_what_no_router_says_is_refused_by_name(
    fields: dict[str, Any], resumed: dict[str, Any], names: str
) -> None:
    async with rigged("decode") as rig:
        body = {"prompt": "a", "stream": True, **fields, **rig.leg(resumed=resumed)}
        answer = await rig.post("/generate", body, headers=BEARER)
        status, code, message = await error_of(answer)
        assert (status, code) == (400, "bad_request")
        assert names in message
        assert rig.leader.dispatcher.load().rooms == 0


async def test_a_client_can_neither_resume_nor_see_marks() -> None:
    async with rigged("hybrid") as rig:
        for field in ({"marks": True}, {"resumed": {"choices": [{"ids": [1]}]}}, {"path": "local"}):
            answer = await rig.post("/generate", {"prompt": "a", **field})
            assert answer.status == 400


# Marks alone.


def test_an_error_event_is_kept_from_the_client() -> None:
    heard = Heard(1)
    event = b'event: error\ndata: {"error": {"code": "peer_lost", "message": "why"}}\n\n'
    assert heard.take(b"data: 1\n\n" + event[:30]) == b"data: 1\n\n"
    assert heard.error is None
    assert heard.take(event[30:]) == b""
    assert (heard.error is not None, str(heard.error)) == (True, "why")


@pytest.mark.parametrize(
    "line",
    [b":t \n", b":t 0 1 0 -\n", b":t 1 1 0 - 5\n", b":t 0 -1 0 - 5\n", b":t x 1 0 - 5\n",
     b":t 0 1 0 \xff 5\n", b":t 0 1 0 - 5 6\n"],
)  # fmt: skip
def test_who_says_what_is_no_mark_is_lost_and_what_was_told_before_counts(line: bytes) -> None:
    heard = Heard(1)
    assert heard.take(b":t 0 1 0 - 5\ndata: 0\n\n" + line + b"data: 1\n\n") == b"data: 0\n\n"
    assert isinstance(heard.error, PeerLost)
    assert heard.choices() == [{"ids": [5], "finish": None}]


def test_ids_that_are_none_are_refused_when_they_are_needed() -> None:
    heard = Heard(1)
    assert heard.take(b":t 0 1 0 - x,y\ndata: 1\n\n") == b"data: 1\n\n"
    with pytest.raises(BadMessage):
        heard.choices()


def test_what_is_held_back_has_a_bound() -> None:
    heard = Heard(1)
    assert heard.take(b"data: " + bytes(MAX_EVENT)) == b""
    assert isinstance(heard.error, PeerLost)


def test_comments_and_keep_alives_pass() -> None:
    heard = Heard(1)
    stream_bytes = b": ping\n\ndata: 1\n\n" + DONE
    assert heard.take(stream_bytes) == stream_bytes
    assert heard.is_over


def test_tokens_that_no_event_told_are_told_with_the_next_of_their_sequence() -> None:
    marks = Marks()
    assert marks.of(Delta("", (1, 2), None, 0), 0, 0) == b""
    assert marks.of(Delta("x", (9,), None, 1), 3, 1) == b":t 1 1 3 - 9\n"
    assert marks.of(Delta("y", (3,), "stop", 0), 3, 2) == b":t 0 2 3 stop 1,2,3\n"


@pytest.mark.parametrize(
    "mark", [b"0 1 0 nonsense 5", b"0 1 0 - 99999999999", b"0 1 99999999999 - 5"]
)
def test_marks_that_make_no_sense_end_the_stream_with_a_typed_error(mark: bytes) -> None:
    moving = Moving(1, "disagg", 7, 0.0, lambda: 1.0)
    moving.take(b":t " + mark + b"\ndata: {}\n\n")
    with pytest.raises(PdrtError):
        moving.next_leg()
