"""The three exchanges with leaders: each ends in one event and raises nothing of the wire's."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pdrt.control.instances import Instance
from pdrt.control.legs import (
    ClientLeft,
    DecodeEnded,
    DecodeFailed,
    Event,
    Failure,
    Joined,
    JoinedLate,
    PrefillDone,
    PrefillFailed,
)
from pdrt.control.upstream import Answer, Upstream
from pdrt.errors import PdrtError, Unavailable

SHORT_ANSWER: Final = 1 << 20  # an answer that is not streamed is checked whole up to this size


class ClientGone(Exception):
    """The client's connection is closed."""


@dataclass(frozen=True, slots=True)
class Call:
    """One POST to a leader."""

    instance: Instance
    path: str
    body: bytes
    headers: Mapping[str, str]


async def prefill(leg: int, upstream: Upstream, call: Call, *, is_plain: bool) -> Event:
    try:
        async with upstream.post(call.instance, call.path, call.body, call.headers) as answer:
            failure = await _prefill_failure(answer, is_plain=is_plain)
    except PdrtError as error:
        failure = Failure.of(error, elsewhere=True)
    return PrefillFailed(leg, failure) if failure else PrefillDone(leg)


async def _prefill_failure(answer: Answer, *, is_plain: bool) -> Failure | None:
    """None when the prompt is where it belongs."""
    if not answer.is_good:
        return await answer.failure()
    body = await answer.whole(SHORT_ANSWER)
    if is_plain or _says_prefilled(body):
        return None
    return Failure.of(PdrtError(f"prefill answered {body[:200]!r}"))


def _says_prefilled(body: bytes) -> bool:
    try:
        said = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("status") == "prefilled"


async def decode(
    leg: int, upstream: Upstream, call: Call, pass_on: Callable[[int, Answer], Awaitable[None]]
) -> Event:
    """`pass_on` is given a good answer and takes it to the client; it raises ClientGone."""
    try:
        async with upstream.post(call.instance, call.path, call.body, call.headers) as answer:
            if not answer.is_good:
                return DecodeFailed(leg, await answer.failure())
            await pass_on(leg, answer)
    except ClientGone:
        return ClientLeft()
    except PdrtError as error:
        return DecodeFailed(leg, Failure.of(error, elsewhere=True))
    return DecodeEnded(leg)


async def join(
    leg: int,
    decode_leg: int,
    upstream: Upstream,
    call: Call,
    ask_again: Callable[[], Awaitable[bool]],
) -> Event:
    """Tell decode who prefills now. It may not have heard of the room yet: then ask again."""
    try:
        while True:
            async with upstream.post(call.instance, call.path, call.body, call.headers) as answer:
                if answer.is_good:
                    return Joined(leg)
                if answer.status == 409:
                    return JoinedLate(leg)
                failure = await answer.failure()
            if answer.status != 404 or not await ask_again():
                lost = Unavailable(f"decode does not wait for a new prefill: {failure.error}")
                return DecodeFailed(decode_leg, Failure.of(lost, elsewhere=True))
    except PdrtError as error:
        return DecodeFailed(decode_leg, Failure.of(error, elsewhere=True))
