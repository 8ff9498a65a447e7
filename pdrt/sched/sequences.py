"""The sequences of a sampling group (n > 1): one request for the prompt, then one for each.

The promises: until the first tokens are drawn there is one request, with n draws from one row; from
then on each sequence is a request of its own, with its own tokens, ends and seed, and shares the
full blocks of the prompt. Whatever becomes of the others, it says what it would say alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace

from pdrt.device.batch import Draw, Drawn
from pdrt.device.chance import of_sequence
from pdrt.errors import BadMessage, BadRequest
from pdrt.messages import Said, Top, unpack_ids
from pdrt.sched.request import First, Request, State


def sub_room(room: int, index: int) -> int:
    """The room in which one sequence's KV travels, when it is computed again on its own.

    Transfers, slots and quarantine are keyed by room and attempt: no two sequences may share one.
    """
    packed = struct.pack("<QQ", room, index)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"sub room").digest()
    return int.from_bytes(digest, "little") >> 1


def draws(request: Request) -> tuple[Draw, tuple[Draw, ...]]:
    """The draw of its next token, and those of the other sequences from the same row."""
    sampling, tokens, prompt = request.sampling, request.tokens, request.prompt_tokens
    others = (of_sequence(sampling, index) for index in range(1, sampling.n))
    return request.draw, tuple(Draw(one, tokens, prompt) for one in others)


def drawn_firsts(request: Request, drawn: Drawn) -> tuple[First, ...]:
    """What the device drew for all sequences."""
    every = (drawn, *drawn.further)
    assert len(every) == request.sampling.n, "each sequence has a draw"
    return tuple(first(request, one.token, one.logprob, one.top) for one in every)


def first(request: Request, token: int, logprob: float, top: Top = ()) -> First:
    return First(token, logprob, top, request.finish_with(token))


def living(firsts: Sequence[First]) -> list[int]:
    """The sequences that go on after their first token."""
    return [index for index, one in enumerate(firsts) if one.finish is None]


def branch(
    request: Request, index: int, key: int, blocks: Sequence[int] = (), *, borrows: bool = False
) -> Request:
    """A sequence that goes on from the prompt of `request` and its own first token.

    It runs on the prompt's `blocks`, or is still to be given any. With `borrows` the last one is
    not full and belongs to `request`: it is copied before it is written.
    """
    tokens = [*request.tokens, request.firsts[index].token]
    other = _sequence(request, index, key, tokens)
    other.blocks, other.borrows = list(blocks), borrows
    other.computed = len(request.tokens) if blocks else 0
    return other


def resumed(request: Request, said: Said, key: int) -> Request:
    """A sequence that another instance began to answer; it has no memory yet. Raises BadRequest."""
    try:
        tokens = unpack_ids(said.tokens)
    except BadMessage as error:
        raise BadRequest(f"said: {error}") from error
    other = _sequence(request, said.index, key, [*request.tokens, *tokens])
    other.is_trial = request.is_trial
    return other


def _sequence(request: Request, index: int, key: int, tokens: list[int]) -> Request:
    """One of those that go on from the prompt of `request`; of a group, in a room of its own."""
    group = request.of_room
    return Request(
        key=key,
        room=request.room if group is None else sub_room(group, index),
        of_room=group,
        index=index,
        attempt=request.attempt,
        tokens=tokens,
        prompt_tokens=request.prompt_tokens,
        sampling=of_sequence(request.sampling, index),
        stops=request.stops,
        deadline=request.deadline,
        source=request.source,
        priority=request.priority,
        since=request.since,
        state=State.RUNNING,
        chain=request.chain.fork(),
        spent=request.spent.fork(),
    )


def stopped(firsts: tuple[First, ...], index: int) -> tuple[First, ...]:
    """The same, one of them at its end."""
    ended = replace(firsts[index], finish="stop")
    return (*firsts[:index], ended, *firsts[index + 1 :])
