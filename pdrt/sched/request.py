"""One request as a scheduler keeps it: its tokens, what it holds, and where it stands."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from pdrt.device.batch import Draw, Odds
from pdrt.device.chance import of_sequence
from pdrt.errors import BadMessage, BadRequest
from pdrt.messages import (
    Finish,
    Problem,
    Sampling,
    Source,
    Submit,
    Top,
    pack_ids,
    pack_odds,
    unpack_ids,
)
from pdrt.sched.prefix import Chain
from pdrt.sched.spent import Spent
from pdrt.sched.states import State as State


@dataclass(frozen=True, slots=True)
class First:
    """A sequence's first token; with `finish` it is the last one, too."""

    token: int
    logprob: float
    top: Top = ()
    finish: Finish | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Moved by a table only; `key` names it for good in this worker, a room may come again."""

    key: int
    room: int
    attempt: int
    tokens: list[int]  # prompt and output; the last one's KV may not be computed yet
    prompt_tokens: int
    sampling: Sampling
    stops: frozenset[int]
    deadline: float
    source: Source | None = None
    of_room: int | None = None  # one of several sequences: its client's room
    index: int = 0  # which of them
    state: State = State.QUEUED
    blocks: list[int] = field(default_factory=list)  # replaced, never emptied: a step may read it
    borrows: bool = False  # its last block is another's too: it is copied before it is written
    copy_from: int = -1  # and was that one, until a step has copied it
    slot: int | None = None
    computed: int = 0  # leading tokens whose KV is in `blocks`
    host_blocks: tuple[int, ...] = ()  # a copy of its KV
    copied: int = 0  # leading tokens whose KV is in `host_blocks`
    cached_tokens: int = -1  # those found computed when it was first given memory; -1: never yet
    first_block: int = 0  # the receiver (prefill: the other side) holds the blocks before
    sent: int = 0  # prefill: leading blocks that were handed to the transport
    priority: int = 0  # higher first
    since: float = 0.0  # when it came
    reserved: int = 0  # blocks that the books keep free for it ...
    seats: int = 0  # ... and sequences that they count for it
    overtaken: int = 0  # how often a later request was admitted before this one
    scoring: int = -1  # top of each prompt token's odds, still to be told; -1: none
    odds: list[Odds] = field(default_factory=list)  # of the prompt's tokens, from the second on
    is_trial: bool = False  # it proves that KV arrives: nothing is said before
    is_returning: bool = False  # lost what it held through no fault of its own: first in line
    is_resuming: bool = False  # was retracted: its client has tokens already
    firsts: tuple[First, ...] = ()  # drawn by the other side, whose KV is still on its way
    has_told: bool = False  # the client has the `firsts` already
    is_quiet: bool = False  # nobody can write its blocks any more
    lost_until: float = 0.0  # unbound: how long another prefill is waited for
    problem: Problem | None = None  # unbound: what happened to the last one
    chain: Chain = field(default_factory=Chain)
    spent: Spent = field(default_factory=lambda: Spent(0.0))
    story: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    draw: Draw = field(init=False)  # of its next token, in every step the same
    most: int = field(init=False)  # tokens, when all that it may say is said

    def __post_init__(self) -> None:
        self.most = self.prompt_tokens + self.sampling.max_tokens
        self.draw = Draw(self.sampling, self.tokens, self.prompt_tokens)

    @property
    def said(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def told_as(self) -> int:
        """The room that its client knows."""
        return self.room if self.of_room is None else self.of_room

    @property
    def left(self) -> int:
        """Output tokens it may still say."""
        return self.most - len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def due(self) -> float:
        """When it ends if nothing happens before."""
        if self.state is State.UNBOUND:
            return min(self.deadline, self.lost_until)
        return self.deadline

    def pop_odds(self) -> bytes:
        """The prompt's odds, to be told once."""
        odds, self.odds, self.scoring = self.odds, [], -1
        return pack_odds([one.logprob for one in odds], [one.top for one in odds])

    def packed(self) -> bytes:
        return pack_ids(self.tokens)

    @property
    def needs_firsts(self) -> bool:
        """Whether a slot, which holds one token and no more, is not enough to go on from."""
        return self.sampling.n > 1 or self.sampling.top_logprobs > 0

    @property
    def finished(self) -> Finish | None:
        """How it ended already, when a resumed answer turns out to be whole."""
        if self.said and self.tokens[-1] in self.stops:
            return "stop"
        return "length" if self.left <= 0 else None

    def finish_with(self, token: int) -> Finish | None:
        """How the answer ends if `token` is its next one; None when it goes on."""
        if token in self.stops:
            return "stop"
        return "length" if self.left <= 1 else None

    def become(self, index: int) -> None:
        """From here on one of the sequences of its group."""
        self.index, self.sampling = index, of_sequence(self.sampling, index)
        self.draw = Draw(self.sampling, self.tokens, self.prompt_tokens)


def prompt_hash(packed: bytes) -> bytes:
    """What both sides must agree on before KV is moved."""
    return hashlib.sha256(packed).digest()


def from_submit(submit: Submit, key: int, eos: Collection[int], now: float) -> Request:
    """Raises BadRequest for tokens that make no prompt."""
    try:
        tokens = unpack_ids(submit.tokens)
    except BadMessage as error:
        raise BadRequest(f"tokens: {error}") from error
    if not 0 < submit.prompt_tokens <= len(tokens):
        raise BadRequest(f"prompt: {submit.prompt_tokens} of {len(tokens)} tokens")
    sampling = submit.sampling
    if sampling.n > 1 and len(tokens) > submit.prompt_tokens:
        raise BadRequest("n: an answer that is resumed is one sequence")
    ends = () if sampling.ignore_eos else eos
    return Request(
        key=key,
        room=submit.room,
        attempt=submit.attempt,
        tokens=tokens,
        prompt_tokens=submit.prompt_tokens,
        sampling=sampling,
        stops=frozenset(sampling.stop_token_ids).union(ends),
        deadline=now + submit.time_left,
        source=submit.source,
        of_room=submit.room if sampling.n > 1 else None,
        priority=submit.priority,
        since=now,
        scoring=submit.scoring,
        is_trial=submit.is_trial,
        chain=Chain(submit.salt),
        spent=Spent(now),
    )
