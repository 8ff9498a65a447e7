"""Instances of several nodes, for end-to-end tests: each node a supervisor at its own address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.cluster import (
    NULL,
    NULL_ROUTER,
    PORTS,
    Cluster,
    Process,
    Tables,
    fresh_ip,
    merged,
    target,
    toml,
)


@dataclass(frozen=True, slots=True)
class Spread:
    """An instance whose ranks are on so many nodes."""

    role: str
    nodes: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1

    def parallel(self, ips: Sequence[str]) -> dict[str, Any]:
        world = self.tp * self.cp * self.dp
        sizes = {"world_size": world, "tp": self.tp, "cp": self.cp, "dp": self.dp}
        return {**sizes, "devices_per_node": world // self.nodes, "ips": list(ips)}


def make(
    folder: Path, instances: Mapping[str, Spread], *tables: Tables, router: Tables | None = None
) -> Cluster:
    """Nodes are called as their instance, and 0 (the leader), 1, ..."""
    cluster, targets = Cluster(folder, startup_s=90.0), []
    for name, spread in instances.items():
        ips = [fresh_ip() for _ in range(spread.nodes)]
        for index, ip in enumerate(ips):
            conf = folder / f"{name}{index}.toml"
            parallel = {"parallel": {**spread.parallel(ips), "local_ip": ip}}
            conf.write_text(toml(merged(NULL, parallel, *tables)))
            cluster.nodes[f"{name}{index}"] = Process(
                f"{name}{index}",
                ["node", "--role", spread.role, "--conf", str(conf), "--node-index", str(index)],
                folder / f"{name}{index}.log",
                f"http://{ip}:{PORTS[spread.role]}",
            )
        targets.append(target(spread.role, ips[0]))
    ip, conf = fresh_ip(), folder / "router.toml"
    head = f'local_ip = "{ip}"\n' + "\n".join(targets) + "\n"
    conf.write_text(head + toml(merged(NULL_ROUTER, router or {})))
    cluster.router = Process(
        "router", ["router", "--conf", str(conf)], folder / "router.log", f"http://{ip}:8000"
    )
    return cluster


def strike(cluster: Cluster, name: str, how: signal.Signals, pids: list[int]) -> float:
    """A node, with those of its workers; when that was."""
    cluster.nodes[name].kill(how)
    for pid in pids:
        os.kill(pid, how)
    return time.monotonic()
