"""Commands and events between the ranks of a group: the same on the other side, or refused."""

from __future__ import annotations

from typing import get_args

import msgpack
import pytest

from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellFirsts,
    TellStarted,
    TransferCommand,
)
from pdrt.data.events import (
    FirstTokens,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
    SlotRecord,
    TransferEvent,
)
from pdrt.data.relay import pack_command, pack_event, unpack_command, unpack_event
from pdrt.errors import BadMessage
from pdrt.messages import Problem, Source

LONG = (1 << 63) - 1
MANY = tuple(range(40_000))  # blocks of a long prompt
PROBLEM = Problem(code="peer_lost", message="it died", stage="transfer")
RECORD = SlotRecord(LONG, 2, 1, 5, 3, 42, -0.25, (1, 2, 3))
COMMANDS: list[TransferCommand] = [
    ExpectHandshakes(LONG, 2, 5, b"\x00\xff", 1e9),
    TellStarted(LONG, 2),
    TellFirsts(LONG, 2, (7, 8), (-0.5, -1.5), b"tops", 3),
    SendBlocks(LONG, 2, MANY, 1, RECORD),
    SendBlocks(LONG, 2, (), 1),
    AbortSend(LONG, 2, PROBLEM),
    OpenReceiver(LONG, 2, Source(host="fe80::1", port=1, dp_rank=-1), 1e9),
    AdmitReceiver(LONG, 2, MANY, 0, 3, 5, b"hash", 1e9),
    AdmitReceiver(LONG, 2, MANY, 0, 3, 5, b"hash", 1e9, sequences=4, top_logprobs=2),
    AbortReceiver(LONG, 2, "served", is_served=True),
    AbortReceiver(LONG, 2, "client_gone"),
]
EVENTS: list[TransferEvent] = [
    ReceiverReady(LONG, 2),
    PromptStarted(LONG, 2),
    FirstTokens(LONG, 2, (7, 8), (-0.5, -1.5), b"tops", 3),
    Received(LONG, 2, RECORD),
    ReceiveFailed(LONG, 2, PROBLEM),
    Quiet(LONG, 2),
    SenderReady(LONG, 2, 3),
    SendFailed(LONG, 2, PROBLEM),
    SendEnded(LONG, 2, None),
    SendEnded(LONG, 2, PROBLEM),
]


def test_every_command_arrives_as_it_was() -> None:
    assert {type(command) for command in COMMANDS} == set(get_args(TransferCommand))
    assert [unpack_command(pack_command(command)) for command in COMMANDS] == COMMANDS


def test_every_event_arrives_as_it_was() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(TransferEvent))
    assert [unpack_event(pack_event(event)) for event in EVENTS] == EVENTS


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb(["Quiet"]),
        msgpack.packb(["Quiet", 7]),
        msgpack.packb(["Quiet", {"room": 1}]),
        msgpack.packb(["Quiet", {"room": "x", "attempt": 1}]),
        msgpack.packb([["Quiet"], {"room": 1, "attempt": 1}]),
        msgpack.packb(["PdrtError", {"room": 1, "attempt": 1}]),
        msgpack.packb(["SendBlocks", {"room": 1, "attempt": 1, "blocks": b"abc"}]),
        msgpack.packb(["SendBlocks", {"room": 1, "attempt": 1, "blocks": [1, 2]}]),
        pack_event(Quiet(1, 1))[:-1],
    ],
)
def test_anything_else_is_a_bad_message(frame: bytes) -> None:
    with pytest.raises(BadMessage):
        unpack_command(frame)
    with pytest.raises(BadMessage):
        unpack_event(frame)
