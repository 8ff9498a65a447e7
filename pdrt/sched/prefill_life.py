"""The life of a request whose prompt is computed here for another instance to answer.

The promise: nothing is computed before its receiver shook hands, nor after nobody wants it, and
source blocks are held until the transport let go of them (SendEnded), whatever became of the
request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from pdrt.data.commands import AbortSend, SendBlocks, TellFirsts, TellStarted
from pdrt.data.events import SLOT_COMPLETE, SenderReady, SendFailed, SlotRecord
from pdrt.machine import Edge, Table
from pdrt.messages import Output, pack_tops
from pdrt.sched.effects import Booking, Effect, Free, Hold, Say
from pdrt.sched.events import (
    Cancelled,
    Computed,
    Delivered,
    Failed,
    Granted,
    Prefilled,
    SendBroken,
)
from pdrt.sched.request import Request, State

Effects: TypeAlias = Sequence[Effect | Booking]


def _meet(r: Request, e: SenderReady) -> Effects:
    r.first_block = e.first_block
    return ()


def _send(r: Request, upto: int, last: SlotRecord | None) -> Effects:
    first = max(r.sent, r.first_block)
    blocks = tuple(r.blocks[first:upto])
    r.sent = max(first, upto)
    if not blocks and last is None:
        return ()
    return [SendBlocks(r.room, r.attempt, blocks, first, last)]


def _start(r: Request, e: Granted) -> Effects:
    r.blocks, r.overtaken = list(e.blocks), 0
    r.computed = r.cached_tokens = e.cached_tokens
    return [TellStarted(r.room, r.attempt), *_send(r, e.sendable, None)]


def _send_chunk(r: Request, e: Computed) -> Effects:
    r.computed = e.tokens
    return _send(r, e.sendable, None)


def _send_last(r: Request, e: Prefilled) -> Effects:
    r.computed = len(r.tokens)
    record = SlotRecord(
        room=r.room,
        attempt=r.attempt,
        status=SLOT_COMPLETE,
        kv_len=r.computed,
        cached_tokens=min(r.cached_tokens, r.prompt_tokens),
        token=e.firsts[0].token,
        logprob=e.firsts[0].logprob,
    )
    return [_tell_firsts(r, e), *_send(r, len(r.blocks), record)]


def _tell_firsts(r: Request, e: Prefilled) -> TellFirsts:
    """Ahead of the last blocks: decode's client need not wait for the transfer."""
    return TellFirsts(
        room=r.room,
        attempt=r.attempt,
        tokens=tuple(first.token for first in e.firsts),
        logprobs=tuple(first.logprob for first in e.firsts),
        tops=pack_tops([first.top for first in e.firsts]) if r.sampling.top_logprobs else b"",
        cached_tokens=min(r.cached_tokens, r.prompt_tokens),
    )


def _let_go(r: Request) -> tuple[int, ...]:
    blocks, r.blocks = tuple(r.blocks), []
    return blocks


def _delivered(r: Request, _e: Delivered) -> Effects:
    said = Output(room=r.room, attempt=r.attempt, finish="prefilled", scored=r.pop_odds())
    return [Free(_let_go(r)), Say(said)]


def _broken(r: Request, e: SendBroken) -> Effects:
    return [Free(_let_go(r)), Say(Output(room=r.room, attempt=r.attempt, problem=e.problem))]


def _unwanted(r: Request, e: SendFailed | Cancelled | Failed) -> Effects:
    return [
        Hold(r.room, r.attempt, _let_go(r)),
        Say(Output(room=r.room, attempt=r.attempt, problem=e.problem)),
    ]


def _stop(r: Request, e: Cancelled | Failed) -> Effects:
    return [AbortSend(r.room, r.attempt, e.problem), *_unwanted(r, e)]


_LIVE: Final = (State.BOOTSTRAPPING, State.QUEUED, State.RUNNING, State.INFLIGHT)

EDGES: Final[Mapping[tuple[State, type], Edge[State, Request, Effect | Booking]]] = {
    (State.BOOTSTRAPPING, SenderReady): Edge(State.QUEUED, _meet),
    (State.QUEUED, Granted): Edge(State.RUNNING, _start),
    (State.RUNNING, Computed): Edge(State.RUNNING, _send_chunk),
    (State.RUNNING, Prefilled): Edge(State.INFLIGHT, _send_last),
    (State.INFLIGHT, Delivered): Edge(State.DONE, _delivered),
    **{(s, SendBroken): Edge(State.DONE, _broken) for s in _LIVE},
    **{(s, SendFailed): Edge(State.DONE, _unwanted) for s in _LIVE},
    **{(s, e): Edge(State.DONE, _stop) for s in _LIVE for e in (Cancelled, Failed)},
}

IGNORED: Final[Mapping[tuple[State, type], str]] = {
    **{
        (s, SenderReady): "its receivers shook hands already"
        for s in (State.QUEUED, State.RUNNING, State.INFLIGHT)
    },
    **{
        (State.DONE, e): "a terminal state absorbs everything"
        for e in (SenderReady, SendFailed, SendBroken, Delivered, Cancelled, Failed)
    },
    **{(State.DONE, e): "it ended while on the device" for e in (Computed, Prefilled)},
}

PREFILL: Final[Table[State, Request, Effect | Booking]] = Table("prefill", EDGES, IGNORED)
