"""`pdrt doctor`: one line a check, and what to do about each that fails.

Looks and never changes anything; loads no model. A check gives findings: fine, worth knowing,
or wrong, and only what is wrong makes the exit status non-zero.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from pdrt import demo, grid
from pdrt.config import (
    NodeConfig,
    ParallelSection,
    Place,
    Role,
    RouterConfig,
    SecuritySection,
    TransferSection,
    TransportName,
    bracketed,
    is_loopback,
    load,
    user_key_file,
)
from pdrt.control.instances import base_url
from pdrt.data import installed
from pdrt.data.installed import NEEDS, ORDER, wanted
from pdrt.data.probe import CURES
from pdrt.data.trial import try_out
from pdrt.device.poolsize import host_bytes
from pdrt.errors import ConfigError, PdrtError
from pdrt.findings import Finding, Verdict, fine, note, wrong
from pdrt.frontdoor import check_door, check_keys
from pdrt.modelspec import ModelSpec

_TOUCH_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """What is asked about this host's transports."""

    package: Callable[[TransportName], str | None] = installed.package
    devices: Callable[[TransportName], list[str]] = installed.devices
    trial: Callable[[TransferSection, str], float] = try_out
    alone_s: float = 1.5  # that a trial has the host for itself; mostly it has ended by then


def examine(
    conf: Path | None, role: Role | None, cache: Path, host: Host | None = None
) -> Iterator[Finding]:
    """All that can be said about a node or a router with this config."""
    transfer, address, needed = TransferSection(), "127.0.0.1", set[str]()
    yield from _system()
    try:
        if conf is not None and is_router(conf):
            router = load(RouterConfig, conf)
            yield fine(f"config: {conf} is a router's and can be read")
            yield from _router(router)
            return  # it neither moves KV nor computes
        node = load(NodeConfig, conf)
        yield fine(f"config: {conf or 'defaults and environment'} can be read")
        yield from _node(node, role, cache)
        transfer, address = node.transfer, node.parallel.local_ip
        needed = set() if role == "hybrid" else set(wanted(transfer))
        if conf is None and role is None:  # `pdrt up` is asked about, too
            yield _port("router", node.parallel.local_ip, node.ports.router)
            yield _port("admin", node.parallel.local_ip, node.ports.admin)
    except ConfigError as error:
        yield wrong(f"config: {error}", "correct the file or the PDRT_* variable named there")
    way = address if _is_here(address) else "127.0.0.1"
    yield from _transports(transfer, way, host or Host(), needed)
    yield from _devices()


def is_router(conf: Path) -> bool:
    """Whether a file names targets, as only a router's does. An unreadable one is not."""
    return bool(_tables(conf) & (RouterConfig.model_fields.keys() - NodeConfig.model_fields.keys()))


def is_node(conf: Path) -> bool:
    """Whether a file has tables that only a node's has. An unreadable one has none."""
    return bool(_tables(conf) & (NodeConfig.model_fields.keys() - RouterConfig.model_fields.keys()))


def _tables(conf: Path) -> set[str]:
    try:
        return set(tomllib.loads(conf.read_text()))
    except (OSError, ValueError):
        return set()


def _system() -> Iterator[Finding]:
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        yield wrong(f"system: no {' and '.join(missing)}", "pdrt needs Linux 5.3 or newer")
    else:
        yield fine(f"system: Linux {os.uname().release}, {os.cpu_count()} cores")


def _node(config: NodeConfig, role: Role | None, cache: Path) -> Iterator[Finding]:
    weights = 0
    for finding, size in _model(config, cache):
        weights += size
        yield finding
    yield from _memory(config, weights)
    host = config.parallel.local_ip
    yield from _address(host)
    yield from _place(config.parallel)
    yield from _instance(config, role)
    yield from _ports(config, role, host)
    yield from _key(config.security, host)
    if config.security.api_keys_file and role in (None, "hybrid"):
        yield from check_keys(config.security, host)


def _router(config: RouterConfig) -> Iterator[Finding]:
    yield from _address(config.local_ip)
    yield _port("router", config.local_ip, config.ports.router)
    yield _port("admin", config.admin.host or config.local_ip, config.ports.admin)
    yield from _key(config.security, config.local_ip)
    yield from check_door(config.security, config.local_ip)
    for target in (*config.prefill, *config.decode, *config.hybrid):
        yield _peer(target.http)


