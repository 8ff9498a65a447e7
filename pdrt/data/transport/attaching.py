"""What a transport does when a peer is met: it may raise or hang as foreign code likes.

Whatever it does, only this peer is not attached: the rest of the worker goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from pdrt.data.transport.promise import Peer, Transport
from pdrt.errors import PdrtError, TransferFailed

_log = structlog.get_logger()


async def attach(transport: Transport, peer: Peer, limit_s: float) -> None:
    """Raises TransferFailed, after `limit_s` at the latest; then it is not attached."""
    async with meeting(transport, peer.name, "attaching", limit_s):
        await transport.attach(peer)


@asynccontextmanager
async def meeting(
    transport: Transport, peer: str, doing: str, limit_s: float
) -> AsyncIterator[None]:
    """Whatever goes wrong within, the peer is detached and TransferFailed is raised."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        transport.detach(peer)
        raise TransferFailed(f"{doing} did not end within {limit_s:g} s") from None
    except TransferFailed:
        transport.detach(peer)
        raise
    except Exception as error:
        transport.detach(peer)
        if not isinstance(error, PdrtError):
            _log.exception("transport_broke", transport=transport.name, peer=peer)
        raise TransferFailed(f"{doing}: {type(error).__name__}: {error}") from error
    except BaseException:
        transport.detach(peer)
        raise
