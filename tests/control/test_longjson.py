"""Long JSON is read as the library reads it, and the event loop turns meanwhile."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.http import Json, parse_object
from pdrt.control.longjson import parse_long, read_long
from pdrt.control.reply import long_json_of
from pdrt.errors import BadRequest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NAMES = st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4)
ANSWERS = OBJECTS | st.fixed_dictionaries({"choices": st.lists(OBJECTS, max_size=3), "": VALUES})


@given(ANSWERS, st.sampled_from([None, 1, "\t"]), st.sampled_from(["", "plain"]))
def test_it_reads_what_the_library_reads(found: Json, indent: int | str | None, plain: str) -> None:
    try:
        body = json.dumps(found, indent=indent, ensure_ascii=bool(plain), allow_nan=False).encode()
    except ValueError:
        return  # an infinity, or half a pair
    assert said_again(body) == outcome(parse_object, body)


@given(ANSWERS, st.data())
def test_it_refuses_what_the_library_refuses(found: Json, data: st.DataObject) -> None:
    text = json.dumps(found, ensure_ascii=False)
    at = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.sampled_from(["", "{", "]", ",", ":", '"', "x", " "]))
    body = (text[:at] + put + text[at + 1 :]).encode()
    assert said_again(body) == outcome(parse_object, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'"a"',
        b'{"a":NaN}',
        b'{"a":1} b',
        b'{"a":[1,]}',
        b'{"a":1,}',
        b"{1:2}",
        b'{"a"',
        b'{"a":[1',
        b'{"a":"\\ud800"}',
        b'{"a":[1,NaN]}',
        b'{"choices":[{"a":1},]}',
        b'{"choices":[{"a":[1}]}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":' * 100_000,
        b"[" * 100_000,
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_object(body)
    with pytest.raises(BadRequest):
        parse_long(body)


@pytest.mark.parametrize("name", ["outputs", "choices"])
@pytest.mark.parametrize("count", [1, 300])
def test_however_many_answers_there_are_their_lists_stay_lists_of_what_they_were(
    name: str, count: int
) -> None:
    found = {name: [{"output_ids": [1, 2], "logprobs": [{"token": "a"}]}] * count}
    assert json.loads(long_json_of(parse_long(json.dumps(found).encode()))) == found


async def test_the_event_loop_turns_while_the_odds_of_a_prompt_are_read() -> None:
    """SPEC 2: 3 MB at once would keep every stream of a router waiting for its next token."""
    count = 1 << 15
    odds = {"tokens": ["x"] * count, "top_logprobs": [{"x": -1.5, "y": -0.25}] * count}
    whole = {"status": "prefilled", "prompt": {"text": "", "logprobs": odds}}
    for body in (whole, {"choices": [{"logprobs": odds}, {"logprobs": odds}]}):
        turns = 0
        reading = asyncio.ensure_future(read_long(json.dumps(body).encode()))
        while not reading.done():
            await asyncio.sleep(0.0005)
            turns += 1
        assert json.loads(long_json_of(await reading)) == body
        assert turns > 20


def said_again(body: bytes) -> object:
    """What its next reader takes it for."""
    found = outcome(parse_long, body)
    return json.loads(long_json_of(found)) if isinstance(found, dict) else found


def outcome(parse: object, body: bytes) -> object:
    assert callable(parse)
    try:
        return parse(body)
    except BadRequest:
        return BadRequest
