"""Mooncake: what its calls may answer, how many runs it is given, and what is refused first."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdrt.config import TransferSection
from pdrt.data.installed import NEEDS
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport import mooncake
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import EngineError
from pdrt.data.transport.mooncake import MOST_RUNS, MooncakeEngine, open_mooncake
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import ConfigError, TransferFailed
from pdrt.messages import Process
from tests.data.mortal import mortal
from tests.data.transports import LAYOUT, LOCAL

SLOT = bytes(range(64))
QUEUE = 1024  # of the real engine, for one peer


@dataclass
class FakeLibrary:
    """Copies when it is asked how a write stands. `statuses`: what it answers first, by size."""

    answers: dict[str, int] = field(default_factory=dict)
    statuses: dict[int, list[int | Exception]] = field(default_factory=dict)
    refuses: set[int] = field(default_factory=set)  # sizes
    raises: set[int] = field(default_factory=set)
    open: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    most_open: int = 0
    count: int = 0
    calls: list[str] = field(default_factory=list)

    def _answer(self, call: str) -> int:
        self.calls.append(call)
        return self.answers.get(call, 0)

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int:
        return self._answer("initialize")

    def get_rpc_port(self) -> int:
        return 15000

    def register_memory(self, address: int, size: int, /) -> int:
        return self._answer("register_memory")

    def unregister_memory(self, address: int, /) -> int:
        return self._answer("unregister_memory")

    def send_probe(self, session: str, /) -> int:
        return self._answer(f"send_probe {session}")

    def transfer_submit_write(self, session: str, here: int, there: int, size: int, /) -> int:
        if size in self.raises:
            raise RuntimeError("no such segment")
        if size in self.refuses or len(self.open) >= QUEUE:
            return 0
        self.count += 1
        self.open[self.count] = (here, there, size)
        self.most_open = max(self.most_open, len(self.open))
        return self.count

    def transfer_check_status(self, submitted: int, /) -> int:
        here, there, size = self.open[submitted]  # KeyError: asked again after the last word
        if left := self.statuses.get(size):
            status = left.pop(0)
            if isinstance(status, Exception):
                raise status
            if status == -1:
                del self.open[submitted]
            if status != 1:
                return status
        del self.open[submitted]
        ctypes.memmove(there, here, size)
        return 1


@dataclass
class Rig:
    library: FakeLibrary
    transport: EngineTransport
    memory: PoolMemory
    target: PoolMemory
    ends: AsyncIterator[Ended]

    def peer(self, name: str = "a", process: Process | None = None) -> Peer:
        handle = self.transport.offers["mooncake"]
        ours = self.memory.address.to_bytes(8, "big")
        handle = handle.replace(ours, self.target.address.to_bytes(8, "big"))
        return Peer(name, process or this_process(), self.target.region({"mooncake": handle}))

    async def end_of(self, number: int, sizes: list[int], peer: str = "a") -> Ended:
        self.write(number, sizes, peer)
        return await anext(self.ends)

    def write(self, number: int, sizes: list[int], peer: str = "a") -> None:
        """Such runs, none of which is another's neighbour."""
        at = np.cumsum([0, *(size + 1 for size in sizes)])[:-1] + self.memory.pool_at
        runs = np.stack([at, at, sizes], axis=1)
        self.transport.start(Write(number, peer, runs, SlotWrite(0, SLOT)))

    @property
    def slot(self) -> bytes:
        return bytes(self.target.slots_view[:64])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    library = FakeLibrary()
    memory, target = (PoolMemory(LAYOUT, 64, 1) for _ in range(2))
    memory.array[:] = np.arange(memory.size) % 251 + 1
    transport = open_mooncake(TransferSection(), memory, LOCAL, lambda: library)
    rig = Rig(library, transport, memory, target, transport.ends())
    await transport.attach(rig.peer())
    yield rig
    await transport.close()
    assert library.open == {}  # nothing is left behind under way


async def test_a_session_is_probed_and_opened_when_it_is_attached(rig: Rig) -> None:
    """The first write asks the peer where its memory is, and delays all others meanwhile."""
    assert rig.library.calls[-1] == "send_probe 127.0.0.1:15000"
    assert rig.library.count == 1


async def test_no_more_runs_are_under_way_than_the_engine_s_queue_holds(rig: Rig) -> None:
    """Beyond it some are refused, and a slot would vouch for blocks that never came."""
    assert await rig.end_of(1, [7] * 5000) == Ended(1)
    assert rig.library.most_open == MOST_RUNS < QUEUE
    at = rig.memory.pool_at + 8 * 4999
    assert np.array_equal(rig.target.array[at : at + 7], rig.memory.array[at : at + 7])
    assert rig.slot == SLOT


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"refuses": {9}}, "was refused by the engine"),
        ({"raises": {9}}, "RuntimeError('no such segment')"),
        ({"refuses": {64}}, "was refused by the engine"),  # the slot
    ],
)
async def test_a_refused_run_fails_the_write_when_all_others_of_it_are_over(
    rig: Rig, fault: dict[str, object], said: str
) -> None:
    """CASES 10, 26: no slot vouches for it, nothing of it is under way, the next one lands."""
    for name, value in fault.items():
        setattr(rig.library, name, value)
    end = await rig.end_of(1, [7, 9, 7, 7])
    assert end.error is not None
    assert said in end.error
    assert rig.library.open == {}
    assert rig.slot == bytes(64)
    rig.library.refuses, rig.library.raises = set(), set()
    assert await rig.end_of(2, [7, 9]) == Ended(2)
    assert rig.slot == SLOT