def _model(config: NodeConfig, cache: Path) -> Iterator[tuple[Finding, int]]:
    path = config.model.path
    if path == "demo":
        if not demo.is_prepared(cache):
            yield note("model: the demo model is not prepared yet", "pdrt demo-model"), 0
            return
        path = str(demo.directory(cache))
    try:
        spec = ModelSpec.of(config.model.model_copy(update={"path": path}))
    except PdrtError as error:
        yield wrong(f"model: {error}", "name another directory in [model] path"), 0
        return
    try:
        spec.check_tp(config.parallel.tp)
    except ConfigError as error:
        yield wrong(f"model: {path}: {error}", "choose another [parallel] tp"), 0
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    yield (
        fine(
            f"model: {path}: {spec.architecture} ({spec.backend}), {spec.layers} layers, up to"
            f" {spec.max_model_len} tokens, {size / 1e6:.0f} MB of weights"
        ),
        size,
    )


def _memory(config: NodeConfig, weights: int) -> Iterator[Finding]:
    told = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    total, available = host_bytes(), int(told["MemAvailable"].split()[0]) << 10
    wanted = config.scheduler.kv_memory
    pool = int(wanted * total) if wanted <= 1 else int(wanted)
    workers = config.parallel.devices_per_node
    models = -(-workers // config.parallel.tp)  # its tp ranks share one
    need = workers * pool + models * weights
    says = (
        f"memory: {need / 1e9:.1f} GB for {workers} worker(s) with a KV pool of"
        f" {pool / 1e9:.1f} GB each; {available / 1e9:.1f} GB are free"
    )
    if need > available:
        yield wrong(says, "lower [scheduler] kv_memory, or free memory")
    else:
        yield fine(says)


def _address(host: str) -> Iterator[Finding]:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(where)
    except OSError as error:
        advice = "set local_ip to an address of this host that peers can reach"
        yield wrong(f"address: {host} is not on this host: {error.strerror or error}", advice)
    else:
        yield fine(f"address: {host} is on this host")


def _place(parallel: ParallelSection) -> Iterator[Finding]:
    """Whether this node can be one of those named in `ips`; which one, only its index tells."""
    if not parallel.ips or parallel.local_ip in parallel.ips:
        return
    says = f"place: local_ip = {parallel.local_ip} is none of ips: {', '.join(parallel.ips)}"
    if is_loopback(parallel.local_ip):
        yield wrong(says, "PDRT_PARALLEL_LOCAL_IP=<this host's address in ips>")
    else:
        yield note(says, "fine if it is another address of one of those hosts")


def _instance(config: NodeConfig, role: Role | None) -> Iterator[Finding]:
    """Of an instance that spans nodes: what runs here, and whether the nodes find each other."""
    parallel = config.parallel
    count = parallel.nodes_per_instance
    if count == 1 or parallel.local_ip not in parallel.ips:
        return
    place = Place.of(parallel, parallel.ips.index(parallel.local_ip))
    number = place.node_index % count
    ranks = " ".join(map(str, grid.ranks_on(parallel, number)))
    leads = "leads it" if place.is_leader else f"is led by {place.leader_ip}"
    yield fine(
        f"instance: node {number} of {count} of instance {place.instance} {leads};"
        f" --node-index {place.node_index}; ranks (dp,cp,tp) {ranks}"
    )
    if role is None:
        yield note("instance: its other nodes were not looked for", "say which --role this is")
        return
    port = {"prefill": config.ports.prefill, "decode": config.ports.decode}.get(role)
    others = range(1, count) if place.is_leader else [0]
    for other in others:
        host = grid.address_of(parallel, place.instance, other)
        yield _touch("instance", f"{bracketed(host)}:{port or config.ports.hybrid}")


def _ports(config: NodeConfig, role: Role | None, host: str) -> Iterator[Finding]:
    ports = config.ports
    wanted: dict[Role, dict[str, int]] = {
        "prefill": {"prefill": ports.prefill, "bootstrap": ports.bootstrap},
        "decode": {"decode": ports.decode},
        "hybrid": {"hybrid": ports.hybrid},
    }
    for one in [role] if role else wanted:
        for name, port in wanted[one].items():
            yield _port(name, host, port)


def _port(name: str, host: str, port: int) -> Finding:
    if not port:
        return fine(f"port: {name} takes a free one on {host}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return wrong(
                f"port: {port} on {host} ({name}): {error.strerror}",
                f"no fault where it runs already; else stop what uses it, or set [ports] {name}",
            )
    return fine(f"port: {port} on {host} ({name}) is free")


def _key(security: SecuritySection, host: str) -> Iterator[Finding]:
    try:
        key = security.cluster_key()
    except ConfigError as error:
        yield wrong(
            f"cluster key: {error}", "correct the path, or make a key: openssl rand -hex 32"
        )
        return
    if key is not None:
        yield fine("cluster key: configured")
        if security.is_key_file_exposed:
            advice = f"chmod 600 {security.key_file}"
            yield note("cluster key: other users of this host may read the file", advice)
    elif is_loopback(host):
        yield fine(f"cluster key: none named; on loopback {user_key_file()} is used")
    else:
        yield wrong(
            "cluster key: none, and the node is not on loopback",
            "put the same 16 or more random characters on all hosts: openssl rand -hex 32 >"
            " FILE, then [security] key_file = FILE",
        )


def _peer(http: str) -> Finding:
    return _touch("peer", http, "start it, or correct the router's targets")


def _touch(kind: str, http: str, advice: str = "start it there, or open the way to it") -> Finding:
    try:
        _, where = base_url(http)
        host, _, port = where.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TOUCH_S):
            return fine(f"{kind}: {http} accepts connections")
    except (OSError, ValueError, ConfigError) as error:
        return note(f"{kind}: {http}: {error}", advice)


