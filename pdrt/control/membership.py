"""A leader's membership in the routers it was told of: it registers, renews, and says goodbye.

The promise: each router hears of the node's draining before the node has gone, and a router that
is away or was restarted is registered with again as soon as it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import structlog

from pdrt.control.leases import RENEWALS, Registration
from pdrt.errors import PdrtError
from pdrt.machine import Edge, Table

RETRY_S: Final = 1.0  # while a router does not take us
GOODBYES: Final = 3

log = structlog.get_logger(__name__)


class Place(StrEnum):
    OUTSIDE = "outside"  # the router does not know us, or not any more
    MEMBER = "member"
    LEAVING = "leaving"  # to be said goodbye to
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Accepted:
    lease_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """It said no, or nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The node takes no new work from now on."""


@dataclass(frozen=True, slots=True)
class SaidGoodbye:
    """The router has heard it, or cannot be told."""


Event: TypeAlias = Accepted | Refused | Draining | SaidGoodbye
EVENTS: Final = (Accepted, Refused, Draining, SaidGoodbye)


@dataclass(slots=True)
class Membership:
    """In one router."""

    url: str
    state: Place = Place.OUTSIDE
    renew_s: float = RETRY_S
    reason: str = ""  # why it is outside


def _accept(membership: Membership, event: Accepted) -> Sequence[None]:
    membership.renew_s, membership.reason = event.lease_s / RENEWALS, ""
    return ()


def _refuse(membership: Membership, event: Refused) -> Sequence[None]:
    membership.renew_s, membership.reason = RETRY_S, event.reason
    return ()


_P = Place

MEMBERSHIP: Table[Place, Membership, None] = Table(
    "membership",
    edges={
        (_P.OUTSIDE, Accepted): Edge(_P.MEMBER, _accept),
        (_P.OUTSIDE, Refused): Edge(_P.OUTSIDE, _refuse),
        (_P.OUTSIDE, Draining): Edge(_P.GONE),
        (_P.MEMBER, Accepted): Edge(_P.MEMBER, _accept),
        (_P.MEMBER, Refused): Edge(_P.OUTSIDE, _refuse),
        (_P.MEMBER, Draining): Edge(_P.LEAVING),
        (_P.LEAVING, SaidGoodbye): Edge(_P.GONE),
    },
    ignored={
        (_P.LEAVING, Accepted): "the goodbye comes after it",
        (_P.LEAVING, Refused): "the goodbye comes after it",
        (_P.LEAVING, Draining): "it is leaving already",
        **{(_P.GONE, event): "it has left" for event in EVENTS},
        (_P.OUTSIDE, SaidGoodbye): "nobody was told",
        (_P.MEMBER, SaidGoodbye): "of an earlier life",
    },
)


def feed(membership: Membership, event: Event) -> None:
    """The only function that moves a membership."""
    before = membership.state
    membership.state, _ = MEMBERSHIP.step(before, membership, event)
    if membership.state is not before:
        tell = log.info if membership.state is not Place.OUTSIDE else log.warning
        tell(
            "membership",
            router=membership.url,
            state=str(membership.state),
            reason=membership.reason,
        )


Tell: TypeAlias = Callable[[str, Registration], Awaitable[float]]  # a router; the lease in seconds


@dataclass(slots=True)
class Registrar:
    """Keeps the node a member of each router until `leaving` is set. Run it as a task.

    `current` is what the node says of itself just now.
    """

    urls: Sequence[str]
    tell: Tell
    leaving: asyncio.Event
    current: Callable[[], Registration]
    memberships: list[Membership] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memberships = [Membership(url) for url in self.urls]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in self.memberships:
                tasks.create_task(self._stay(each))

    async def say_goodbye(self) -> None:
        """The node ends: to those who have not heard yet that it leaves. Bounded by `tell`."""
        self.leaving.set()
        async with asyncio.TaskGroup() as tasks:
            for each in self.memberships:
                tasks.create_task(self._leave(each))

    async def _stay(self, membership: Membership) -> None:
        while not self.leaving.is_set():
            feed(membership, await self._register(membership.url, self.current()))
            with suppress(TimeoutError):
                async with asyncio.timeout(membership.renew_s):
                    await self.leaving.wait()
        await self._leave(membership)

    async def _leave(self, membership: Membership) -> None:
        feed(membership, Draining())
        if membership.state is not Place.LEAVING:
            return
        goodbye = self.current().model_copy(update={"state": "leaving"})
        for _ in range(GOODBYES):
            if isinstance(await self._register(membership.url, goodbye), Accepted):
                break
        feed(membership, SaidGoodbye())

    async def _register(self, url: str, said: Registration) -> Accepted | Refused:
        try:
            return Accepted(await self.tell(url, said))
        except PdrtError as error:
            return Refused(str(error))
