"""MemFabric behind the transport protocol, with a stand-in whose calls are those of the package."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdrt.config import TransferSection
from pdrt.data.layout import NO_RUNS
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.memfabric import TRIES, Store, open_memfabric
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import ConfigError, TransferFailed
from tests.data.memfabric import Engine, StandIn
from tests.data.transports import LAYOUT, LOCAL

URL = "tcp://127.0.0.1:18801"
HERE = Path(__file__)  # as if it were the driver


def opened(library: StandIn, store: Store, ip: str = LOCAL, nic: str = "") -> EngineTransport:
    return open_memfabric(
        TransferSection(network=("memfabric", "nixl"), nic=nic),
        PoolMemory(LAYOUT, 2, 1),
        ip,
        store,
        library,
    )


def store(is_creator: bool = False, driver: Path = HERE, naps: list[float] | None = None) -> Store:
    naps = [] if naps is None else naps
    return Store(URL, is_creator, "prefill", 0, naps.append, driver)


@pytest.mark.skipif(not find_spec("memfabric_hybrid"), reason="needs memfabric_hybrid")
@pytest.mark.parametrize(
    "name",
    [name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if name[0] != "_"],
)
def test_the_stand_in_has_the_calls_of_the_package(name: str) -> None:
    engine = import_module("memfabric_hybrid").TransferEngine
    said = getattr(engine, name).__doc__.splitlines()[0]
    real = re.findall(r"(\w+): [\w.]", said.partition(") ->")[0])
    assert real[: len(_names(getattr(Engine, name)))] == _names(getattr(Engine, name))


def _names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


async def test_only_the_creator_makes_the_store() -> None:
    first, second = StandIn(), StandIn()
    for library, is_creator in ((first, True), (second, False)):
        await opened(library, store(is_creator)).close()
    assert (first.stores, second.stores) == ([URL], [])


async def test_each_side_says_its_role() -> None:
    library = StandIn()
    for role in ("prefill", "decode", "hybrid"):
        await opened(library, Store(URL, False, role)).close()
    assert library.roles == ["Prefill", "Decode", "Prefill"]


async def test_a_store_that_is_made_later_is_waited_for() -> None:
    naps = list[float]()
    library = StandIn({"initialize": [-1, -1, -1]})
    await opened(library, store(naps=naps)).close()
    assert len(naps) == 3


async def test_a_store_that_never_comes_is_an_error_that_names_it() -> None:
    naps = list[float]()
    library = StandIn({"initialize": [-1] * 100})
    with pytest.raises(ConfigError, match=re.escape(URL)):
        opened(library, store(naps=naps))
    assert len(naps) == TRIES - 1


async def test_without_a_driver_the_error_says_so_at_once(tmp_path: Path) -> None:
    naps = list[float]()
    library = StandIn({"initialize": [-1] * 100})
    with pytest.raises(ConfigError, match="needs an Ascend NPU and its driver"):
        opened(library, store(driver=tmp_path / "none", naps=naps))
    assert naps == []


@pytest.mark.parametrize(
    ("call", "said"),
    [("create_config_store", "cannot make its store"), ("register_memory", "cannot register")],
)
async def test_what_fails_at_the_start_is_a_config_error(call: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(StandIn({call: [-1]}), store(is_creator=True))


async def test_only_ipv4_addresses_are_taken() -> None:
    with pytest.raises(ConfigError, match=r"local_ip = '::1'"):
        opened(StandIn(), store(), "::1")


async def test_a_device_that_would_have_no_effect_is_refused() -> None:
    """CASES 105: no setting is ignored in silence."""
    with pytest.raises(ConfigError, match=r"nic = 'npu0' has no effect"):
        opened(StandIn(), store(), nic="npu0")


async def test_a_refused_write_ends_with_its_status_and_the_next_one_lands() -> None:
    """CASES 19, 26: the error says what was done; only that request fails."""
    library = StandIn({"batch_transfer_sync_write": [-7]})
    transport = opened(library, store())
    memory = PoolMemory(LAYOUT, 2, 1)
    target = open_memfabric(TransferSection(), memory, LOCAL, store(), StandIn())
    await transport.attach(Peer("a", this_process(), memory.region(target.offers)))
    for number in (1, 2):
        transport.start(Write(number, "a", NO_RUNS, SlotWrite(0, bytes(range(64)))))
    ends = transport.ends()
    assert await anext(ends) == Ended(1, "memfabric: status -7 (0 of 64 bytes were written)")
    assert await anext(ends) == Ended(2)
    assert bytes(memory.slots_view) == bytes(range(64))
    await transport.close()
    await target.close()
    assert library.calls[-1] == "destroy"


async def test_a_session_that_is_none_cannot_be_attached() -> None:
    transport = opened(StandIn(), store())
    offer = transport.offers["memfabric"].replace(LOCAL.encode(), b"localhost")
    memory = PoolMemory(LAYOUT, 2, 1)
    with pytest.raises(TransferFailed):
        await transport.attach(Peer("a", this_process(), memory.region({"memfabric": offer})))
    await transport.close()
