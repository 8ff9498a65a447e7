"""What each transport needs of this host, and what of it is here; nothing is loaded for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pdrt.config import TransferSection, TransportName
from pdrt.errors import ConfigError

ORDER: Final[tuple[TransportName, ...]] = ("shm", "tcp", "nixl", "mooncake", "memfabric")


@dataclass(frozen=True, slots=True)
class Needs:
    """One of `modules`, which one of `packages` brings; `devices`: where their names stand.

    Here alone stands which command installs it, whoever tells of it.
    """

    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    pip: str = ""  # the command that installs it
    system: str = ""  # and the one for libraries of the system that it needs
    devices: str = ""
    pattern: str = "*"
    needs_device: bool = False
    unverified: str = ""  # what was never tried on real hardware

    @property
    def install(self) -> str:
        return "; ".join(each for each in (self.pip, self.system) if each)


NEEDS: Final[Mapping[TransportName, Needs]] = MappingProxyType(
    {
        "shm": Needs(),
        "tcp": Needs(),
        "nixl": Needs(
            modules=("nixl_cu12", "nixl_cu13", "nixl"),
            packages=("nixl-cu12", "nixl-cu13", "nixl"),
            pip="pip install nixl-cu12==1.5.1",
            devices="/sys/class/infiniband",
            unverified="RDMA and GPU memory",
        ),
        "mooncake": Needs(
            modules=("mooncake",),
            packages=(
                "mooncake-transfer-engine-non-cuda",
                "mooncake-transfer-engine",
                "mooncake-transfer-engine-cuda13",
            ),
            pip="pip install mooncake-transfer-engine-non-cuda==0.3.13.post1",
            system="apt-get install libibverbs1 libnuma1",
            devices="/sys/class/infiniband",
            unverified="RDMA and GPU memory",
        ),
        "memfabric": Needs(
            modules=("memfabric_hybrid",),
            packages=("memfabric-hybrid",),
            pip="pip install memfabric-hybrid==1.3.0",
            devices="/dev",
            pattern="davinci[0-9]*",
            needs_device=True,
            unverified="everything",
        ),
    }
)


def wanted(config: TransferSection) -> tuple[TransportName, ...]:
    """What a config wants opened, best first."""
    return ("shm", *config.network) if config.transport == "auto" else (config.transport,)


def package(name: TransportName) -> str | None:
    """The installed package and its version; empty when none is needed, None when missing."""
    needs = NEEDS[name]
    here = [module for module in needs.modules if find_spec(module) is not None]
    if not here:
        return None if needs.modules else ""
    for each in needs.packages:
        try:
            return f"{each} {version(each)}"
        except PackageNotFoundError:
            continue
    return here[0]  # built by its user


def check_installed(
    config: TransferSection, found: Callable[[TransportName], str | None] = package
) -> None:
    """Before a model is loaded. Raises ConfigError that says what to install."""
    for name in wanted(config):
        if found(name) is None:
            install = NEEDS[name].install
            raise ConfigError(f"[transfer] transport {name} is not installed: {install}")


def devices(name: TransportName) -> list[str]:
    """The NICs or NPUs that it could use."""
    needs = NEEDS[name]
    return (
        sorted(each.name for each in Path(needs.devices).glob(needs.pattern))
        if needs.devices
        else []
    )
