"""All settings: TOML files, overridden by PDRT_<TABLE>_<KEY>, checked before anything starts.

Unknown keys, wrong types, contradictions and impossible topologies are ConfigErrors that
name file, key, value and what is allowed. This is the only module that reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from pdrt.errors import ConfigError
from pdrt.security import SecuritySection as SecuritySection
from pdrt.settings import Positive, Section, Strings, override, read_toml
from pdrt.settings import check as check

Role = Literal["prefill", "decode", "hybrid"]
NetworkName = Literal["tcp", "nixl", "mooncake", "memfabric"]
TransportName = Literal["shm", NetworkName]
PolicyName = Literal[
    "room", "round_robin", "least_loaded", "power_of_two", "consistent_hash", "prefix_aware"
]
Port = Annotated[int, Field(ge=0, le=65535)]
Duration = Annotated[float, Field(gt=0, le=86400)]
Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]


def _check_host(host: str) -> None:
    """Raises ValueError for what is neither an IP address nor could be a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", host):
            raise ValueError(
                f"{host!r} is no address: want one without port and brackets, such as"
                " 10.0.0.1 or fd00::1"
            ) from None


class ModelSection(Section):
    """`path` is a Hugging Face directory, `demo` for the demo model, or `null` for no model."""

    path: str = "demo"
    name: str = ""  # what clients call it; empty: the directory's name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: Annotated[int, Field(ge=0)] = 0  # 0: the model's own limit
    backend: Literal["auto", "native", "transformers"] = "auto"  # auto: native where there is one
    quantize: Literal["none", "int8"] = "none"  # how matrices are held: int8 halves bfloat16


class DeviceSection(Section):
    kind: Literal["auto", "cpu", "cuda", "npu", "null"] = "auto"
    threads: Annotated[int, Field(ge=0)] = 0  # 0: an equal share of the cores for each worker
    cores: Cores = ()  # to which this node's workers are pinned, each to its share
    kernels: Literal["auto", "compiled", "torch"] = "auto"  # of decode steps on the CPU
    step_ms: Annotated[float, Field(ge=0)] = 0.0  # null device: how long a step takes
    token_ms: Annotated[float, Field(ge=0)] = 0.0  # null device: and each prompt token in it


class ParallelSection(Section):
    world_size: Positive = 1
    tp: Positive = 1
    cp: Positive = 1
    dp: Positive = 1
    devices_per_node: Positive = 1
    ips: Strings = ()  # all nodes of the role, in order; empty: this node alone
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
                f"devices_per_node = {self.devices_per_node} must divide"
                f" world_size = {self.world_size}"
            )
        return self

    @model_validator(mode="after")
    def _nodes_are_there(self) -> Self:
        nodes = len(self.ips) or 1
        if nodes % self.nodes_per_instance:
            raise ValueError(
                f"ips: {nodes} nodes do not make whole instances of {self.nodes_per_instance} nodes"
                " (world_size / devices_per_node)"
            )
        for host in (*self.ips, self.local_ip):
            _check_host(host)
        if len(set(self.ips)) < len(self.ips):
            raise ValueError(f"ips: a node stands twice in {', '.join(self.ips)}")
        return self

    @property
    def nodes_per_instance(self) -> int:
        return self.world_size // self.devices_per_node


class SchedulerSection(Section):
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    kv_memory: Annotated[float, Field(gt=0)] = (
        0.1  # <= 1: fraction of the device's memory; else bytes
    )
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 512  # chunk size
    num_reserved_decode_tokens: Annotated[int, Field(ge=1)] = 64
    adaptive_reserve: bool = True  # the number before is where it begins
    max_waiting: Positive = 1024  # beyond: 429
    prefix_cache: bool = True
    retraction: Literal["auto", "copy", "reprefill", "local"] = "auto"  # copy on cuda and npu
    host_kv_memory: Annotated[float, Field(ge=0)] = 0.02  # for copies; <= 1: fraction, else bytes
    local_prefill: bool = False  # decode: it may compute prompts itself, when the router asks


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
    kill: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int = 0


