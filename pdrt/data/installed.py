"""What each transport needs of this host, and what of it is here; nothing is loaded for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pdrt.config import TransportName

ORDER: Final[tuple[TransportName, ...]] = ("shm", "tcp", "nixl", "mooncake", "memfabric")


@dataclass(frozen=True, slots=True)
class Needs:
    """`packages`: one of them; `devices`: where their names stand."""

    packages: tuple[str, ...] = ()
    install: str = ""
    devices: str = ""
    pattern: str = "*"
    needs_device: bool = False
    unverified: str = ""  # what was never tried on real hardware


NEEDS: Final[Mapping[TransportName, Needs]] = MappingProxyType(
    {
        "shm": Needs(),
        "tcp": Needs(),
        "nixl": Needs(
            packages=("nixl-cu12", "nixl-cu13"),
            install="pip install nixl-cu12==1.5.1",
            devices="/sys/class/infiniband",
            unverified="RDMA and GPU memory",
        ),
        "mooncake": Needs(
            packages=(
                "mooncake-transfer-engine-non-cuda",
                "mooncake-transfer-engine",
                "mooncake-transfer-engine-cuda13",
            ),
            install="pip install mooncake-transfer-engine-non-cuda==0.3.13.post1;"
            " apt-get install libibverbs1 libnuma1",
            devices="/sys/class/infiniband",
            unverified="RDMA and GPU memory",
        ),
        "memfabric": Needs(
            packages=("memfabric-hybrid",),
            install="pip install memfabric-hybrid==1.3.0",
            devices="/dev",
            pattern="davinci[0-9]*",
            needs_device=True,
            unverified="everything",
        ),
    }
)


def package(name: TransportName) -> str | None:
    """The installed package and its version; empty when none is needed, None when missing."""
    wanted = NEEDS[name].packages
    for each in wanted:
        try:
            return f"{each} {version(each)}"
        except PackageNotFoundError:
            continue
    return None if wanted else ""


def devices(name: TransportName) -> list[str]:
    """The NICs or NPUs that it could use."""
    needs = NEEDS[name]
    return (
        sorted(each.name for each in Path(needs.devices).glob(needs.pattern))
        if needs.devices
        else []
    )
