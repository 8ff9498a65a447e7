"""Which processes make the cluster that was asked for, where each stands and how it is set.

Pure: an instance gets a loopback address of its own (127.0.0.2, 127.0.0.3, ...), so that the
well-known ports need no change; the router has 127.0.0.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pdrt.config import PortsSection, Role
from pdrt.errors import ConfigError

ROUTER_HOST: Final = "127.0.0.1"
_MOST_PARTS: Final = 200
_MOST_OF_MEMORY: Final = 0.4  # of the machine, for the KV pools of all workers together
_USUAL_POOL: Final = 1 << 30  # bytes; pools are touched at the start, so more takes longer

Value: TypeAlias = "str | int | float | bool | list[int]"
Tables: TypeAlias = dict[str, dict[str, Value]]
FreePort: TypeAlias = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to share."""

    cores: int
    memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """An instance's workers."""

    tp: int = 1
    dp: int = 1
    cp: int = 1

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("cp", self.cp), ("dp", self.dp))
        return ", ".join(f"{name} {size}" for name, size in sizes if size > 1)

    @property
    def workers(self) -> int:
        return self.tp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asked for; "" and 0 leave a setting to its default."""

    prefill: int = 1
    decode: int = 1
    hybrid: int = 0
    prefill_tp: int = 1
    prefill_cp: int = 1
    decode_tp: int = 1
    decode_dp: int = 1
    hybrid_dp: int = 1
    model: str = "demo"
    name: str = ""
    dtype: str = ""
    transport: str = ""
    weights: int = 0  # bytes of the model
    kv_memory: float = 0  # as in [scheduler]

    def check(self) -> None:
        """Raises ConfigError for a cluster that cannot serve."""
        if not self.prefill and not self.decode and not self.hybrid:
            raise ConfigError("nothing to start: give --prefill and --decode, or --hybrid")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode}: they come together;"
                " at least one of each, or only --hybrid"
            )
        sizes = self.prefill_tp, self.prefill_cp, self.decode_tp, self.decode_dp
        if not self.prefill and max(sizes) > 1:
            raise ConfigError(
                "--prefill-tp, --prefill-cp, --decode-tp and --decode-dp are not for --hybrid"
            )
        if self.prefill_tp % self.decode_tp and self.decode_tp % self.prefill_tp:
            raise ConfigError(
                f"--prefill-tp {self.prefill_tp} --decode-tp {self.decode_tp}:"
                " one must divide the other"
            )
        if self.prefill + self.decode + self.hybrid > _MOST_PARTS:
            raise ConfigError(f"more than {_MOST_PARTS} instances on one machine")

    @property
    def workers(self) -> int:
        decode = self.decode * self.decode_dp * self.decode_tp
        hybrid = self.hybrid * self.hybrid_dp
        return self.prefill * self.prefill_tp * self.prefill_cp + decode + hybrid

    @property
    def copies(self) -> int:
        """Of the model: the workers of a tensor-parallel group share one."""
        hybrid = self.hybrid * self.hybrid_dp
        return self.prefill * self.prefill_cp + self.decode * self.decode_dp + hybrid

    def shape(self, role: Role) -> Shape:
        """Of an instance."""
        match role:
            case "prefill":
                return Shape(self.prefill_tp, cp=self.prefill_cp)
            case "decode":
                return Shape(self.decode_tp, self.decode_dp)
            case "hybrid":
                return Shape(dp=self.hybrid_dp)


@dataclass(frozen=True, slots=True)
class Part:
    """One process to start: a node or the router."""

    name: str  # "prefill 0", "router"
    role: Role | Literal["router"]
    host: str
    port: int  # of its HTTP API
    shape: Shape
    tables: Tables
    targets: tuple[tuple[Role, str, str], ...] = ()  # router: (role, http, bootstrap)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def workers(self) -> int:
        return self.shape.workers

    @property
    def ports(self) -> tuple[int, ...]:
        """What it will bind, to be found free beforehand."""
        ports = self.tables["ports"]
        return (self.port, *(int(str(ports[n])) for n in ("bootstrap", "admin") if n in ports))

    def arguments(self, conf: Path) -> list[str]:
        """What stands behind `python -m pdrt`."""
        if self.role == "router":
            return ["router", "--conf", str(conf)]
        return ["node", "--role", self.role, "--conf", str(conf)]

    def toml(self) -> str:
        return to_toml(self.tables, self.targets)


def lay_out(
    wanted: Wanted, ports: PortsSection, key_file: Path, machine: Machine, free_port: FreePort
) -> list[Part]:
    """The nodes and, last, the router. Ports set to 0 are chosen by `free_port(host)`."""
    wanted.check()
    _check_memory(wanted, machine)
    nodes = list(_nodes(wanted, ports, key_file, machine, free_port))
    port = ports.router or free_port(ROUTER_HOST)
    router = Part(
        "router",
        "router",
        ROUTER_HOST,
        port,
        Shape(),
        {
            "security": {"key_file": str(key_file)},
            "ports": {"router": port, "admin": ports.admin or free_port(ROUTER_HOST)},
            "log": {"format": "json"},
        },
        tuple((n.role, n.url, _bootstrap(n)) for n in nodes if n.role != "router"),
    )
    return [*nodes, router]


def _nodes(
    wanted: Wanted, ports: PortsSection, key_file: Path, machine: Machine, free_port: FreePort
) -> Iterator[Part]:
    at = 1
    counts: tuple[tuple[Role, int], ...] = (
        ("prefill", wanted.prefill),
        ("decode", wanted.decode),
        ("hybrid", wanted.hybrid),
    )
    for role, count in counts:
        shape = wanted.shape(role)
        for number in range(count):
            at += 1
            host = f"127.0.0.{at}"
            port = {"prefill": ports.prefill, "decode": ports.decode, "hybrid": ports.hybrid}[role]
            port = port or free_port(host)
            tables = _node_tables(wanted, shape, machine, key_file)
            tables["parallel"]["local_ip"] = host
            tables["ports"] = {role: port}
            if role == "prefill":
                tables["ports"]["bootstrap"] = ports.bootstrap or free_port(host)
            yield Part(f"{role} {number}", role, host, port, shape, tables)


def _node_tables(wanted: Wanted, shape: Shape, machine: Machine, key_file: Path) -> Tables:
    tables: Tables = {
        "model": {"path": wanted.model},
        "device": {"threads": max(1, machine.cores // wanted.workers)},
        "parallel": {
            "world_size": shape.workers,
            "tp": shape.tp,
            "cp": shape.cp,
            "dp": shape.dp,
            "devices_per_node": shape.workers,
        },
        "scheduler": {"kv_memory": wanted.kv_memory or _pool_bytes(wanted, shape, machine)},
        "security": {"key_file": str(key_file)},
        "log": {"format": "json"},
    }
    if wanted.name:
        tables["model"]["name"] = wanted.name
    if wanted.dtype:
        tables["model"]["dtype"] = wanted.dtype
    if wanted.transport:
        tables["transfer"] = {"transport": wanted.transport}
    return tables


def _check_memory(wanted: Wanted, machine: Machine) -> None:
    """Raises ConfigError for pools that the machine would run out of memory over."""
    asked = wanted.kv_memory
    pool = asked * machine.memory if asked <= 1 else asked
    need = wanted.workers * pool + wanted.copies * wanted.weights
    if asked and need > machine.memory:
        raise ConfigError(
            f"[scheduler] kv_memory = {asked:g}: {wanted.workers} worker(s) would take"
            f" {need / 1e9:.1f} GB, and this machine has {machine.memory / 1e9:.1f} GB;"
            " lower it, or start fewer instances"
        )


def _pool_bytes(wanted: Wanted, shape: Shape, machine: Machine) -> int:
    """As much as the weights take, at least a gibibyte, and no more than a fair share.

    Each rank of a tensor-parallel group has a part of every block: together they have one pool.
    """
    share = int(_MOST_OF_MEMORY * machine.memory) // wanted.copies
    return min(max(_USUAL_POOL, wanted.weights), share) // shape.tp


def _bootstrap(node: Part) -> str:
    return f"{node.host}:{node.tables['ports']['bootstrap']}" if node.role == "prefill" else ""


def child_environment(part: Part, environ: Mapping[str, str]) -> dict[str, str]:
    """What a child inherits: PDRT_<TABLE>_<KEY> holds for it too, but not over what is written."""
    written = {f"PDRT_{t}_{key}".upper() for t, table in part.tables.items() for key in table}
    gone = written | {"PDRT_SECURITY_KEY"}
    kept = {name: value for name, value in environ.items() if name not in gone}
    return {name: value for name, value in kept.items() if not name.startswith("PDRT_PORTS_")}


def to_toml(tables: Tables, targets: tuple[tuple[Role, str, str], ...] = ()) -> str:
    """The config file's text. A JSON string, number or bool is a TOML one too."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in table.items()), ""]
    for role, http, bootstrap in targets:
        lines += [f"[[{role}]]", f"http = {json.dumps(http)}"]
        lines += [f"bootstrap = {json.dumps(bootstrap)}"] if bootstrap else []
        lines.append("")
    return "\n".join(lines)