class TransferSection(Section):
    transport: Literal["auto", TransportName] = "auto"
    network: Annotated[tuple[NetworkName, ...], Field(strict=False)] = ("tcp",)  # auto, best first
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    chunked: bool = True  # blocks leave while the next chunk computes
    early_first_token: bool = True  # decode says it before the KV is there
    slots: Annotated[int, Field(ge=1, le=65536)] = 512
    writers: Annotated[int, Field(ge=1, le=1024)] = 16  # prefill ranks that write one request
    checksums: bool = False  # decode checks each block before use; decides for its writers too
    stripes: Annotated[int, Field(ge=1, le=64)] = 2  # tcp: connections to each peer
    nic: str = ""  # nixl, mooncake: devices to use, as the engine names them; empty: its choice
    nixl_backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    faults: FaultSection | None = None

    @model_validator(mode="after")
    def _nic_has_an_effect(self) -> Self:
        wanted = self.network if self.transport == "auto" else (self.transport,)
        if self.nic and not {"nixl", "mooncake"} & set(wanted):
            raise ValueError(
                f"nic = {self.nic!r} has no effect on {', '.join(wanted)}: only nixl and mooncake"
                " choose devices; leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _names_each_network_once(self) -> Self:
        if len(set(self.network)) < len(self.network):
            raise ValueError(f"network: a transport stands twice in {', '.join(self.network)}")
        return self


class TimeoutsSection(Section):
    request_s: Duration = 600.0
    startup_s: Duration = 300.0
    heartbeat_s: Duration = 1.0
    heartbeat_timeout_s: Duration = 0.45
    lease_s: Duration = 10.0
    rebind_grace_s: Duration = 1.0
    move_s: Duration = 1.5
    drain_s: Duration = 30.0
    quarantine_grace_s: Duration = 30.0
    connect_s: Duration = 2.0
    slow_reader_s: Duration = 30.0
    attach_s: Duration = 10.0

    @model_validator(mode="after")
    def _answers_come_before_the_next_ping(self) -> Self:
        if self.heartbeat_timeout_s > self.heartbeat_s:
            raise ValueError(
                f"heartbeat_timeout_s = {self.heartbeat_timeout_s:g} is longer than heartbeat_s ="
                f" {self.heartbeat_s:g}: a dead peer would be found out too late"
            )
        return self


class PortsSection(Section):
    router: Port = 8000
    prefill: Port = 8001
    decode: Port = 8100
    hybrid: Port = 8200
    bootstrap: Port = 18800
    admin: Port = 18001  # the router's, for operators and for nodes that register


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    step_every_s: Annotated[float, Field(ge=0)] = 1.0  # a status line at most this often while busy


class RouterSection(Section):
    """Routers that a leader registers with, as http://host:port of their admin listeners."""

    urls: Strings = ()

    @model_validator(mode="after")
    def _are_urls(self) -> Self:
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/\s]+:\d{1,5}/?", url):
                raise ValueError(
                    f"urls: {url!r}: want http://host:port of a router's admin listener"
                )
        return self


class TelemetrySection(Section):
    otlp_endpoint: str = ""  # a collector's, OTLP over HTTP; empty: no traces
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0  # of the traces that begin here

    @model_validator(mode="after")
    def _endpoint_is_a_url(self) -> Self:
        if self.otlp_endpoint and not re.match(r"https?://[^/\s]", self.otlp_endpoint):
            raise ValueError(
                f"otlp_endpoint = {self.otlp_endpoint!r} is no URL: want one such as"
                " http://127.0.0.1:4318"
            )
        return self


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
    router: RouterSection = RouterSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _says_nothing_that_only_routers_do(self) -> Self:
        """What would be served in the clear must not look as if it were not."""
        for name in ("tls_cert", "cors_origins"):
            if getattr(self.security, name):
                raise ValueError(
                    f"[security] {name} is for routers, which clients talk to: put one in front of"
                    " this instance, and leave it out here"
                )
        return self


class Target(Section):
    """A leader: `http` is its API address, `bootstrap` (prefill) its bootstrap server's."""

    http: str
    bootstrap: str = ""
    model: str = ""  # of a backend that is not pdrt; pdrt instances say what they serve


