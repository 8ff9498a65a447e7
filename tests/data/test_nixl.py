"""NIXL: what goes wrong in each of its calls, and what is refused before it starts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np
import pytest

from pdrt.config import TransferSection
from pdrt.data.installed import NEEDS
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import EngineError
from pdrt.data.transport.nixl import NixlEngine, devices, open_nixl
from pdrt.data.transport.nixl_agent import BoundAgent, Descriptors, Disconnected
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import ConfigError, TransferFailed
from tests.data.mortal import mortal
from tests.data.transports import LAYOUT, LOCAL

real = pytest.mark.skipif(not find_spec("nixl_cu12"), reason="needs nixl_cu12")
SLOT = bytes(range(64))
Script: TypeAlias = list[EngineError | None]


@dataclass
class FakeAgent:
    """`script`: what a call does the next time, by its name: raise, or (polls) not be done yet."""

    script: dict[str, Script] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    there: list[int] = field(default_factory=list)  # what was written to, first address of each

    def _do(self, call: str) -> bool:
        self.calls.append(call)
        if not self.script.get(call):
            return True
        if error := self.script[call].pop(0):
            raise error
        return False

    def register(self, address: int, size: int) -> None:
        self._do("register")

    def metadata(self) -> bytes:
        return b"fake"

    def load(self, metadata: bytes) -> str:
        self._do("load")
        return metadata.decode()

    def forget(self, name: str) -> None:
        self._do(f"forget {name}")

    def prepare(self, here: Descriptors, there: Descriptors, name: str) -> int:
        self._do("prepare")
        self.there.append(int(there[0, 0]))
        return len(self.there)

    def post(self, handle: int) -> bool:
        return self._do("post")

    def is_done(self, handle: int) -> bool:
        return self._do("is_done")

    def release(self, handle: int) -> None:
        self._do("release")

    def close(self) -> None:
        self._do("close")


@dataclass
class Rig:
    agent: FakeAgent
    transport: EngineTransport
    memory: PoolMemory
    ends: AsyncIterator[Ended]

    def peer(self, name: str = "a") -> Peer:
        return Peer(name, this_process(), self.memory.region(self.transport.offers))

    def write(self, number: int, peer: str = "a") -> None:
        at = self.memory.pool_at
        self.transport.start(Write(number, peer, np.array([[at, at, 100]]), SlotWrite(0, SLOT)))

    async def end_of(self, number: int, peer: str = "a") -> Ended:
        self.write(number, peer)
        return await anext(self.ends)


async def rig(**script: Script) -> Rig:
    agent, memory = FakeAgent(dict(script)), PoolMemory(LAYOUT, 2, 1)
    transport = EngineTransport(memory, NixlEngine(agent))
    made = Rig(agent, transport, memory, transport.ends())
    await made.transport.attach(made.peer())
    return made


async def test_blocks_and_slot_are_two_transfers_and_each_is_released() -> None:
    r = await rig(post=[None], is_done=[None, None])
    assert await r.end_of(1) == Ended(1)
    one = ["prepare", "post"]
    assert r.agent.calls[3:] == [*one, "is_done", "is_done", "is_done", "release", *one, "release"]
    await r.transport.close()
    assert r.agent.calls[-2:] == ["forget fake", "close"]


LOST = Disconnected("NIXL_ERR_REMOTE_DISCONNECT")


@pytest.mark.parametrize("call", ["post", "is_done"])
async def test_a_lost_connection_proves_nothing_and_the_peer_is_loaded_anew(call: str) -> None:
    """CASES 26: one failed write; the next one goes. CASES 50: what had left may land later."""
    script: dict[str, Script] = {"post": [None], call: [LOST]}
    r = await rig(**script)
    r.write(1)
    assert await r.end_of(2) == Ended(2)  # and 1 has not ended
    assert r.agent.there[0] == r.memory.address + r.memory.pool_at
    begun = r.agent.calls.index("release")
    assert r.agent.calls[begun + 1 : begun + 3] == ["forget fake", "load"]
    assert await r.end_of(3) == Ended(3)
    assert r.agent.calls.count("load") == 2
    r.transport.detach("a")
    await r.transport.close()
    assert [end async for end in r.ends] == []


@pytest.mark.e2e
async def test_a_lost_write_ends_with_its_peer() -> None:
    r = await rig(post=[LOST])
    region = r.memory.region({"nixl": r.transport.offers["nixl"].replace(b"fake", b"them")})
    async with mortal() as (child, process):
        await r.transport.attach(Peer("b", process, region))
        r.write(1, "b")
        assert await r.end_of(2, "b") == Ended(2)
        child.kill()
        assert await anext(r.ends) == Ended(
            1,
            "nixl: NIXL_ERR_REMOTE_DISCONNECT (0 of 164 bytes were written)",  # CASES 19
        )
    await r.transport.close()


async def test_a_peer_that_cannot_be_loaded_anew_is_tried_again_with_the_next_write() -> None:
    r = await rig(post=[LOST], load=[])
    r.agent.script["load"] = [EngineError("NIXL_ERR_BACKEND")]
    r.write(1)
    assert await r.end_of(2) == Ended(2, "nixl: NIXL_ERR_BACKEND (0 of 164 bytes were written)")
    assert await r.end_of(3) == Ended(3)
    await r.transport.close()


def test_a_peer_is_not_loaded_anew_under_a_write_of_another_session() -> None:
    agent = FakeAgent()
    engine = NixlEngine(agent)
    pair = engine.connect(b"them", 0).pair
    assert engine.enter(pair)
    assert engine.enter(pair)
    engine.leave(pair, is_lost=True)
    assert not engine.enter(pair)
    engine.leave(pair, is_lost=False)
    assert agent.calls == ["load"]
    assert engine.enter(pair)
    assert agent.calls == ["load", "forget them", "load"]


@pytest.mark.parametrize("call", ["post", "is_done"])
async def test_a_write_that_failed_half_ends_when_a_later_one_proves_it_over(call: str) -> None:
    """What was posted before the error goes on: NIXL flushes it with the next write."""
    failed = EngineError("NIXL_ERR_BACKEND")
    script: dict[str, Script] = {"post": [None], call: [failed, failed, failed]}
    r = await rig(**script)
    end = await r.end_of(1)
    assert end.error is not None
    assert "NIXL_ERR_BACKEND" in end.error
    first, *barriers = r.agent.there
    assert first == r.memory.address + r.memory.pool_at
    assert set(barriers) == {r.memory.address + r.memory.probe_at}
    assert len(barriers) == (3 if call == "post" else 1)
    await r.transport.close()


async def test_a_failed_write_whose_connection_is_then_lost_is_proven_by_nothing() -> None:
    r = await rig(post=[EngineError("NIXL_ERR_BACKEND"), LOST])
    r.write(1)
    assert await r.end_of(2) == Ended(2)
    await r.transport.close()
    assert [end async for end in r.ends] == []


async def test_what_cannot_be_prepared_has_not_begun() -> None:
    r = await rig(prepare=[EngineError("NIXL_ERR_NOT_FOUND")])
    end = await r.end_of(1)
    assert end.error == "nixl: NIXL_ERR_NOT_FOUND (0 of 164 bytes were written)"
    assert r.agent.there == []
    await r.transport.close()


async def test_a_failed_slot_is_a_failed_write() -> None:
    """CASES 10: blocks without a slot are told as what they are."""
    r = await rig(prepare=[None, EngineError("NIXL_ERR_NOT_FOUND")])
    end = await r.end_of(1)
    assert end.error == "nixl: NIXL_ERR_NOT_FOUND (100 of 164 bytes were written)"
    await r.transport.close()


async def test_a_handle_that_cannot_be_released_harms_nothing() -> None:
    r = await rig(release=[EngineError("NIXL_ERR_REPOST_ACTIVE")] * 2)
    assert await r.end_of(1) == Ended(1)
    await r.transport.close()


def test_two_sessions_of_one_peer_share_its_connection() -> None:
    """Loading an agent again under a write would make that write look lost, and so would an end."""
    agent = FakeAgent()
    engine = NixlEngine(agent)
    one, other = engine.connect(b"them", 0), engine.connect(b"them", 0)
    one.close()
    assert agent.calls == ["load"]
    other.close()
    assert agent.calls == ["load", "forget them"]
    engine.connect(b"them", 0).close()
    assert agent.calls[2:] == ["load", "forget them"]


async def test_an_agent_that_cannot_be_loaded_is_not_attached() -> None:
    r = await rig()
    r.agent.script["load"] = [EngineError("NIXL_ERR_MISMATCH")]
    offer = r.transport.offers["nixl"].replace(b"fake", b"junk")
    region = r.memory.region({"nixl": offer})
    with pytest.raises(TransferFailed, match="does not reach b: NIXL_ERR_MISMATCH"):
        await r.transport.attach(Peer("b", this_process(), region))
    await r.transport.close()


async def test_memory_that_cannot_be_registered_is_a_config_error() -> None:
    agent = FakeAgent({"register": [EngineError("NIXL_ERR_BACKEND")]})
    with pytest.raises(ConfigError, match="cannot register"):
        EngineTransport(PoolMemory(LAYOUT, 2, 1), NixlEngine(agent))


@real
@pytest.mark.parametrize(
    ("nic", "said"),
    [("nonesuch0", "there is no nonesuch0"), ("lo,nonesuch0:1", "there is no nonesuch0")],
)
async def test_a_device_that_is_not_there_fails_at_the_start(nic: str, said: str) -> None:
    """CASES 105: UCX alone would warn of it and hang, or take another."""
    with pytest.raises(ConfigError, match=said) as caught:
        open_nixl(TransferSection(transport="nixl", nic=nic), PoolMemory(LAYOUT, 2, 1), LOCAL)
    assert all(device in str(caught.value) for device in ("[transfer] nic", *devices()))


@real
async def test_a_device_that_ucx_cannot_use_fails_at_the_start() -> None:
    """CASES 105: a name that is not checked by us is refused by UCX."""
    config = TransferSection(transport="nixl", nic="nonesuch?")
    with pytest.raises(ConfigError, match=r"nic = 'nonesuch\?' cannot be used by nixl"):
        open_nixl(config, PoolMemory(LAYOUT, 2, 1), LOCAL)


@real
async def test_a_device_is_used_for_this_agent_and_no_other_is_changed_by_it() -> None:
    chosen, free = (
        open_nixl(TransferSection(transport="nixl", nic=nic), PoolMemory(LAYOUT, 2, 1), LOCAL)
        for nic in ("lo", "")
    )
    # an agent's description lists its devices
    assert len(chosen.offers["nixl"]) <= len(free.offers["nixl"])
    await chosen.close()
    await free.close()


@real
async def test_a_back_end_that_is_not_there_fails_at_the_start() -> None:
    config = TransferSection(nixl_backend="LIBFABRIC")
    with pytest.raises(ConfigError, match="needs libfabric"):
        open_nixl(config, PoolMemory(LAYOUT, 2, 1), LOCAL)


@real
async def test_a_device_without_effect_is_refused() -> None:
    config = TransferSection(transport="nixl", nixl_backend="LIBFABRIC", nic="lo")
    with pytest.raises(ConfigError, match="has no effect"):
        open_nixl(config, PoolMemory(LAYOUT, 2, 1), LOCAL)


@real
async def test_whatever_the_binding_raises_is_an_engine_error() -> None:
    agent = BoundAgent(import_module("nixl_cu12._bindings"), "UCX")
    none = np.zeros((1, 3), dtype=np.uint64)
    calls: list[Callable[[], object]] = [
        lambda: agent.load(b"junk"),
        lambda: agent.prepare(none, none, "nobody"),
        lambda: agent.register(-1, 5),
    ]
    for call in calls:
        with pytest.raises(EngineError):
            call()
    with pytest.raises(Disconnected):  # it has forgotten whom it knew
        agent.prepare(none, none, "nobody")
    agent.close()


async def test_without_the_package_the_error_names_the_command() -> None:
    with pytest.raises(ConfigError, match=NEEDS["nixl"].install):
        open_nixl(TransferSection(), PoolMemory(LAYOUT, 2, 1), LOCAL, bindings=("nonesuch_cu99",))


@real
@pytest.mark.e2e
async def test_a_process_that_has_used_it_exits_in_peace() -> None:
    """Two copies of a network library, the system's and NIXL's, crashed there."""
    program = (
        "import asyncio; from tests.data.transports import MAKERS, pool\n"
        "async def main(): MAKERS['nixl'].make(pool())\n"
        "asyncio.run(main())"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await child.wait() == 0
