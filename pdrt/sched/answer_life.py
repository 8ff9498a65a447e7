"""The life of a request that is answered here: hybrid and decode.

A hybrid request starts QUEUED, a decode request BOOTSTRAPPING; both end in RUNNING, and a
retracted one goes back. The promise: blocks that a peer may still write are held, never freed,
and a request that was accepted is told its end exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from pdrt.data import events as transfer
from pdrt.data.commands import AbortReceiver, AdmitReceiver, OpenReceiver
from pdrt.device.moves import Move
from pdrt.machine import Edge, Table
from pdrt.messages import AskPrefill, Finish, Output, pack_tops, token_out
from pdrt.sched.effects import Booking, Effect, Free, FreeHost, Hold, Load, Save, Say
from pdrt.sched.events import (
    Arrived,
    AttemptLost,
    AttemptRefused,
    Cancelled,
    Computed,
    Dropped,
    EndedEarly,
    Failed,
    FellBack,
    FirstsKept,
    FirstsTold,
    FirstStopped,
    Granted,
    Grown,
    LastToken,
    Rebound,
    ResumeLocally,
    Retracted,
    Returned,
    Stopped,
    Swapped,
    TokenOut,
)
from pdrt.sched.request import First, Request, State, prompt_hash
from pdrt.sched.sequences import living, stopped

Effects: TypeAlias = Sequence[Effect | Booking]
Ending: TypeAlias = Cancelled | Failed | AttemptRefused

# Memory.


def _run(r: Request, e: Granted) -> Effects:
    r.blocks, r.overtaken, r.first_block = list(e.blocks), 0, 0
    r.computed = e.cached_tokens
    if r.cached_tokens < 0:  # later it may find its own work
        r.cached_tokens = e.cached_tokens
    return ()


def _admit(r: Request, e: Granted) -> Effects:
    assert e.slot is not None
    r.blocks, r.slot, r.overtaken, r.is_quiet = list(e.blocks), e.slot, 0, False
    r.firsts, r.has_told = (), False
    r.computed, r.first_block = e.cached_tokens, e.hit
    wanted, digest = e.blocks[e.hit :], prompt_hash(r.packed())
    return [
        AdmitReceiver(
            r.room,
            r.attempt,
            wanted,
            e.hit,
            e.slot,
            len(r.tokens),
            digest,
            r.deadline,
            sequences=r.sampling.n,
            top_logprobs=r.sampling.top_logprobs,
        )
    ]


def _grow(r: Request, e: Grown) -> Effects:
    if r.borrows:
        r.borrows, r.copy_from = False, r.blocks[-1]
        r.blocks = [*r.blocks[:-1], *e.blocks]
    else:
        r.blocks.extend(e.blocks)
    return ()


def _swap(r: Request, e: Swapped) -> Effects:
    """What is computed is copied first, in the device's order: freed blocks are written later."""
    saved = tuple(r.blocks[: len(e.host_blocks)])
    computed, freed = r.computed, _part(r)
    r.host_blocks, r.copied, r.is_returning = e.host_blocks, computed, True
    return [Save(Move(r.key, saved, e.host_blocks)), *freed]


def _restore(r: Request, e: Granted) -> Effects:
    """It goes on where it was. What the prefix cache has is not copied."""
    copies, computed, freed = r.host_blocks, r.copied, _drop_copy(r)
    r.blocks, r.overtaken, r.first_block = list(e.blocks), 0, 0
    r.computed = max(computed, e.cached_tokens)
    lacking = copies[e.hit :]
    if not lacking:
        return freed
    return [Load(Move(r.key, lacking, e.blocks[e.hit : len(copies)])), *freed]


def _drop_copy(r: Request) -> Effects:
    copies, r.host_blocks, r.copied = r.host_blocks, (), 0
    return [FreeHost(copies)] if copies else ()


def _drop_source(r: Request) -> tuple[int, ...]:
    """What its last block was copied from: a step has done so, or none will."""
    source, r.copy_from = r.copy_from, -1
    return () if source < 0 else (source,)


