"""A way is tried before it is used, at start and when a peer attaches; what is wrong is said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, NamedTuple

import pytest
from structlog.testing import capture_logs

from pdrt.config import TimeoutsSection
from pdrt.data.commands import OpenReceiver
from pdrt.data.events import ReceiveFailed, ReceiverReady
from pdrt.data.memory import PoolMemory
from pdrt.data.probe import Prober, Signature
from pdrt.data.process import this_process
from pdrt.data.transport.choosing import Choosing
from pdrt.data.transport.promise import Ended, Peer, Transport, Write
from pdrt.data.transport.shm import ShmTransport
from pdrt.data.transport.wrapping import Wrapping
from pdrt.data.trial import memory, move
from pdrt.errors import ConfigError, TransferFailed
from pdrt.messages import FROM_PREFILL, Attached, Process, Rank, encode
from tests.data.managers import SOURCE, Make, Side, route_to, side
from tests.data.scripted import Scripted

Fault = Literal["none", "never ends", "fails", "lies", "forgets the slot", "raises", "is full"]
SOON_S = 1.0  # for what never ends; all else has time, for the machine may be busy


class WrongShm(Wrapping):
    """A transport that attaches, but whose writes do not do what they should."""

    def __init__(self, memory: PoolMemory, fault: Fault) -> None:
        super().__init__(ShmTransport(memory, threads=1))
        self.fault = fault
        self.held: list[Write] = []

    async def attach(self, peer: Peer) -> None:
        if self.fault == "is full":
            raise OSError("too many open files")
        await super().attach(peer)

    def start(self, write: Write) -> None:
        match self.fault:
            case "none" | "is full":
                super().start(write)
            case "never ends":
                self.held.append(write)
            case "raises":
                raise RuntimeError("can't start new thread")
            case "fails":
                self._tell(Ended(write.id, "no route to host"))
            case "lies":
                self._tell(Ended(write.id))
            case "forgets the slot":
                super().start(Write(write.id, write.peer, write.runs))

    def detach(self, peer: str) -> None:
        super().detach(peer)
        for write in self.held:
            self._tell(Ended(write.id, "the peer is gone"))
        self.held.clear()


def wrong(fault: Fault) -> Make:
    return partial(WrongShm, fault=fault)


class Pair(NamedTuple):
    p: Side
    d: Side

    async def attach(self) -> None:
        self.d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
        await self.d.until(ReceiverReady, 1)


@asynccontextmanager
async def opened(make: Make | None = None, attach_s: float = 10.0) -> AsyncIterator[Pair]:
    """Two managers; the prefill side has the transport that `make` makes."""
    timeouts = TimeoutsSection(attach_s=attach_s)
    p = side("prefill", lambda _: pytest.fail("prefill asks nobody"), make=make, timeouts=timeouts)
    d = side("decode", lambda _: route_to(p.endpoint, this_process()))
    await p.start()
    await d.start()
    try:
        yield Pair(p, d)
    finally:
        await d.stop()
        await p.stop()


def wrong_shm(side: Side) -> WrongShm:
    inner = side.faulty._inner  # noqa: SLF001 - the cable, to be plugged in
    assert isinstance(inner, WrongShm)
    return inner


def session_of(side: Side) -> str:
    (name,) = side.manager.stats().peers
    return name


async def test_both_sides_say_what_a_peer_is_written_through_and_how_fast_that_was() -> None:
    """CASES 105: one real transfer a pair; path and GB/s are in both logs."""
    async with opened() as pair:
        with capture_logs() as logs:
            await pair.attach()
        told = [line for line in logs if line["event"] == "peer_attached"]
        assert [line["endpoint"] for line in told] == [pair.d.endpoint, pair.p.endpoint]
        for line, which in zip(told, pair, strict=True):
            assert (line["log_level"], line["transport"]) == ("info", "shm")
            assert line["gb_per_s"] > 0
            assert which.manager.stats().transports == {
                line["peer"]: f"shm, {line['gb_per_s']:g} GB/s",
            }


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("never ends", "a probe through shm did not end within 1 s"),
        ("fails", "no route to host"),
        ("lies", "says that it wrote to"),
        ("forgets the slot", "nothing has arrived"),
        ("raises", "a probe through shm: RuntimeError: can't start new thread"),
        ("is full", "attaching: OSError: too many open files"),
    ],
)
async def test_a_way_on_which_nothing_arrives_is_refused_with_both_addresses(
    fault: Fault, says: str
) -> None:
    """CASES 105: a request learns at once what is wrong; it does not wait for its own timeout."""
    async with opened(wrong(fault), SOON_S) as pair:
        with capture_logs() as logs:
            pair.d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
            failed = await pair.d.until(ReceiveFailed, 1)
        for word in (says, pair.p.endpoint, pair.d.endpoint, "shm", "rank 0,0,0"):
            assert word in failed.problem.message
        assert (failed.problem.code, failed.problem.stage) == ("transfer_failed", "attach")
        assert failed.problem.is_retryable
        assert any(line["event"] == "peer_refused" for line in logs)
        assert pair.d.manager.stats().transports == {}


async def test_the_cure_is_named_with_the_transport() -> None:
    async with opened(wrong("fails")) as pair:
        pair.d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
        failed = await pair.d.until(ReceiveFailed, 1)
        assert "run both on one host" in failed.problem.message


@pytest.mark.parametrize("fault", ["fails", "lies", "forgets the slot", "raises", "is full"])
async def test_a_way_that_works_again_is_taken_by_the_next_request(fault: Fault) -> None:
    async with opened(wrong(fault)) as pair:
        pair.d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
        await pair.d.until(ReceiveFailed, 1)
        wrong_shm(pair.p).fault = "none"
        pair.d.manager.do(OpenReceiver(2, 0, SOURCE, time.monotonic() + 60))
        await pair.d.until(ReceiverReady, 2)


async def test_an_attached_of_a_stranger_or_of_another_session_is_no_way() -> None:
    async with opened() as pair:
        await pair.attach()
        ghost = Process(host="x", pid=1, started=1)
        session = session_of(pair.p)
        for process, name in ((ghost, session), (this_process(), "other")):
            said = Attached(session=name, rank=Rank(), process=process, transport="tcp")
            pair.d.manager.hear(encode(FROM_PREFILL, said))
        assert [way[:3] for way in pair.d.manager.stats().transports.values()] == ["shm"]


async def test_the_way_to_a_dead_peer_is_forgotten() -> None:
    async with opened() as pair:
        await pair.attach()
        pair.p.manager._died(this_process())  # noqa: SLF001 - what the kernel would tell
        assert pair.p.manager.stats().transports == pair.p.manager.stats().peers == {}


async def test_a_peer_that_dies_while_it_is_tried_is_not_attached() -> None:
    async with opened(wrong("never ends")) as pair:
        pair.d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
        while not wrong_shm(pair.p).held:
            await asyncio.sleep(0)
        pair.p.manager._died(this_process())  # noqa: SLF001 - what the kernel would tell
        while wrong_shm(pair.p).held:
            await asyncio.sleep(0)
        assert pair.p.manager.stats().transports == pair.p.manager.stats().peers == {}


def test_the_writers_of_one_session_sign_in_places_of_their_own() -> None:
    there = memory()
    signs = [Signature("d", this_process(), number) for number in range(1, 1025)]
    at = [sign.at(there.probe_at, there.probe_bytes) for sign in signs]
    assert len(set(at)) == len({sign.data for sign in signs}) == 1024
    assert min(at) > there.probe_at
    assert max(at) + 64 == there.probe_at + there.probe_bytes


# Several ways.


@asynccontextmanager
async def prober_of(*inner: Transport, limit_s: float = 5.0) -> AsyncIterator[tuple[Prober, Peer]]:
    """Over several transports, of which the peer offers all."""
    there = memory()
    choosing = Choosing(inner, limit_s)
    prober = Prober(choosing, there, time.monotonic, limit_s)

    async def follow() -> None:
        async for end in choosing.ends():
            prober.ended(end)

    task = asyncio.create_task(follow())
    offers = {transport.name: b"" for transport in inner}
    yield prober, Peer("a", this_process(), there.region(offers))
    await choosing.close()
    await task


class Hanging(Scripted):
    """Nothing that it is asked for ever comes."""

    async def attach(self, peer: Peer) -> None:
        await super().attach(peer)
        await asyncio.Event().wait()


class Breaking(Scripted):
    async def attach(self, peer: Peer) -> None:
        await super().attach(peer)
        raise RuntimeError("a foreign fault")


class Deaf(Scripted):
    """It attaches, and carries nothing."""

    def start(self, write: Write) -> None:
        self.told.put_nowait(Ended(write.id, "no route to host"))


class Working(Scripted):
    def start(self, write: Write) -> None:
        self.told.put_nowait(Ended(write.id))


SIGN = Signature("a", this_process(), 1)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (Hanging("nixl"), "attaching did not end within 0.1 s"),
        (Breaking("nixl"), "RuntimeError: a foreign fault"),
        (Deaf("nixl"), "a probe write through nixl failed: no route to host"),
        (Scripted("nixl"), "a probe through nixl did not end within 0.1 s"),
    ],
)
async def test_a_way_that_hangs_breaks_or_carries_nothing_makes_room_for_the_next(
    first: Scripted, reason: str
) -> None:
    """CASES 105: nor is it passed over in silence."""
    tcp = Working("tcp")
    with capture_logs() as logs:
        async with prober_of(first, tcp, limit_s=0.1) as (prober, peer):
            way = await prober.reach(peer, SIGN)
    assert way.transport == "tcp"
    assert tcp.attached == ["a"]
    assert first.attached == []
    (line,) = [line for line in logs if line["event"] == "transport_refused"]
    assert line["transport"] == "nixl"
    assert reason in line["reason"]


async def test_when_no_way_works_every_reason_is_named() -> None:
    async with prober_of(Deaf("nixl"), Breaking("tcp")) as (prober, peer):
        with pytest.raises(TransferFailed, match=r"through nixl failed.*a foreign fault"):
            await prober.reach(peer, SIGN)


# At start.


async def test_a_worker_that_reaches_itself_through_each_transport_may_start() -> None:
    async with opened() as pair:
        with capture_logs() as logs:
            await pair.p.manager.try_transports()
            await pair.d.manager.try_transports()
        ready = [line for line in logs if line["event"] == "transport_ready"]
        assert [line["transport"] for line in ready] == ["shm", "tcp"] * 2
        assert all(line["gb_per_s"] > 0 for line in ready)
        await pair.attach()


@pytest.mark.parametrize("fault", ["never ends", "fails", "lies", "forgets the slot"])
async def test_a_transport_that_carries_nothing_is_a_start_up_error(fault: Fault) -> None:
    """CASES 105: a wrong NIC or a firewall fails the start, not the first request."""
    async with opened(wrong(fault), SOON_S) as pair:
        with pytest.raises(ConfigError, match=r"shm: this worker cannot write to itself"):
            await pair.p.manager.try_transports()


# What `pdrt doctor` does.


@pytest.mark.parametrize(
    ("fault", "says"),
    [("lies", "what arrived is not what was sent"), ("fails", "no route to host")],
)
async def test_a_trial_believes_no_transport_that_says_that_it_wrote(
    fault: Fault, says: str
) -> None:
    here, there = memory(), memory()
    writer, target = WrongShm(here, fault), ShmTransport(there, threads=1)
    with pytest.raises(TransferFailed, match=says):
        await move(writer, here, target, there)
    await writer.close()
    await target.close()


async def test_a_trial_tells_how_fast_it_was() -> None:
    here, there = memory(), memory()
    writer, target = ShmTransport(here, threads=1), ShmTransport(there, threads=1)
    assert await move(writer, here, target, there) > 0.05
    await writer.close()
    await target.close()