class PolicySection(Section):
    prefill: PolicyName = "least_loaded"
    decode: PolicyName = "least_loaded"
    backends: Literal["pdrt", "plain"] = "pdrt"  # plain: not pdrt's; no token, no canary
    max_in_flight: Positive = 4096  # beyond: 429
    local_prefill_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = 0  # by decode itself
    strict: bool = False  # only prefill and decode serve; else 503
    migrate: bool = True  # a stream whose decode instance dies goes on with another one ...
    max_moves: Annotated[int, Field(ge=1, le=100)] = 3  # ... so many times at most
    registration: bool = False  # instances may register themselves; then no targets need be listed
    default_model: str = ""  # of requests that name none, where several are served

    @property
    def is_plain(self) -> bool:
        return self.backends == "plain"

    @model_validator(mode="after")
    def _plain_backends_cannot(self) -> Self:
        if self.is_plain and self.registration:
            raise ValueError(
                'backends = "plain" and registration = true: only pdrt\'s instances register'
                " themselves; list plain backends as targets"
            )
        if self.is_plain and self.migrate and "migrate" in self.model_fields_set:
            raise ValueError(
                'backends = "plain" and migrate = true: only pdrt\'s instances go on with a'
                " stream that another one began; leave migrate out"
            )
        return self

    @model_validator(mode="after")
    def _strict_is_strict(self) -> Self:
        if self.strict and self.local_prefill_tokens:
            raise ValueError("strict = true wants local_prefill_tokens = 0: no other path serves")
        return self


class AdminSection(Section):
    """The router's admin listener; its port is [ports] admin, its token the cluster's."""

    host: str = ""  # empty: local_ip


Targets = Annotated[tuple[Target, ...], Field(strict=False)]


class RouterConfig(Section):
    prefill: Targets = ()
    decode: Targets = ()
    hybrid: Targets = ()
    local_ip: str = "127.0.0.1"
    policy: PolicySection = PolicySection()
    admin: AdminSection = AdminSection()
    timeouts: TimeoutsSection = TimeoutsSection()
    security: SecuritySection = SecuritySection()
    ports: PortsSection = PortsSection()
    log: LogSection = LogSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if bool(self.prefill) != bool(self.decode) and not self.policy.registration:
            raise ValueError("[[prefill]] and [[decode]] targets come together")
        if not (self.prefill or self.decode or self.hybrid or self.policy.registration):
            raise ValueError(
                "no targets: name [[prefill]] and [[decode]], or [[hybrid]], or let instances"
                " register themselves ([policy] registration = true)"
            )
        leaders = [target.http for target in (*self.prefill, *self.decode, *self.hybrid)]
        if len(set(leaders)) < len(leaders):
            raise ValueError(f"a target stands twice in {', '.join(leaders)}")
        _check_host(self.local_ip)
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
        own = parallel.ips[node_index] if parallel.ips else parallel.local_ip
        here = parallel.local_ip  # of a host with several addresses it may be another one
        if here != own and (is_loopback(here) or here in parallel.ips):
            raise ConfigError(
                f"[parallel] local_ip = {here!r}: peers would not find node {node_index} there,"
                f" which is {own} in ips: set PDRT_PARALLEL_LOCAL_IP={own}, or another --node-index"
            )
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


def process_environ() -> MutableMapping[str, str]:
    """Ours, to be changed before a library that reads it is loaded."""
    return os.environ


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where what can be made again is kept: $PDRT_CACHE, else `pdrt` in the user's cache."""
    if chosen := environ.get("PDRT_CACHE"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdrt"


def user_key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The cluster key that one user's processes on one machine share when none is named."""
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "pdrt" / "key"


def api_keys_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `pdrt keys` keeps clients' keys when no file is named."""
    return user_key_file(environ).with_name("api_keys.toml")


def bracketed(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether an address or `localhost` stays on this machine. Names are not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


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
    tables = read_toml(path) if path else {}
    known = NodeConfig.model_fields.keys() | RouterConfig.model_fields.keys()
    used: list[str] = override(kind, tables, environ, known)
    for name, table in (options or {}).items():
        under = tables.get(name)
        tables[name] = under | table if isinstance(under, dict) else table
    return check(kind, tables, " with ".join([str(path or "settings"), *used]))
