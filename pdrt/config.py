"""All settings: TOML files, overridden by PDRT_<TABLE>_<KEY>, checked before anything starts.

Unknown keys, wrong types, contradictions and impossible topologies are ConfigErrors that
name file, key, value and what is allowed. This is the only module that reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey

Role = Literal["prefill", "decode", "hybrid"]
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Duration = Annotated[float, Field(gt=0, le=86400)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """`path` is a Hugging Face directory, `demo` for the demo model, or `null` for no model."""

    path: str = "demo"
    name: str = ""  # what clients call it; empty: the directory's name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: Annotated[int, Field(ge=0)] = 0  # 0: the model's own limit


class DeviceSection(Section):
    kind: Literal["auto", "cpu", "cuda", "npu", "null"] = "auto"
    threads: Annotated[int, Field(ge=0)] = 0  # 0: an equal share of the cores for each worker
    step_ms: Annotated[float, Field(ge=0)] = 0.0  # null device: how long a step takes
    token_ms: Annotated[float, Field(ge=0)] = 0.0  # null device: and each prompt token in it


class ParallelSection(Section):
    world_size: Positive = 1
    tp: Positive = 1
    cp: Positive = 1
    dp: Positive = 1
    devices_per_node: Positive = 1
    ips: tuple[str, ...] = ()  # all nodes of the role, in order; empty: this node alone
    local_ip: str = "127.0.0.1"

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.tp * self.cp * self.dp != self.world_size:
            raise ValueError(
                f"tp x cp x dp = {self.tp} x {self.cp} x {self.dp} = {self.tp * self.cp * self.dp}"
                f" must equal world_size = {self.world_size}"
            )
        if self.world_size % self.devices_per_node:
            raise ValueError(
                f"devices_per_node = {self.devices_per_node} must divide world_size = {self.world_size}"
            )
        if self.ips and len(self.ips) % self.nodes_per_instance:
            raise ValueError(
                f"{len(self.ips)} ips do not make whole instances of {self.nodes_per_instance} nodes"
            )
        return self

    @property
    def nodes_per_instance(self) -> int:
        return self.world_size // self.devices_per_node


class SchedulerSection(Section):
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    kv_memory: Annotated[float, Field(gt=0)] = 0.1  # <= 1: fraction of the device's memory; else bytes
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 512  # chunk size
    num_reserved_decode_tokens: Annotated[int, Field(ge=1)] = 64
    max_waiting: Positive = 1024  # beyond: 429
    prefix_cache: Literal[False] = False
    retraction: Literal["reprefill", "local"] = "reprefill"


class FaultSection(Section):
    """Faults to rehearse, each with its probability per write. Seconds are upper bounds."""

    delay_s: Annotated[float, Field(ge=0)] = 0.0
    delay: Annotated[float, Field(ge=0, le=1)] = 0.0
    drop: Annotated[float, Field(ge=0, le=1)] = 0.0
    duplicate: Annotated[float, Field(ge=0, le=1)] = 0.0
    reorder: Annotated[float, Field(ge=0, le=1)] = 0.0
    truncate: Annotated[float, Field(ge=0, le=1)] = 0.0
    corrupt: Annotated[float, Field(ge=0, le=1)] = 0.0
    stall: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int = 0


class TransferSection(Section):
    transport: Literal["auto", "shm"] = "auto"
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    chunked: bool = True  # blocks leave while the next chunk computes
    slots: Annotated[int, Field(ge=1, le=65536)] = 512
    faults: FaultSection | None = None


class TimeoutsSection(Section):
    request_s: Duration = 600.0
    startup_s: Duration = 300.0
    heartbeat_s: Duration = 1.0
    heartbeat_timeout_s: Duration = 0.45
    lease_s: Duration = 10.0
    rebind_grace_s: Duration = 1.0
    drain_s: Duration = 30.0
    quarantine_grace_s: Duration = 30.0
    connect_s: Duration = 2.0


class SecuritySection(Section):
    key_file: str = ""
    key: Annotated[str, Field(repr=False)] = ""  # better from PDRT_SECURITY_KEY than from a file
    api_keys: Annotated[tuple[str, ...], Field(repr=False)] = ()  # clients, at the router
    max_body_bytes: Positive = 8 << 20
    max_rooms_per_peer: Positive = 4096

    def cluster_key(self) -> ClusterKey | None:
        """The key, or None when none is configured. Raises ConfigError when unreadable."""
        text = self.key
        try:
            if not text and self.key_file:
                text = Path(self.key_file).expanduser().read_text()
            return ClusterKey.from_text(text) if text else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"[security] key_file = {self.key_file!r}: {error}") from error


class PortsSection(Section):
    router: Port = 8000
    prefill: Port = 8001
    decode: Port = 8100
    hybrid: Port = 8200
    bootstrap: Port = 18800


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    step_every_s: Annotated[float, Field(ge=0)] = 1.0  # a status line at most this often while busy


class NodeConfig(Section):
    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    parallel: ParallelSection = ParallelSection()
    scheduler: SchedulerSection = SchedulerSection()
    transfer: TransferSection = TransferSection()
    timeouts: TimeoutsSection = TimeoutsSection()
    security: SecuritySection = SecuritySection()
    ports: PortsSection = PortsSection()
    log: LogSection = LogSection()


class Target(Section):
    """A leader: `http` is its API address, `bootstrap` (prefill) its bootstrap server's."""

    http: str
    bootstrap: str = ""


