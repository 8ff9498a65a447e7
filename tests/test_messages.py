"""Bytes become a message or a BadMessage, quickly and without much memory; nothing else."""

from __future__ import annotations

import contextlib
import pickle
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pdrt import messages
from pdrt.errors import BadMessage
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    FROM_WORKER,
    TO_WORKER,
    AbortTransfer,
    Failed,
    KvLayout,
    Output,
    Outputs,
    Ping,
    Problem,
    Rank,
    Sampling,
    Stats,
    decode,
    encode,
    pack_ids,
    unpack_ids,
)
from tests.message_strategies import any_of, kinds_of

DIRECTIONS: dict[str, tuple[TypeAdapter[Any], object]] = {
    "from decode": (FROM_DECODE, messages.FromDecode),
    "from prefill": (FROM_PREFILL, messages.FromPrefill),
    "to worker": (TO_WORKER, messages.ToWorker),
    "from worker": (FROM_WORKER, messages.FromWorker),
    "from node": (messages.FROM_NODE, messages.FromNode),
    "to node": (messages.TO_NODE, messages.ToNode),
}
ADAPTERS = [adapter for adapter, _ in DIRECTIONS.values()]
PEERS = [FROM_DECODE, FROM_PREFILL]
SENT = st.one_of(
    [st.tuples(st.just(adapter), any_of(union)) for adapter, union in DIRECTIONS.values()]
)
ABORT = AbortTransfer(room=1, attempt=2, session="s")


@given(SENT)
@settings(max_examples=150, deadline=None)
def test_what_is_encoded_decodes_to_the_same(sent: tuple[TypeAdapter[Any], Any]) -> None:
    adapter, message = sent
    assert decode(adapter, encode(adapter, message)) == message


@pytest.mark.parametrize("name", DIRECTIONS)
def test_each_kind_of_a_direction_has_its_own_op(name: str) -> None:
    kinds = kinds_of(DIRECTIONS[name][1])
    ops = [field.default for kind in kinds for field in fields(kind) if field.name == "op"]
    assert len(set(ops)) == len(ops) == len(kinds)


def test_unknown_fields_are_ignored_so_that_fields_can_be_added() -> None:
    body = FROM_DECODE.dump_python(ABORT) | {"later": [1, {"x": b"y"}]}
    assert decode(FROM_DECODE, msgpack.packb(body)) == ABORT


def test_a_missing_field_with_a_default_takes_it() -> None:
    body = {"op": "outputs", "items": [{"room": 1}]}
    message = decode(FROM_WORKER, msgpack.packb(body))
    assert isinstance(message, Outputs)
    assert (message.items[0].tokens, message.items[0].attempt) == ((), -1)


WRONG = [
    {},
    {"op": "abort"},
    {"op": "no such op", "room": 1},
    {"op": ["abort"], "room": 1, "attempt": 2, "session": "s"},
    {"op": "abort", "room": -1, "attempt": 2, "session": "s"},
    {"op": "abort", "room": 1 << 63, "attempt": 2, "session": "s"},
    {"op": "abort", "room": 1, "attempt": 1 << 32, "session": "s"},
    {"op": "abort", "room": 1, "attempt": 2, "session": "s" * 513},
    {"op": "abort", "room": 1, "attempt": 2, "session": None},
    {"op": "abort", "room": float("nan"), "attempt": 2, "session": "s"},
    {"op": "abort", "room": 1.5, "attempt": 2, "session": "s"},
    {"op": "submit", "room": 1},
    [],
    ["abort", 1, 2, "s"],
    None,
    7,
    "abort",
    b"abort",
]