def _part(r: Request, _event: object = None) -> Effects:
    """Let go of all it holds: freed when nobody else can write it, else held for its attempt.

    What it shares is never written, whatever becomes of the attempt.
    """
    blocks, slot = (*r.blocks, *_drop_source(r)), r.slot
    r.blocks, r.slot, r.computed, r.borrows = [], None, 0, False
    if not blocks:
        return _drop_copy(r)  # nobody has both
    if slot is None or r.is_quiet:
        return [Free(blocks, slot)]
    first = r.first_block
    return [Free(blocks[:first]), Hold(r.room, r.attempt, blocks[first:], slot)]


def _give_slot(r: Request) -> Effects:
    slot, r.slot = r.slot, None
    return [Free((), slot)] if slot is not None else ()


# Tokens.


def _note(r: Request, e: Computed) -> Effects:
    r.computed = e.tokens
    return ()


def _one(
    r: Request,
    e: TokenOut | LastToken | First,
    cached_tokens: int,
    finish: Finish | None = None,
    index: int | None = None,
) -> Say:
    """What a request gains by one token."""
    is_plain = finish is None and r.of_room is None and r.scoring < 0
    if is_plain and not cached_tokens and not r.sampling.top_logprobs:  # most are
        return Say(token_out(r.room, r.attempt, e.token, e.logprob))
    return Say(
        Output(
            room=r.told_as,
            index=r.index if index is None else index,
            attempt=r.attempt,
            tokens=(e.token,),
            logprobs=(e.logprob,),
            finish=finish,
            cached_tokens=cached_tokens,
            tops=pack_tops([e.top]) if r.sampling.top_logprobs else b"",
            scored=r.pop_odds() if r.scoring >= 0 else b"",
        )
    )


def _say(r: Request, e: TokenOut) -> Effects:
    r.computed = len(r.tokens)
    r.tokens.append(e.token)
    said = _one(r, e, e.cached_tokens)
    return (said,) if r.copy_from < 0 else (Free(_drop_source(r)), said)


def _say_first(r: Request, e: TokenOut) -> Effects:
    return [*_give_slot(r), *_say(r, e)]


def _say_last(r: Request, e: LastToken) -> Effects:
    r.tokens.append(e.token)
    r.is_quiet = True  # a slot still held here was just received
    return [*_part(r), _one(r, e, e.cached_tokens, e.finish)]


# First tokens ahead of their KV.


def _keep_firsts(r: Request, e: FirstsKept) -> Effects:
    r.firsts = e.firsts
    return ()


def _tell_firsts(r: Request, e: FirstsTold) -> Effects:
    r.firsts, r.has_told = e.firsts, True
    indices = range(len(e.firsts)) if r.sampling.n > 1 else (r.index,)
    return [
        _one(r, first, e.cached_tokens, first.finish, index)
        for index, first in zip(indices, e.firsts, strict=True)
    ]


def _stop_first(r: Request, e: FirstStopped) -> Effects:
    r.firsts = stopped(r.firsts, e.index)
    return [Say(Output(room=r.told_as, index=e.index, attempt=r.attempt, finish="stop"))]


def _end_early(r: Request, _e: EndedEarly) -> Effects:
    """What is still being written is not wanted; its memory is held until nobody writes it."""
    if r.slot is None or r.is_quiet:
        return _part(r)
    why = "its answer ended with the first token"
    return [AbortReceiver(r.room, r.attempt, why, is_served=True), *_part(r)]


def _arrive(r: Request, _e: Arrived) -> Effects:
    r.computed = len(r.tokens)
    _settle(r)
    return _give_slot(r)


def _settle(r: Request) -> None:
    """What the client has been told is part of the answer, whatever becomes of the attempt.

    Of several sequences it goes on as the first that has not ended; the others have branched off.
    """
    if r.has_told:
        index = living(r.firsts)[0]
        r.tokens.append(r.firsts[index].token)
        if r.sampling.n > 1:
            r.become(index)
    r.firsts, r.has_told = (), False


