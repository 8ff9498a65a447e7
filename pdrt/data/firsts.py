"""First tokens go ahead of their KV: how they are told, told again when lost, and checked.

The promise: a decode rank takes them once for an attempt, from the prefill rank that drew them
(tp 0), and only when they are as many and as detailed as was asked for. All else is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from pdrt.data.commands import AdmitReceiver, TellFirsts
from pdrt.data.events import FirstTokens
from pdrt.data.past import Past
from pdrt.data.sessions import Session
from pdrt.data.transfer import Key, Leg, Receiver, Sender, State
from pdrt.data.voice import Voice
from pdrt.errors import BadMessage
from pdrt.messages import Firsts, Rank, Top, unpack_ids, unpack_logprobs, unpack_tops

_KEPT: Final = 1024  # attempts that are over, whose first tokens can be told once more


class FirstsTeller:
    """The prefill side: what is told once can be told again to who asks by a handshake."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._kept: Past[TellFirsts] = Past(_KEPT)

    def tell(self, sender: Sender, firsts: TellFirsts, sessions: Iterable[Session]) -> None:
        sender.firsts = firsts
        for session in sessions:
            self._voice.firsts(session, firsts)

    def repeat(self, session: Session, sender: Sender) -> None:
        if sender.firsts is not None:
            self._voice.firsts(session, sender.firsts)

    def repeat_old(self, session: Session, key: Key) -> None:
        if firsts := self._kept.get(key):
            self._voice.firsts(session, firsts)

    def forget(self, sender: Sender) -> None:
        """It is over: only what decode may still wait for is kept."""
        if sender.firsts is not None and sender.state is State.DONE:
            self._kept.remember(sender.key, sender.firsts)


def expect(receiver: Receiver, admitted: AdmitReceiver, rank: Rank) -> None:
    """What its first tokens must be. Only the rank of the scheduler (tp 0) needs them."""
    receiver.sequences = admitted.sequences
    receiver.top_logprobs = admitted.top_logprobs
    receiver.needs_firsts = admitted.needs_firsts and rank.tp == 0


def heard(receiver: Receiver, leg: Leg, message: Firsts) -> FirstTokens | None:
    """What the scheduler is told of it: nothing when it is told twice, too late or wrong."""
    if receiver.has_firsts or receiver.state is not State.TRANSFERRING or not is_head(leg):
        return None
    try:
        firsts = _checked(receiver, message)
    except BadMessage:
        return None
    receiver.has_firsts = True
    return firsts


def is_head(leg: Leg) -> bool:
    """Whether this prefill rank draws: tp 0, and cp 0 of those."""
    return leg.rank.endswith(",0,0")


def _checked(receiver: Receiver, message: Firsts) -> FirstTokens:
    """Raises BadMessage."""
    tokens, logprobs = unpack_ids(message.tokens), unpack_logprobs(message.logprobs)
    if not len(tokens) == len(logprobs) == receiver.sequences or min(tokens) < 0:
        raise BadMessage(f"{len(tokens)} first tokens of {receiver.sequences} sequences")
    if any(math.isnan(logprob) for logprob in logprobs):
        raise BadMessage("a log-probability is no number")
    tops = message.tops if receiver.top_logprobs else b""
    if receiver.top_logprobs:
        _check_tops(unpack_tops(tops, len(tokens)), receiver.top_logprobs)
    return FirstTokens(
        receiver.room,
        receiver.attempt,
        tuple(tokens),
        tuple(logprobs),
        tops,
        message.cached_tokens,
    )


def _check_tops(tops: Sequence[Top], most: int) -> None:
    """Raises BadMessage."""
    width = len(tops[0])
    if not 0 < width <= most:
        raise BadMessage(f"{width} likeliest tokens, not {most}")
    if any(token < 0 or math.isnan(logprob) for top in tops for token, logprob in top):
        raise BadMessage("a likeliest token, or its log-probability, is none")
