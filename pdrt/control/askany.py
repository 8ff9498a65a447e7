"""Questions that any leader of a model can answer: passed on, and the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from pdrt.control.instances import Instance
from pdrt.control.upstream import Upstream, is_good, refusal_of, retry_after_of
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.errors import DeadlinePassed, NotFound, PeerLost, Unavailable

MAX_ANSWER: Final = 1 << 27
_TRIES: Final = 3
EACH_S: Final = 10.0  # tokenizers take less than one for any prompt that fits


async def ask_any(
    instances: Iterable[Instance], upstream: Upstream, request: Request, within_s: float
) -> Reply:
    """Raises NotFound, Unavailable or DeadlinePassed; what an instance refuses is an answer."""
    body = request.json()
    able = _able(instances, body.get("model"))
    try:
        async with asyncio.timeout(within_s):
            return await _first_answer(able, upstream, request)
    except TimeoutError:
        raise DeadlinePassed(f"no leader answered within {within_s:g} s") from None


def _able(instances: Iterable[Instance], model: object) -> list[Instance]:
    """Those with the least in hand first."""
    routable = [each for each in instances if each.is_routable and each.status is not None]
    if not routable:
        raise Unavailable("no instance is there to answer")
    if not model:
        able = routable
    else:
        able = [each for each in routable if each.status and each.status.model in ("", model)]
    if not able:
        raise NotFound(f"model {model!r} is not served here")
    return sorted(able, key=lambda each: each.load.requests)


async def _first_answer(able: list[Instance], upstream: Upstream, request: Request) -> Reply:
    lost = PeerLost("no instance answered")
    for instance in able[:_TRIES]:
        try:
            async with asyncio.timeout(EACH_S):
                return await _ask(instance, upstream, request)
        except TimeoutError:
            lost = PeerLost(f"{instance.name} did not answer within {EACH_S:g} s")
        except PeerLost as error:
            lost = error
    raise lost


async def _ask(instance: Instance, upstream: Upstream, request: Request) -> Reply:
    """Raises PeerLost."""
    lines = f"x-request-id: {request.id}\r\n".encode("latin-1")
    status, headers, body = await upstream.ask(
        instance, request.path, request.body, lines, MAX_ANSWER
    )
    if not is_good(status):
        error, status = refusal_of(instance, status, body)
        if after := retry_after_of(headers):
            error.retry_after = int(after)
    elif body.lstrip()[:1] == b"{":
        return Reply(status, body)
    else:
        error, status = Unavailable(f"{instance.name} answered {status} without JSON"), 502
    return Reply.error(error, request.id, instance.name, status)
