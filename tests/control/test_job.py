"""What plain backends are sent: the client's own bytes, with where to meet put into them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.http import parse_object
from pdrt.control.job import PlainJob
from pdrt.control.schema import LegFields

MEET = {"bootstrap_room": 7, "bootstrap_host": 'h"ost', "bootstrap_port": 9}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["stream", "stream_options", "text", "bootstrap_room", "n"]) | st.text()


@dataclass
class There:
    room: int = 7
    bootstrap: tuple[str, int] | None = ('h"ost', 9)

    def leg(self) -> LegFields:
        raise AssertionError("a plain backend is told of no leg")


def job(raw: bytes) -> PlainJob:
    return PlainJob(parse_object(raw), raw)


@given(st.dictionaries(names, values, max_size=5), st.sampled_from([None, 2]), st.booleans())
def test_each_leg_is_sent_the_clients_fields_and_the_meeting_place(
    fields: dict[str, Any], indent: int | None, is_ascii: bool
) -> None:
    try:
        raw = json.dumps(fields, indent=indent, ensure_ascii=is_ascii).encode()
    except UnicodeEncodeError:  # half a pair
        return
    decode, prefill = (json.loads(job(raw).body(s, There())) for s in ("decode", "prefill"))
    assert decode == fields | MEET
    left_out = {"stream", "stream_options"}
    assert {k: v for k, v in prefill.items() if k not in left_out} == {
        k: v for k, v in (fields | MEET).items() if k not in left_out
    }
    assert prefill.get("stream") is not True
    assert "stream_options" not in prefill


@pytest.mark.parametrize(
    ("raw", "is_kept"),
    [
        (b'{"text": "a",  "stream": true}', True),
        (b'{"text": "a \\"stream\\": true", "stream": true}', True),
        (b'{"text": "stream", "stream": true}', False),
        (b'{"text": "\\u0061", "stream": true}', False),
        (b'{"str\\u0065am": true, "of": {"stream": true}}', False),
        ('{"text": "a", "stream": true}'.encode("utf-16-le"), False),
        (b' {"text": "a", "stream": true}', False),
    ],
)
def test_only_the_field_itself_is_changed_for_prefill(raw: bytes, is_kept: bool) -> None:
    body = job(raw).body("prefill", There())
    fields = parse_object(raw)
    assert json.loads(body) == {**fields, **MEET} | ({"stream": False} if is_kept else {}) or (
        json.loads(body) == {k: v for k, v in fields.items() if k != "stream"} | MEET
    )
    assert (b'"stream":false' in body) == is_kept


def test_alone_it_is_sent_as_it_came() -> None:
    raw = b'{"text":   "a"}'
    assert job(raw).body("hybrid", There(bootstrap=None)) == raw


def test_a_large_body_is_not_encoded_anew() -> None:
    raw = b'{"input_ids": [' + b"1, " * 100_000 + b"1]}"
    assert job(raw).body("decode", There()).startswith(raw[:-1])


@pytest.mark.parametrize("said", [b"true", b"1", b'"true"'])
def test_prefill_is_not_asked_to_stream_however_a_client_says_it(said: bytes) -> None:
    asked = job(b'{"prompt": "a", "stream": %b}' % said)
    assert asked.stream
    assert not json.loads(asked.body("prefill", There())).get("stream")
    assert json.loads(asked.body("decode", There()))["stream"] == json.loads(said)
