"""How tp 0 of a group and its followers of other nodes find each other: through their leader.

Tp 0 announces there where it listens, until all have come. The promise: a follower is at last at
the present life of tp 0, however often either has been started again meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn

import structlog
from aiohttp import ClientSession

from pdrt import messages
from pdrt.control.leader_client import LeaderClient
from pdrt.curve import CurveContext
from pdrt.errors import Conflict, PdrtError, PeerLost
from pdrt.link import Link
from pdrt.messages import FromFollower, GroupPlace, ToFollower
from pdrt.spawn import WorkerSpec

Head = Link[ToFollower, FromFollower]
Sleep = Callable[[float], Awaitable[object]]
ANNOUNCE_S: Final = 0.5  # the leader believes it a few times longer
_LOOK_S: Final = 0.2
_MET_S: Final = 2.0  # for a handshake; else who announced this is gone


def net_of(spec: WorkerSpec) -> CurveContext:
    return CurveContext(spec.key, spec.disagg.local_ip)


async def announce(
    spec: WorkerSpec, endpoints: Mapping[int, str], sleep: Sleep = asyncio.sleep
) -> NoReturn:
    """Tp 0 says where it listens for each follower; cancel it when all have come.

    Raises PeerLost when another life has taken our place.
    """
    place = GroupPlace(
        epoch=spec.epoch, endpoints={str(member): where for member, where in endpoints.items()}
    )
    async with ClientSession() as session:
        leader, trouble = _leader(spec, session), ""
        while True:
            try:
                await leader.announce(spec.rank.dp, place)
                trouble = ""
            except Conflict as error:
                raise PeerLost(f"worker {spec.rank} has another life: {error}") from error
            except PdrtError as error:
                trouble = _told(trouble, str(error))
            await sleep(ANNOUNCE_S)


async def reach(spec: WorkerSpec, net: CurveContext, sleep: Sleep = asyncio.sleep) -> Head:
    """A follower's link to its tp 0, met, however long that takes."""
    async with ClientSession() as session:
        leader, trouble = _leader(spec, session), ""
        while True:
            try:
                place = await leader.find(spec.rank.dp)
                endpoint = place.endpoints.get(str(spec.member)) if place else None
                if endpoint and (head := await _met(net, endpoint)):
                    return head
                trouble = ""
            except PdrtError as error:
                trouble = _told(trouble, str(error))
            await sleep(_LOOK_S)


async def _met(net: CurveContext, endpoint: str) -> Head | None:
    """None when nobody of ours is there any more."""
    head: Head = Link(net.context, messages.TO_FOLLOWER, messages.FROM_FOLLOWER)
    try:
        head.dial(net, endpoint)
        async with asyncio.timeout(_MET_S):
            await head.met()
    except (OSError, TimeoutError):
        head.close()
        return None
    except asyncio.CancelledError:
        head.close()
        raise
    return head


def _leader(spec: WorkerSpec, session: ClientSession) -> LeaderClient:
    return LeaderClient(session, spec.leader, spec.key, spec.config.timeouts.connect_s)


def _told(before: str, now: str) -> str:
    """A line for each new trouble."""
    if now != before:
        structlog.get_logger().warning("leader_not_reached", reason=now)
    return now
