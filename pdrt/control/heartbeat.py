"""Leaders watch each other: a leader that stops answering is Suspect, then Dead, within 2 s.

`Heartbeat` asks (decode asks prefill's bootstrap servers); `Callers` listens to who asks (so
prefill knows of decode without being told an address). Both move peers by the same table.
The promise: each change is told once, and a new epoch at an address is a new peer: the old one
is told dead first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from aiohttp import ClientSession

from pdrt.config import bracketed
from pdrt.control.bootstrap_client import BootstrapClient, Clock, Sleep
from pdrt.control.patience import patience
from pdrt.data.peer import Beat, Died, Event, Health, Miss, feed
from pdrt.errors import PdrtError
from pdrt.keys import ClusterKey

Address: TypeAlias = tuple[str, int]  # host, port
Probe: TypeAlias = Callable[[Address], Awaitable[int]]  # the peer's epoch; raises PdrtError
MAX_PEERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Time:
    clock: Clock
    sleep: Sleep = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Timing:
    every_s: float = 1.0
    timeout_s: float = 0.45
    forget_s: float = 600.0  # without anybody's interest

    def pause_after(self, health: Health) -> float:
        """From one ping to the next: the second chance comes soon, but not in the same instant."""
        return self.timeout_s if health is Health.SUSPECT else self.every_s


@dataclass(frozen=True, slots=True)
class News:
    """A peer's health has changed; `reason` says why when it is dead."""

    peer: str
    health: Health
    epoch: int
    reason: str = ""


Tell: TypeAlias = Callable[[News], None]


@dataclass(slots=True)
class Watched:
    """One leader that we know of."""

    name: str
    health: Health = Health.UNKNOWN
    epoch: int = -1
    reason: str = ""
    used: float = 0.0  # when somebody was last interested
    due: float = 0.0  # Callers: when its next call is missed

    def heard(self, epoch: int, tell: Tell) -> None:
        """It lives, in this epoch."""
        if self.epoch not in (-1, epoch):
            self._feed(Died(), f"epoch {epoch} took the place of {self.epoch}", tell)
        self.epoch = epoch
        self._feed(Beat(), "", tell)

    def missed(self, reason: str, tell: Tell) -> None:
        self._feed(Miss(), reason, tell)

    def _feed(self, event: Event, reason: str, tell: Tell) -> None:
        self.reason = reason
        if news := feed(self, event):
            tell(News(self.name, news, self.epoch, reason))


async def watch(
    address: Address, peer: Watched, probe: Probe, tell: Tell, timing: Timing, time: Time
) -> None:
    """Ask for ever, or until nobody was interested for `forget_s`. Cancel to stop."""
    while time.clock() - peer.used < timing.forget_s:
        began = time.clock()
        try:
            async with patience(timing.timeout_s):
                epoch = await probe(address)
        except TimeoutError:
            peer.missed(f"no answer within {timing.timeout_s:g} s", tell)
        except PdrtError as error:
            peer.missed(str(error), tell)
        else:
            peer.heard(epoch, tell)
        due = began + timing.pause_after(peer.health)
        await time.sleep(max(0.0, due - time.clock()))


class Heartbeat:
    """Watches every address that `watch` is called with; `run()` it in a TaskGroup."""

    def __init__(self, probe: Probe, tell: Tell, timing: Timing, time: Time) -> None:
        self._probe, self._tell, self._timing, self._time = probe, tell, timing, time
        self._peers: OrderedDict[Address, Watched] = OrderedDict()  # least recently used first
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._new = asyncio.Event()

    def watch(self, host: str, port: int) -> None:
        """This leader matters to us now. Call it as often as you like."""
        address = host, port
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Watched(f"{bracketed(host)}:{port}")
            self._new.set()
        peer.used = self._time.clock()
        self._peers.move_to_end(address)
        if len(self._peers) > MAX_PEERS:
            self._forget(next(iter(self._peers)))

    def health(self, host: str, port: int) -> Health:
        peer = self._peers.get((host, port))
        return peer.health if peer else Health.UNKNOWN

    def peers(self) -> list[Watched]:
        return list(self._peers.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._new.clear()
                for address in self._peers.keys() - self._tasks.keys():
                    self._tasks[address] = group.create_task(self._watch(address))
                await self._new.wait()

    async def _watch(self, address: Address) -> None:
        peer = self._peers[address]
        await watch(address, peer, self._probe, self._tell, self._timing, self._time)
        del self._peers[address], self._tasks[address]

    def _forget(self, address: Address) -> None:
        self._peers.pop(address, None)
        task = self._tasks.pop(address, None)
        if task is not None:
            task.cancel()


class Callers:
    """The leaders that watch us: their pings are their heartbeat; `run()` it in a TaskGroup."""

    def __init__(self, tell: Tell, timing: Timing, time: Time) -> None:
        self._tell, self._timing, self._time = tell, timing, time
        self._peers: OrderedDict[str, Watched] = OrderedDict()  # longest silent first

    def heard(self, caller: str) -> None:
        """A ping came, with the caller's `name epoch`. Anything else is dropped."""
        name, _, epoch = caller.partition(" ")
        if not (name and epoch.isascii() and epoch.isdigit() and len(caller) <= 256):
            return
        peer = self._peers.setdefault(name, Watched(name))
        peer.used = self._time.clock()
        peer.due = peer.used + self._timing.every_s + self._timing.timeout_s
        peer.heard(int(epoch), self._tell)
        self._peers.move_to_end(name)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def peers(self) -> list[Watched]:
        return list(self._peers.values())

    def tick(self) -> None:
        """Count what should have come by now; forget whoever was silent for long."""
        now = self._time.clock()
        for peer in self.peers():
            if now - peer.used >= self._timing.forget_s:
                del self._peers[peer.name]
            elif now >= peer.due:
                peer.missed(f"it has not called for {now - peer.used:.1f} s", self._tell)
                # Not from now, or late ticks would add up; not at once, or a stall of ours
                # would be taken for two misses of theirs.
                due = peer.due + self._timing.pause_after(peer.health)
                peer.due = max(due, now + self._timing.timeout_s / 2)

    async def run(self) -> None:
        while True:
            await self._time.sleep(self._timing.timeout_s / 8)
            self.tick()


def bootstrap_probe(
    session: ClientSession, key: ClusterKey | None, timeout_s: float, caller: str
) -> Probe:
    """Asks a prefill leader's bootstrap server; `caller` is our `name epoch`, for its Callers."""

    async def probe(address: Address) -> int:
        client = BootstrapClient(session, *address, key, timeout_s, caller)
        return (await client.health()).instance_epoch

    return probe