@pytest.mark.parametrize("body", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("adapter", PEERS)
def test_what_is_no_message_is_a_bad_message(adapter: TypeAdapter[Any], body: object) -> None:
    with pytest.raises(BadMessage) as refused:
        decode(adapter, msgpack.packb(body))
    assert 0 < len(str(refused.value)) <= 500


def test_the_reason_names_the_field_and_shows_no_bytes() -> None:
    body = {"op": "ping", "session": "s", "number": "a secret"}
    with pytest.raises(BadMessage, match=r"ping\.number: .*integer") as refused:
        decode(FROM_DECODE, msgpack.packb(body))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("adapter", [FROM_PREFILL, TO_WORKER, FROM_WORKER])
def test_a_message_of_another_direction_is_a_bad_message(adapter: TypeAdapter[Any]) -> None:
    with pytest.raises(BadMessage):
        decode(adapter, encode(FROM_DECODE, ABORT))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


def nested_maps(depth: int) -> bytes:
    """64 entries on each level, as many levels as the size limit allows."""
    inner = b"\x80"
    for _ in range(depth):
        entries = b"".join(b"\xa1" + bytes([65 + i % 60]) + inner for i in range(64))
        grown = b"\xde\x00\x40" + entries
        if len(grown) > messages.MAX_PEER_BYTES:
            break
        inner = grown
    return inner


GOOD = FROM_DECODE.dump_python(ABORT)
HOSTILE = {
    "nothing": b"",
    "pickle": pickle.dumps(Bomb()),
    "pickle in a bin": msgpack.packb({"op": "ping", "session": pickle.dumps(Bomb()), "number": 1}),
    "deep arrays": b"\x91" * 1_000_000,
    "deep maps": b"\x81\xa1a" * 300_000,
    "deep wide arrays": b"\xdc\x3f\xff" * 3000,
    "deep array that ends": b"\x91" * 500 + b"\x00",
    "huge bin": b"\xc6\xff\xff\xff\xff" + b"x" * 100,
    "huge string": b"\xdb\xff\xff\xff\xff",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "many empty arrays": b"\xdc\x3f\xff" + b"\x90" * 16383,
    "nested maps": nested_maps(9),
    "extension": b"\xc9\x00\x00\x00\x01\x05x",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "integer keys": b"\x81\x01\x01",
    "not utf-8": b"\x81\xa2op\xa2\xff\xff",
    "trailing bytes": encode(FROM_DECODE, ABORT) + b"\x00",
    "reserved byte": b"\xc1",
    "too long": b"\x00" * (messages.MAX_MESSAGE_BYTES + 1),
    "good with an extension": msgpack.packb(GOOD | {"later": msgpack.ExtType(5, b"x")}),
    "good but too long between ranks": msgpack.packb(
        GOOD | {name: b"\x00" * 600_000 for name in ("later", "still later")}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("adapter", PEERS)
def test_hostile_bytes_are_refused_without_big_allocations(
    adapter: TypeAdapter[Any], name: str
) -> None:
    with peak_below(24 << 20), pytest.raises(BadMessage):
        decode(adapter, HOSTILE[name])


@pytest.mark.parametrize("name", [name for name in HOSTILE if "between ranks" not in name])
@pytest.mark.parametrize("adapter", [TO_WORKER, FROM_WORKER])
def test_a_worker_and_its_supervisor_refuse_them_too(adapter: TypeAdapter[Any], name: str) -> None:
    with pytest.raises(BadMessage):
        decode(adapter, HOSTILE[name])


@contextlib.contextmanager
def peak_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


@given(st.sampled_from(ADAPTERS), st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_message_or_a_bad_message(adapter: TypeAdapter[Any], frame: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(adapter, frame)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(st.characters(codec="utf-8"), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abop", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(SENT, st.data())
@settings(max_examples=150, deadline=None)
def test_a_message_with_any_value_in_any_field_is_a_message_or_a_bad_message(
    sent: tuple[TypeAdapter[Any], Any], data: st.DataObject
) -> None:
    adapter, message = sent
    body = adapter.dump_python(message)
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(VALUES)
    with contextlib.suppress(BadMessage):
        decode(adapter, msgpack.packb(body))


@given(SENT, st.integers(0, 1 << 30), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_frame_is_a_message_or_a_bad_message(
    sent: tuple[TypeAdapter[Any], Any], at: int, byte: int
) -> None:
    adapter, message = sent
    frame = bytearray(encode(adapter, message))
    frame[at % len(frame)] = byte
    with contextlib.suppress(BadMessage):
        decode(adapter, bytes(frame))


@given(SENT)
@settings(max_examples=50, deadline=None)
def test_a_frame_that_was_cut_off_is_a_bad_message(sent: tuple[TypeAdapter[Any], Any]) -> None:
    adapter, message = sent
    frame = encode(adapter, message)
    for end in random.Random(len(frame)).sample(range(len(frame)), k=min(9, len(frame))):
        with pytest.raises(BadMessage):
            decode(adapter, frame[:end])


def test_the_largest_messages_pass() -> None:
    """A handshake for a million tokens and a status of a crowded worker are within the limits."""
    region = messages.Region(
        offers={"shm": b"h" * 65536}, size=1, slots_at=0, slots=1, pool_at=0, blocks=1
    )
    attach = messages.Attach(
        session="s",
        endpoint="e",
        process=messages.Process(host="h", pid=1, started=1),
        layout=KvLayout(block_size=16, dtype="float32", layers=1, kv_heads=1, head_dim=1),
        region=region,
    )
    assert decode(FROM_DECODE, encode(FROM_DECODE, attach)) == attach
    stats = Stats(peers={f"peer {n}": "alive" for n in range(4096)})
    assert decode(FROM_WORKER, encode(FROM_WORKER, stats)) == stats
    outputs = Outputs(items=tuple(messages.Output(room=n, tokens=(n,)) for n in range(4096)))
    assert decode(FROM_WORKER, encode(FROM_WORKER, outputs)) == outputs


@pytest.mark.parametrize("text", ["x" * 100_000, "half a \ud800 pair", "a\udcffb" * 9000])
def test_an_error_with_any_text_can_be_sent(text: str) -> None:
    """It is cut to size, not refused: else the error of an error is all that is heard."""
    problem = Problem(code="internal", message=text, stage=text)
    failed = Failed(session="s", room=1, attempt=1, rank=Rank(), problem=problem)
    assert decode(FROM_PREFILL, encode(FROM_PREFILL, failed)) == failed
    assert len(problem.message) <= 8192


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=50))
def test_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert unpack_ids(packed) == ids
    assert packed == b"".join(n.to_bytes(4, "little", signed=True) for n in ids)
    assert pack_ids(np.array(ids, dtype=np.int64)) == packed


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4099])
def test_ids_that_are_not_whole_are_a_bad_message(length: int) -> None:
    with pytest.raises(BadMessage):
        unpack_ids(bytes(length))


def test_layouts_say_where_they_differ_with_both_values() -> None:
    """CASES 5."""
    layout = KvLayout(block_size=16, dtype="float32", layers=2, kv_heads=3, head_dim=8)
    assert layout.differences(layout) == []
    other = replace(layout, block_size=32, dtype="bfloat16")
    assert layout.differences(other) == [
        "block_size: 16 here, 32 there",
        "dtype: float32 here, bfloat16 there",
    ]
    assert layout.block_bytes == 16 * 2 * 3 * 8 * 2 * 4


def test_every_field_of_a_layout_is_compared() -> None:
    layout = KvLayout(block_size=16, dtype="float32", layers=2, kv_heads=3, head_dim=8)
    changes: list[dict[str, Any]] = [
        {"block_size": 1},
        {"dtype": "uint8"},
        {"layers": 1},
        {"kv_heads": 1},
        {"head_dim": 1},
        {"kind": "latent"},
        {"total_kv_heads": 6},
        {"quantize": "int8"},
    ]
    assert {name for change in changes for name in change} == set(KvLayout.__dataclass_fields__)
    for change in changes:
        assert len(layout.differences(replace(layout, **change))) == 1


def test_shards_of_one_model_do_not_differ() -> None:
    one = KvLayout(block_size=16, dtype="float32", layers=2, kv_heads=4, head_dim=8)
    half = replace(one, kv_heads=2, total_kv_heads=4)
    assert one.differences(half) == []
    assert half.block_bytes * 2 == one.block_bytes == 4 * one.head_bytes
    latent = replace(one, kv_heads=1, kind="latent")
    assert latent.block_bytes * 8 == one.block_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": 1 << 31},
        {"top_p": 0},
        {"temperature": -1},
        {"min_p": 1.1},
        {"temperature": float("nan")},
        {"seed": -1},
        {"stop_token_ids": (-1,)},
    ],
)
def test_sampling_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**changes)


def test_a_token_alone_is_an_output_as_the_constructor_makes_it() -> None:
    made = messages.token_out(7, 2, 11, -0.5)
    assert made == Output(room=7, attempt=2, tokens=(11,), logprobs=(-0.5,))
    with pytest.raises(ValidationError):
        messages.token_out(-7, 2, 11, -0.5)


def test_messages_cannot_be_changed() -> None:
    ping = Ping(session="s", number=1)
    with pytest.raises(AttributeError):
        ping.number = 2  # type: ignore[misc]