class PolicySection(Section):
    prefill: Literal["round_robin", "least_loaded"] = "least_loaded"
    decode: Literal["round_robin", "least_loaded"] = "least_loaded"
    canary: bool = True  # ready only when a pair has really served
    max_in_flight: Positive = 4096  # beyond: 429


class RouterConfig(Section):
    prefill: tuple[Target, ...] = ()
    decode: tuple[Target, ...] = ()
    hybrid: tuple[Target, ...] = ()
    local_ip: str = "127.0.0.1"
    policy: PolicySection = PolicySection()
    timeouts: TimeoutsSection = TimeoutsSection()
    security: SecuritySection = SecuritySection()
    ports: PortsSection = PortsSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("[[prefill]] and [[decode]] targets come together")
        if not self.prefill and not self.hybrid:
            raise ValueError("no targets: name [[prefill]] and [[decode]], or [[hybrid]]")
        return self


class Place(Section):
    """Where a node stands, from its index and the topology (SPEC: instances and leaders)."""

    node_index: int
    instance: int
    is_leader: bool
    leader_ip: str
    first_rank: int

    @staticmethod
    def of(parallel: ParallelSection, node_index: int) -> Place:
        """Raises ConfigError when the index is outside the topology."""
        nodes = len(parallel.ips) or 1
        if not 0 <= node_index < nodes:
            raise ConfigError(f"--node-index {node_index}: there are {nodes} nodes, 0..{nodes - 1}")
        per_instance = parallel.nodes_per_instance
        leader = node_index // per_instance * per_instance
        return Place(
            node_index=node_index,
            instance=node_index // per_instance,
            is_leader=node_index == leader,
            leader_ip=parallel.ips[leader] if parallel.ips else parallel.local_ip,
            first_rank=node_index % per_instance * parallel.devices_per_node,
        )


class DisaggConfig(Section):
    """A process's disaggregation settings, derived once at start and never typed by hand."""

    mode: Literal["NONE", "PREFILL", "DECODE"]
    bootstrap_host: str
    bootstrap_port: int
    store_url: str
    is_store_creator_node: bool
    local_ip: str

    @staticmethod
    def derive(role: Role, config: NodeConfig, place: Place) -> DisaggConfig:
        modes: dict[Role, Literal["NONE", "PREFILL", "DECODE"]] = {
            "prefill": "PREFILL",
            "decode": "DECODE",
            "hybrid": "NONE",
        }
        first = config.parallel.ips[0] if config.parallel.ips else config.parallel.local_ip
        return DisaggConfig(
            mode=modes[role],
            bootstrap_host=place.leader_ip,
            bootstrap_port=config.ports.bootstrap,
            store_url=f"tcp://{bracketed(first)}:{config.ports.bootstrap + 1}",
            is_store_creator_node=role == "prefill" and place.instance == 0 and place.is_leader,
            local_ip=config.parallel.local_ip,
        )


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where what can be made again is kept: $PDRT_CACHE, else `pdrt` in the user's cache."""
    if chosen := environ.get("PDRT_CACHE"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdrt"


def user_key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The cluster key that one user's processes on one machine share when none is named."""
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "pdrt" / "key"


def bracketed(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether an address or `localhost` stays on this machine. Names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


C = TypeVar("C", NodeConfig, RouterConfig)


def load(
    kind: type[C],
    path: Path | None,
    environ: Mapping[str, str] = os.environ,
    options: Mapping[str, Any] | None = None,
) -> C:
    """Read, override and check. Raises ConfigError for anything that cannot work.

    The environment goes over the file, `options` (tables from the command line) over both.
    """
    where = str(path) if path else "the environment"
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text()) if path else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error
    _override(kind, tables, environ)
    for name, table in (options or {}).items():
        under = tables.get(name)
        tables[name] = under | table if isinstance(under, dict) else table
    return check(kind, tables, where)


def check(kind: type[C], tables: Mapping[str, Any], where: str) -> C:
    """The config in these tables. Raises ConfigError that names `where`, key, value, allowed."""
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        lines = [_explain(kind, dict(problem)) for problem in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from error


def _explain(kind: type[Section], problem: Mapping[str, Any]) -> str:
    table, *rest = [str(part) for part in problem["loc"]] or [""]
    place = f"[{table}] {'.'.join(rest)}".strip() if table else "the file"
    if problem["type"] == "extra_forbidden":
        known = kind.model_fields[table].annotation if rest and table in kind.model_fields else kind
        fields = getattr(known, "model_fields", {})
        return f"{place}: unknown key; known are {', '.join(fields) or 'none'}"
    shown = "" if "key" in rest or not rest else f" = {problem['input']!r}"
    return f"{place}{shown}: {problem['msg']}"


def _override(kind: type[Section], tables: dict[str, Any], environ: Mapping[str, str]) -> None:
    for name, text in environ.items():
        prefix, _, rest = name.partition("_")
        table, _, key = rest.lower().partition("_")
        if prefix != "PDRT" or not key or table not in kind.model_fields:
            continue
        section = tables.setdefault(table, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: [{table}] is a list of targets and cannot be overridden")
        section[key] = _value(text)


def _value(text: str) -> Any:
    """A TOML value, or the text itself when it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
