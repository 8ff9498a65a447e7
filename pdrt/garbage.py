"""Garbage collection that nobody waits for.

A full collection walks every object that can be part of a cycle, with the GIL held: 120 ms for
a worker with 10,000 requests in line, in which all streams stand still. Almost all it walks is
innocent: reference counts free a request and what belongs to it (a test counts what is left
over), and cycles that are short-lived, as those of exceptions, are found among the young.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final, NoReturn

_YOUNG: Final = 700  # Python's own: a look at the young takes microseconds, at the middle-aged
_MIDDLE: Final = 10  # (what outlived ten such looks) less than half a millisecond
_MANY: Final = 10_000  # objects: less than a millisecond's look
_NEVER: Final = 1_000_000_000
_FEW: Final = 64  # requests: with so many a full collection takes about as long as a young one
_EVERY_S: Final = 10.0


def settle() -> None:
    """All that start-up made will stay: no collection needs to look at it again.

    A full one otherwise walks some hundred thousand objects of libraries, and the event loop
    stands still for tens of milliseconds meanwhile.
    """
    gc.collect()
    gc.freeze()


def settle_for_requests() -> None:
    """And few looks at the young: next to nothing of a router's requests is left for them to find.

    What is in flight is young, and at Python's own count it is walked every eighteen requests.
    """
    settle()
    gc.set_threshold(_MANY, _MIDDLE, _MIDDLE)


def settle_for_steps() -> None:
    """And from now on no full collection begins by itself, in the middle of a step; see `sweep`."""
    settle()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


async def sweep(living: Callable[[], int], every_s: float = _EVERY_S) -> NoReturn:
    """Full collections at moments when so few requests live that they are short."""
    while True:
        await asyncio.sleep(every_s)
        if living() <= _FEW:
            gc.collect()