FAILURES: list[dict[int, list[int | Exception]]] = [
    {9: [-1]},
    {9: [0, -2, 0, -1]},
    {64: [-1]},  # the slot
]


@pytest.mark.e2e
@pytest.mark.parametrize("statuses", FAILURES)
async def test_a_run_that_failed_over_tcp_may_land_until_the_peer_is_dead(
    rig: Rig, statuses: dict[int, list[int | Exception]]
) -> None:
    """CASES 10, 50: no slot vouches for it, and its blocks are not given back."""
    async with mortal() as (child, process):
        await rig.transport.attach(rig.peer("b", process))
        rig.library.statuses = deepcopy(statuses)
        rig.write(1, [7, 9, 7, 7], "b")
        assert await rig.end_of(2, [7], "b") == Ended(2)
        assert rig.library.open == {}
        child.kill()
        end = await anext(rig.ends)
    assert end.id == 1
    assert end.error is not None
    assert "status -1" in end.error


@pytest.mark.parametrize("statuses", FAILURES)
async def test_a_run_that_failed_over_rdma_is_over(
    statuses: dict[int, list[int | Exception]],
) -> None:
    """CASES 26. That is assumed: no hardware was here."""
    library, memory = FakeLibrary(), PoolMemory(LAYOUT, 64, 1)
    transport = EngineTransport(memory, MooncakeEngine(library, LOCAL, EngineError))
    rig = Rig(library, transport, memory, PoolMemory(LAYOUT, 64, 1), transport.ends())
    await transport.attach(rig.peer())
    library.statuses = deepcopy(statuses)
    end = await rig.end_of(1, [7, 9, 7, 7])
    assert end.error is not None
    assert "status -1" in end.error
    assert rig.slot == bytes(64)
    assert await rig.end_of(2, [7, 9]) == Ended(2)
    assert rig.slot == SLOT
    await transport.close()


@pytest.mark.parametrize("undecided", [0, -2, RuntimeError("later")])
async def test_what_is_not_decided_is_asked_again(rig: Rig, undecided: int | Exception) -> None:
    """A timeout is no end: what was submitted can still arrive."""
    rig.library.statuses = {9: [undecided] * 30}
    assert await rig.end_of(1, [9]) == Ended(1)


async def test_a_peer_that_does_not_answer_is_not_attached(rig: Rig) -> None:
    rig.library.answers = {"send_probe 127.0.0.1:15000": -102}
    peer = Peer("b", this_process(), rig.peer().region)
    with pytest.raises(TransferFailed, match=r"127.0.0.1:15000 does not answer: status -102"):
        await rig.transport.attach(peer)


@pytest.mark.parametrize(("ours", "theirs"), [(LOCAL, "::1"), ("::1", LOCAL)])
async def test_a_peer_of_the_other_family_of_addresses_is_refused_by_name(
    ours: str, theirs: str
) -> None:
    here, there = (
        open_mooncake(TransferSection(), PoolMemory(LAYOUT, 2, 1), ip, FakeLibrary)
        for ip in (ours, theirs)
    )
    region = PoolMemory(LAYOUT, 2, 1).region(there.offers)
    with pytest.raises(TransferFailed, match="not of one family of addresses"):
        await here.attach(Peer("b", this_process(), region))
    await here.close()
    await there.close()


@pytest.mark.parametrize(
    ("call", "said"), [("initialize", "cannot be used at"), ("register_memory", "cannot register")]
)
async def test_what_fails_at_the_start_is_a_config_error(call: str, said: str) -> None:
    library = FakeLibrary(answers={call: -1})
    with pytest.raises(ConfigError, match=said):
        open_mooncake(TransferSection(), PoolMemory(LAYOUT, 2, 1), LOCAL, lambda: library)


@pytest.mark.parametrize(
    ("config", "devices", "said"),
    [
        (TransferSection(transport="mooncake", nic="eth0"), [], "has no effect"),
        (TransferSection(mooncake_protocol="rdma"), [], "this machine has none"),
        (
            TransferSection(transport="mooncake", mooncake_protocol="rdma", nic="mlx5_9"),
            ["mlx5_0"],
            "no mlx5_9",
        ),
    ],
)
def test_a_device_that_is_not_there_fails_at_the_start(
    config: TransferSection, devices: list[str], said: str
) -> None:
    """CASES 105: the engine alone would take TCP in silence."""
    with pytest.raises(ConfigError, match=said):
        mooncake.check_device(config, devices)


def test_a_device_that_is_there_is_taken() -> None:
    config = TransferSection(transport="mooncake", mooncake_protocol="rdma", nic="mlx5_0")
    mooncake.check_device(config, ["mlx5_0", "mlx5_1"])


@pytest.mark.parametrize(
    ("module", "cure"),
    [("nonesuch.engine", NEEDS["mooncake"].pip)],
)
def test_without_the_package_the_error_names_the_command(module: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        mooncake.library(module)


def test_without_its_system_library_the_error_names_that_command() -> None:
    error = ImportError("libibverbs.so.1: cannot open shared object file")
    assert mooncake.cure(error) == NEEDS["mooncake"].system
