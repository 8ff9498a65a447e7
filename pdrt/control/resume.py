"""An answer that another instance began: what its client has is said again, to nobody.

Text that is held back, stop strings half said and all that a voice remembers are then as they
were, because none of them depends on how tokens were grouped.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from pdrt.control.answer import Answer, Choice
from pdrt.control.order import Order
from pdrt.control.reply import Voice
from pdrt.control.schema import Resumed, Told
from pdrt.errors import BadRequest
from pdrt.messages import Output, Said, pack_ids, pack_tops

_FEW: Final = 256  # tokens that take less time than a thread's start


def said_of(resumed: Resumed, order: Order, sequences: int) -> tuple[Said, ...]:
    """What a worker is told of the sequences that go on. Raises BadRequest."""
    if not order.stream:
        raise BadRequest("resumed: it is only for stream = true")
    if len(resumed.choices) != sequences:
        raise BadRequest(f"resumed: {len(resumed.choices)} sequences of {sequences}")
    going = [(i, told) for i, told in enumerate(resumed.choices) if told.finish is None]
    if not going:
        raise BadRequest("resumed: no sequence is left to go on with")
    return tuple(Said(index=index, tokens=pack_ids(told.ids)) for index, told in going)


async def take_up(answer: Answer, resumed: Resumed, voice: Voice) -> None:
    """Bring a fresh answer, and who words it, to where the client is."""
    answer.is_resumed, answer.cached_tokens = True, resumed.cached_tokens
    times = answer.times
    times.arrived -= resumed.elapsed_s
    times.first, times.tokenised = times.arrived + resumed.first_s, 0.0
    if sum(len(told.ids) for told in resumed.choices) > _FEW:
        await asyncio.to_thread(_replay, answer, resumed, voice)
    else:
        _replay(answer, resumed, voice)


def _replay(answer: Answer, resumed: Resumed, voice: Voice) -> None:
    for index, (choice, told) in enumerate(zip(answer.choices, resumed.choices, strict=True)):
        if told.finish is not None:
            choice.ids, choice.finish = list(told.ids), told.finish
        elif told.ids:
            _say_again(answer, index, choice, told, voice)


def _say_again(answer: Answer, index: int, choice: Choice, told: Told, voice: Voice) -> None:
    """How likely the tokens were is with the client, and nobody needs it here."""
    count = len(told.ids)
    output = Output(
        room=0,
        index=index,
        tokens=tuple(told.ids),
        logprobs=(0.0,) * count,
        tops=pack_tops([()] * count),
    )
    delta = choice.take(output)
    choice.odds.clear()
    if delta.finish is not None:
        raise BadRequest("resumed: a stop string is complete, so nothing can follow")
    voice.chunks(replace(delta, odds=()), answer)
