"""On what a figure was measured: cores, kernel, versions. Without it a figure says little."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final, TypeAlias

from pdrt import __version__

Facts: TypeAlias = dict[str, str | int | float]
_PACKAGES: Final = (
    "numpy",
    "pyzmq",
    "uvloop",
    "nixl-cu12",
    "nixl-cu13",
    "mooncake-transfer-engine-non-cuda",
    "memfabric-hybrid",
)


def machine_facts() -> Facts:
    facts: Facts = {
        "pdrt": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
    }
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