def _transports(
    config: TransferSection, address: str, host: Host, needed: Collection[str]
) -> Iterator[Finding]:
    """One after the other, so that each has the host for itself; but a slow one is not awaited."""
    with ThreadPoolExecutor(len(ORDER)) as pool:
        trials = deque[Future[Finding]]()
        for name in ORDER:
            bad = wrong if name in needed else note
            trials.append(pool.submit(_transport, name, config, address, host, bad))
            wait([trials[-1]], host.alone_s)
            while trials and trials[0].done():
                yield trials.popleft().result()
        for trial in trials:
            yield trial.result()


def _transport(
    name: TransportName,
    config: TransferSection,
    address: str,
    host: Host,
    bad: Callable[[str, str], Finding],
) -> Finding:
    """What of it is here, and how fast it moved 64 MiB just now."""
    needs, package, found = NEEDS[name], host.package(name), host.devices(name)
    if package is None:
        return bad(f"transport: {name} is not installed", needs.install)
    says = f"transport: {name}" + (f" ({package})" if package else "")
    about = [f"devices: {', '.join(found) or 'none'}"] if needs.devices else []
    about += [f"{needs.unverified} not verified on hardware"] if needs.unverified else []
    if needs.needs_device and not found:
        return bad(f"{says}: {'; '.join(about)}", CURES[name])
    try:
        alone = config.model_copy(update={"transport": name, "faults": None})
        speed = host.trial(alone, address)
    except TimeoutError as error:  # proves nothing: starting a process may take as long
        return note(f"{says}: {error}", "is the machine busy? run again")
    except PdrtError as error:
        cures = (CURES[name], needs.system)  # the package itself is here
        return bad(f"{says}: {error}", "; ".join(filter(None, cures)))
    moved = f"64 MiB from and to host memory at {speed:.2f} GB/s, all bytes compared"
    return fine(f"{says}: {'; '.join([moved, *about])}")


def _is_here(host: str) -> bool:
    return all(finding.verdict is Verdict.FINE for finding in _address(host))


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield wrong("device: torch is not installed", "pip install torch")
    else:
        yield fine("device: cpu")
        yield _compiled()
    for kind, module, node in (
        ("cuda", "torch", "/dev/nvidiactl"),
        ("npu", "torch_npu", "/dev/davinci_manager"),
    ):
        if Path(node).exists() and importlib.util.find_spec(module) is not None:
            yield note(f"device: {kind} is there; pdrt's {kind} path is not verified on hardware")
        else:
            yield note(f"device: no {kind} on this host (and not verified on hardware)")


def _compiled() -> Finding:
    if importlib.util.find_spec("numba") is None:
        says = "device: decode steps on the CPU run on torch, at half the speed or less"
        return note(says, "pip install 'pdrt[cpu]' for compiled ones")
    return fine("device: decode steps of dense models on the CPU are compiled")


def show(findings: Iterator[Finding], console: Console) -> int:
    """Print them as they come; the exit status."""
    is_well = True
    styles = {Verdict.FINE: "green", Verdict.NOTE: "yellow", Verdict.WRONG: "bold red"}
    for finding in findings:
        is_well = is_well and finding.verdict is not Verdict.WRONG
        line = Text(f"{finding.verdict:<6}", style=styles[finding.verdict]).append(
            finding.what, style="default"
        )
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"       -> {finding.advice}", style="dim"), soft_wrap=True)
    return 0 if is_well else 1