# Attempts.


def _open(r: Request, e: Rebound) -> Effects:
    r.attempt, r.source, r.is_returning, r.problem = e.attempt, e.source, True, None
    return [OpenReceiver(r.room, r.attempt, e.source, r.deadline)]


def _reopen(r: Request, e: Rebound) -> Effects:
    _settle(r)
    return [AbortReceiver(r.room, r.attempt, "rebound"), *_part(r), *_open(r, e)]


def _lose(r: Request, e: AttemptLost) -> Effects:
    _settle(r)
    r.problem, r.lost_until = e.problem, e.until
    return _part(r)


def _come_back(r: Request, _e: Retracted | FellBack) -> Effects:
    _settle(r)
    r.is_returning = True
    return _part(r)


def _fall_back(r: Request, e: ResumeLocally) -> Effects:
    _settle(r)
    return [AbortReceiver(r.room, r.attempt, "resumed locally"), *_part(r)]


def _ask_again(r: Request, _e: Returned) -> Effects:
    assert r.source is not None
    _settle(r)
    freed = _part(r)
    r.is_returning = r.is_resuming = True
    r.attempt += 1
    return [
        *freed,
        AskPrefill(
            room=r.room,
            attempt=r.attempt,
            tokens=r.packed(),
            of_room=-1 if r.of_room is None else r.of_room,
            index=r.index,
        ),
        OpenReceiver(r.room, r.attempt, r.source, r.deadline),
    ]


# Ends.


def _close(r: Request, e: Ending) -> Effects:
    said = Output(room=r.told_as, index=r.index, attempt=r.attempt, problem=e.problem)
    return [*_part(r), Say(said)]


def _stop(r: Request, _e: Stopped) -> Effects:
    said = Output(room=r.told_as, index=r.index, attempt=r.attempt, finish="stop")
    return [*_part(r), Say(said)]


def _stop_receiving(r: Request, e: Stopped) -> Effects:
    return [AbortReceiver(r.room, r.attempt, "stop", is_served=True), *_stop(r, e)]


def _drop_receiving(r: Request, _e: Dropped) -> Effects:
    why = "another sequence of its room has failed"
    return [AbortReceiver(r.room, r.attempt, why), *_part(r)]


def _abort(r: Request, e: Ending) -> Effects:
    reason = f"{e.problem.code}: {e.problem.message}"
    is_served = isinstance(e, Cancelled) and e.is_served
    return [AbortReceiver(r.room, r.attempt, reason, is_served), *_close(r, e)]


_PREALLOC: Final = (State.BOOTSTRAPPING, State.WAITING)
_RECEIVING: Final = (*_PREALLOC, State.TRANSFERRING)
_HERE: Final = (State.QUEUED, State.UNBOUND, State.RUNNING, State.SWAPPED)
_COMPUTED: Final = (State.RUNNING, State.SWAPPED)
_EXTERNAL: Final = (
    transfer.ReceiverReady,
    transfer.PromptStarted,
    Cancelled,
    Stopped,
    Rebound,
    ResumeLocally,
    Failed,
    AttemptLost,
    AttemptRefused,
    FellBack,
)

