"""What only one role's leader has: prefill its bootstrap server, decode its watch over prefills.

A node holds one Side and never asks which; what a role has no use for does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from aiohttp import ClientSession

from pdrt.config import DisaggConfig, NodeConfig, Role
from pdrt.control.bootstrap import BootstrapState, Limits, Sizes, bootstrap_app
from pdrt.control.heartbeat import (
    Callers,
    Heartbeat,
    Tell,
    Time,
    Timing,
    Watched,
    bootstrap_probe,
)
from pdrt.control.http import listen
from pdrt.control.reprefill import Reprefill
from pdrt.errors import NotFound
from pdrt.keys import ClusterKey
from pdrt.messages import AskPrefill, Rank, Rebind, Submit, ToWorker

_CLOSE_S = 1.0  # for requests that are still open when the server ends


class Side(Protocol):
    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and real port of the bootstrap server."""
        ...

    @property
    def epoch(self) -> int:
        """Of the instance."""
        ...

    async def bind(self, stack: AsyncExitStack, url: str) -> None:
        """Take addresses; `url` is the leader's API. Raises ConfigError."""
        ...

    def actors(self) -> list[Coroutine[Any, Any, None]]: ...

    def told(self, rank: Rank, message: ToWorker) -> None:
        """A worker was told this."""
        ...

    def ended(self, room: int, attempt: int) -> None:
        """A worker said its last of this."""
        ...

    def lost(self, rank: Rank, is_dead: bool = True) -> None:
        """A worker's process has ended, or only the way to it when it is not dead."""
        ...

    async def prefill_again(self, wanted: AskPrefill) -> None:
        """Raises PdrtError when nobody else will compute the room."""
        ...

    def missing(self) -> Sequence[str]:
        """Ranks without a live lease, with the reason."""
        ...

    def peers(self) -> Sequence[Watched]: ...


class HybridSide:
    """Alone: nobody to register with, nobody to watch."""

    bootstrap: tuple[str, int] | None = None

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    async def bind(self, _stack: AsyncExitStack, _url: str) -> None: ...

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        return []

    def told(self, _rank: Rank, _message: ToWorker) -> None: ...

    def ended(self, _room: int, _attempt: int) -> None: ...

    def lost(self, _rank: Rank, is_dead: bool = True) -> None: ...

    async def prefill_again(self, wanted: AskPrefill) -> None:
        raise NotFound(f"room {wanted.room} has no prefill side")

    def missing(self) -> Sequence[str]:
        return ()

    def peers(self) -> Sequence[Watched]:
        return ()


class PrefillSide:
    """The bootstrap server, and the decode leaders that call it."""

    def __init__(
        self, config: NodeConfig, disagg: DisaggConfig, key: ClusterKey, tell: Tell, epoch: int
    ) -> None:
        parallel = config.parallel
        self._key = key
        self._state = BootstrapState(
            Sizes(parallel.tp, parallel.cp, parallel.dp),
            epoch,
            disagg.local_ip,
            Limits(lease_s=config.timeouts.lease_s),
        )
        self._callers = Callers(tell, _timing(config), Time(time.monotonic))
        self.bootstrap: tuple[str, int] | None = disagg.bootstrap_host, disagg.bootstrap_port

    @property
    def epoch(self) -> int:
        """Rises with each new life of a rank."""
        return self._state.instance_epoch

    async def bind(self, stack: AsyncExitStack, url: str) -> None:
        assert self.bootstrap is not None
        self._state.http = url
        app = bootstrap_app(self._state, self._key, time.monotonic, self._callers.heard)
        host, port = self.bootstrap
        runner, port = await listen(app, host, port, _CLOSE_S)
        stack.push_async_callback(runner.cleanup)
        self.bootstrap = host, port

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        return [self._callers.run()]

    def told(self, _rank: Rank, _message: ToWorker) -> None: ...

    def ended(self, _room: int, _attempt: int) -> None: ...

    def lost(self, rank: Rank, is_dead: bool = True) -> None:
        """One that is not dead goes on with its lease, in the same epoch."""
        if is_dead:
            self._state.withdraw(rank)

    async def prefill_again(self, wanted: AskPrefill) -> None:
        raise NotFound(f"room {wanted.room} is computed here")

    def missing(self) -> Sequence[str]:
        return self._state.missing(time.monotonic())

    def peers(self) -> Sequence[Watched]:
        return self._callers.peers()


class DecodeSide:
    """The watch over the prefill leaders that requests named, and what retractions need of them."""

    bootstrap: tuple[str, int] | None = None

    def __init__(self, config: NodeConfig, key: ClusterKey, tell: Tell, epoch: int) -> None:
        self._config, self._key, self._tell, self.epoch = config, key, tell, epoch
        self._heartbeat: Heartbeat
        self._reprefill: Reprefill

    async def bind(self, stack: AsyncExitStack, url: str) -> None:
        session = await stack.enter_async_context(ClientSession())
        timing = _timing(self._config)
        probe = bootstrap_probe(session, self._key, timing.timeout_s, f"{url} {self.epoch}")
        own_time, connect_s = Time(time.monotonic), self._config.timeouts.connect_s
        self._heartbeat = Heartbeat(probe, self._tell, timing, own_time)
        self._reprefill = Reprefill(session, self._key, connect_s, own_time, time.time)

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        return [self._heartbeat.run()]

    def told(self, rank: Rank, message: ToWorker) -> None:
        self._reprefill.told(rank, message)
        if isinstance(message, Submit | Rebind) and message.source is not None:
            self._heartbeat.watch(message.source.host, message.source.port)

    def ended(self, room: int, attempt: int) -> None:
        self._reprefill.over(room, attempt)

    def lost(self, rank: Rank, is_dead: bool = True) -> None:
        self._reprefill.lost(rank)

    async def prefill_again(self, wanted: AskPrefill) -> None:
        await self._reprefill.ask(wanted)

    def missing(self) -> Sequence[str]:
        return ()

    def peers(self) -> Sequence[Watched]:
        return self._heartbeat.peers()


def make_side(
    role: Role, config: NodeConfig, disagg: DisaggConfig, key: ClusterKey, tell: Tell, epoch: int
) -> Side:
    match role:
        case "prefill":
            return PrefillSide(config, disagg, key, tell, epoch)
        case "decode":
            return DecodeSide(config, key, tell, epoch)
        case "hybrid":
            return HybridSide(epoch)


def _timing(config: NodeConfig) -> Timing:
    return Timing(config.timeouts.heartbeat_s, config.timeouts.heartbeat_timeout_s)
