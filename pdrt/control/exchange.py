"""The three exchanges with leaders: each ends in one event and raises nothing of the wire's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pdrt.control.http import Json
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
from pdrt.control.longjson import read_long
from pdrt.control.merge import Merge
from pdrt.control.upstream import Answer, Upstream
from pdrt.errors import BadRequest, PdrtError, Unavailable

SHORT_ANSWER: Final = 1 << 20  # an answer that is not streamed is checked whole up to this size
PREFILL_ANSWER: Final = 1 << 20
PREFILL_TELLS: Final = 1 << 25  # the same with what it tells of a long prompt


class ClientGone(Exception):
    """The client's connection is closed."""


@dataclass(frozen=True, slots=True)
class Call:
    """One POST to a leader."""

    instance: Instance
    path: str
    body: bytes
    headers: Mapping[str, str]


async def prefill(
    leg: int, upstream: Upstream, call: Call, merge: Merge | None, *, is_plain: bool
) -> Event:
    try:
        async with upstream.post(call.instance, call.path, call.body, call.headers) as answer:
            if not answer.is_good:
                return PrefillFailed(leg, await answer.failure())
            body = await answer.whole(PREFILL_ANSWER if merge is None else PREFILL_TELLS)
    except PdrtError as error:
        return PrefillFailed(leg, Failure.of(error, elsewhere=True))
    if is_plain:
        return PrefillDone(leg)
    try:
        return PrefillDone(leg, await _told(body, merge))
    except PdrtError as error:
        return PrefillFailed(leg, Failure.of(error))


async def _told(body: bytes, merge: Merge | None) -> Json:
    """What says that the prompt is where it belongs. Raises PdrtError when this does not."""
    try:
        said = await read_long(body)
    except BadRequest:
        said = {}
    if said.get("status") != "prefilled":
        raise PdrtError(f"prefill answered {body[:200]!r}")
    if merge is not None:
        merge.check(said)
    return said


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