EDGES: Final[Mapping[tuple[State, type], Edge[State, Request, Effect | Booking]]] = {
    (State.QUEUED, Granted): Edge(State.RUNNING, _run),
    (State.BOOTSTRAPPING, transfer.ReceiverReady): Edge(State.WAITING),
    (State.WAITING, Granted): Edge(State.TRANSFERRING, _admit),
    (State.TRANSFERRING, transfer.PromptStarted): Edge(State.TRANSFERRING),
    (State.TRANSFERRING, FirstsKept): Edge(State.TRANSFERRING, _keep_firsts),
    (State.TRANSFERRING, FirstsTold): Edge(State.TRANSFERRING, _tell_firsts),
    (State.TRANSFERRING, FirstStopped): Edge(State.TRANSFERRING, _stop_first),
    (State.TRANSFERRING, EndedEarly): Edge(State.DONE, _end_early),
    (State.TRANSFERRING, Arrived): Edge(State.RUNNING, _arrive),
    (State.TRANSFERRING, Returned): Edge(State.BOOTSTRAPPING, _ask_again),
    (State.TRANSFERRING, TokenOut): Edge(State.RUNNING, _say_first),
    (State.TRANSFERRING, LastToken): Edge(State.DONE, _say_last),
    (State.RUNNING, FirstsTold): Edge(State.RUNNING, _tell_firsts),
    (State.RUNNING, EndedEarly): Edge(State.DONE, _end_early),
    (State.RUNNING, Arrived): Edge(State.RUNNING, _arrive),
    (State.RUNNING, Grown): Edge(State.RUNNING, _grow),
    (State.RUNNING, Computed): Edge(State.RUNNING, _note),
    (State.RUNNING, TokenOut): Edge(State.RUNNING, _say),
    (State.RUNNING, LastToken): Edge(State.DONE, _say_last),
    (State.RUNNING, Swapped): Edge(State.SWAPPED, _swap),
    (State.SWAPPED, Granted): Edge(State.RUNNING, _restore),
    **{(s, Retracted): Edge(State.QUEUED, _come_back) for s in _COMPUTED},
    **{(s, Returned): Edge(State.BOOTSTRAPPING, _ask_again) for s in _COMPUTED},
    **{(s, AttemptLost): Edge(State.UNBOUND, _lose) for s in _RECEIVING},
    **{(s, AttemptRefused): Edge(State.DONE, _close) for s in _RECEIVING},
    **{(s, FellBack): Edge(State.QUEUED, _come_back) for s in _RECEIVING},
    **{(s, ResumeLocally): Edge(State.QUEUED, _fall_back) for s in _RECEIVING},
    **{(s, Rebound): Edge(State.BOOTSTRAPPING, _reopen) for s in _RECEIVING},
    (State.UNBOUND, Rebound): Edge(State.BOOTSTRAPPING, _open),
    **{(s, e): Edge(State.DONE, _abort) for s in _RECEIVING for e in (Cancelled, Failed)},
    **{(s, e): Edge(State.DONE, _close) for s in _HERE for e in (Cancelled, Failed)},
    **{(s, Stopped): Edge(State.DONE, _stop_receiving) for s in _RECEIVING},
    **{(s, Stopped): Edge(State.DONE, _stop) for s in _HERE},
    **{(s, Dropped): Edge(State.DONE, _drop_receiving) for s in _RECEIVING},
    **{(s, Dropped): Edge(State.DONE, _part) for s in _HERE},
}

_ENDS: Final = (Cancelled, Stopped, Failed)
_LOCAL: Final = "its tokens are computed here, no transfer belongs to it"
_ARRIVED: Final = "its KV has arrived"
_OVER: Final = "a terminal state absorbs everything"

IGNORED: Final[Mapping[tuple[State, type], str]] = {
    **{(s, transfer.ReceiverReady): "told twice" for s in (State.WAITING, State.TRANSFERRING)},
    **{(s, transfer.PromptStarted): "it says nothing to wait for" for s in _PREALLOC},
    **{(State.QUEUED, e): _LOCAL for e in _EXTERNAL if e not in _ENDS},
    **{(s, e): _ARRIVED for s in _COMPUTED for e in _EXTERNAL if e not in _ENDS},
    **{
        (State.UNBOUND, e): "its attempt is over"
        for e in (
            transfer.ReceiverReady,
            transfer.PromptStarted,
            AttemptLost,
            AttemptRefused,
            FellBack,
        )
    },
    (State.UNBOUND, ResumeLocally): "it was never retracted",
    **{(State.DONE, e): _OVER for e in (*_EXTERNAL, Computed, TokenOut, LastToken)},
}

ANSWER: Final[Table[State, Request, Effect | Booking]] = Table("answer", EDGES, IGNORED)
