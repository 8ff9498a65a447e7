"""The commands of `pdrt bench`: as thin as those of `pdrt`, each imports what it runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pdrt import config
from pdrt.bench.calibrate_command import CALIBRATE, calibrate
from pdrt.bench.serve_command import SERVE, serve
from pdrt.bench.sweep_command import SWEEP, sweep
from pdrt.config import NodeConfig
from pdrt.errors import ConfigError
from pdrt.given import with_key, with_model

if TYPE_CHECKING:
    from pdrt.keys import ClusterKey

bench = typer.Typer(
    help="Measurements that anyone can run again.",
    no_args_is_help=True,
    epilog="Examples: `pdrt bench transfer` · `pdrt bench first-token`",
)
bench.command("calibrate", epilog=CALIBRATE)(calibrate)
bench.command("serve", epilog=SERVE)(serve)
bench.command("sweep", epilog=SWEEP)(sweep)


@bench.command(
    "transfer",
    epilog="Examples: `pdrt bench transfer` · `pdrt bench transfer --transport shm,tcp --batch 64"
    " --json transfer.json --plot transfer.png` · two hosts: `pdrt bench transfer --listen"
    " 10.0.0.2:18900` on one, `pdrt bench transfer --connect 10.0.0.2:18900` on the other",
)
def bench_transfer(
    transport: Annotated[
        str, typer.Option(help="all, or some of shm, tcp, nixl, mooncake, memfabric.")
    ] = "all",
    sizes: Annotated[
        str, typer.Option(help="Block sizes: by powers of two (4K..64M), or a list (64K,1M).")
    ] = "4K..64M",
    batch: Annotated[str, typer.Option(help="Scattered blocks of one write: a list.")] = "1,64",
    rounds: Annotated[int, typer.Option(help="Turns of each transport; figures are medians.")] = 7,
    seconds: Annotated[
        float, typer.Option(help="About how long all turns may take; each moves a batch at least.")
    ] = 120.0,
    pool: Annotated[str, typer.Option(help="Memory of each side that blocks lie in.")] = "512M",
    listen: Annotated[
        str, typer.Option(help="HOST:PORT: be the side that is written to, for another host.")
    ] = "",
    connect: Annotated[
        str, typer.Option(help="HOST:PORT: write to the one that listens there.")
    ] = "",
    wait: Annotated[
        float, typer.Option(min=1.0, max=86400.0, help="Seconds that --listen waits.")
    ] = 600.0,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    plot: Annotated[str, typer.Option(help="Draw them here: .png, .svg or .pdf.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no tables.")] = False,
) -> None:
    """How fast each installed transport moves KV blocks, beside memcpy in the same run.

    Two processes on this machine, or with --listen and --connect on two. Every round gives each
    transport a turn, and what the last round moved is checked.
    """
    from pdrt.bench.cases import wanted
    from pdrt.bench.shell import Report, leave, place_of
    from pdrt.bench.shell import listen as be_target
    from pdrt.bench.shell import transfer as measure

    if listen and connect:
        raise ConfigError("give --listen on one host and --connect on the other, not both here")
    if listen:
        leave(be_target(listen, _bench_key(listen, "--listen"), wait, Console(highlight=False)))
    asked = wanted(sizes, batch, transport, rounds, seconds, pool)
    place = place_of(connect, _bench_key(connect, "--connect")) if connect else None
    leave(measure(asked, Report(json_file, plot, quiet), Console(highlight=False), place))


@bench.command("control", epilog="Example: `pdrt bench control --rooms 1000`")
def bench_control(
    rooms: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Rooms one at a time, and as many 64 at once.")
    ] = 1000,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No table.")] = False,
) -> None:
    """What a request costs beside computing and moving its KV: handshakes, slots, descriptors.

    Rooms go through a real prefill and a real decode manager in two processes.
    """
    from pdrt.bench.control import control
    from pdrt.bench.shell import Report

    raise typer.Exit(control(rooms, Report(json_file, is_quiet=quiet), Console(highlight=False)))


@bench.command("scheduler", epilog="Example: `pdrt bench scheduler --steps 50`")
def bench_scheduler(
    steps: Annotated[int, typer.Option(min=10, max=100_000, help="That each row measures.")] = 200,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No table.")] = False,
) -> None:
    """What planning and committing a step costs, with up to 10,000 waiting and 512 running.

    Each of the three schedulers under a steady load, in this process, without a device.
    """
    from pdrt.bench.scheduler import scheduler
    from pdrt.bench.shell import Report

    raise typer.Exit(scheduler(steps, Report(json_file, is_quiet=quiet), Console(highlight=False)))


@bench.command("overlap", epilog="Example: `pdrt bench overlap --prompts 10`")
def bench_overlap(
    model: Annotated[
        str, typer.Option(help="A model's directory, or llama-100m or tiny: random ones made here.")
    ] = "llama-100m",
    tokens: Annotated[int, typer.Option(min=2, max=1_000_000, help="Of each prompt.")] = 2048,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="One after the other.")] = 5,
    transport: Annotated[str, typer.Option(help="How KV moves: auto, shm, tcp ...")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "float32",
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """How soon after a prompt is computed its KV is whole on the decode side.

    Between a real prefill and a real decode worker: as a share of the time of computing.
    """
    from pdrt.bench.overlap import overlap
    from pdrt.bench.random_model import NAMED, prepared
    from pdrt.bench.shell import Report

    if model in NAMED:
        model = str(prepared(config.cache_dir(), model, NAMED[model]))
    chosen = {
        "model": {"path": model, "dtype": dtype},
        "device": {"threads": max(1, len(os.sched_getaffinity(0)) // 2)},
        "transfer": {"transport": transport} if transport else {},
    }
    settings = with_model(config.load(NodeConfig, None, options=chosen))
    report = Report(json_file, is_quiet=quiet)
    raise typer.Exit(overlap(settings, tokens, prompts, report, Console(highlight=False)))


@bench.command("engine", epilog="Example: `pdrt bench engine --dtype bfloat16 --quick`")
def bench_engine(
    model: Annotated[
        str, typer.Option(help="A model's directory, or llama-100m or tiny: random ones made here.")
    ] = "llama-100m",
    dtype: Annotated[str, typer.Option(help="A list.")] = "float32,bfloat16",
    quantize: Annotated[str, typer.Option(help="int8: matrices are held so.")] = "none",
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    accuracy: Annotated[
        bool,
        typer.Option("--accuracy", help="Instead: how far bfloat16 and int8 are from float32."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: a first look.")] = False,
    peer: Annotated[str, typer.Option(help="transformers: measure it too, in turns.")] = "",
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """How near decode and prefill on the CPU come to the machine's limit.

    In this process, without server: one, 8 and 32 sequences, prompts of 512 and 2,048 tokens.
    """
    from pdrt.bench.engine import QUICK, Asked, Effort, dtypes_of, engine
    from pdrt.bench.random_model import NAMED, prepared
    from pdrt.bench.shell import Report

    if peer not in ("", "transformers"):
        raise ConfigError(f"--peer {peer!r}: transformers is the one that there is")
    if model in NAMED:
        model = str(prepared(config.cache_dir(), model, NAMED[model]))
    chosen = {
        "model": {"path": model, "quantize": quantize},
        "device": {"kind": "cpu", "threads": threads},
    }
    settings = with_model(config.load(NodeConfig, None, options=chosen))
    report = Report(json_file, is_quiet=quiet)
    if accuracy:
        from pdrt.bench.accuracy import accuracy as compare

        raise typer.Exit(compare(settings, report, Console(highlight=False)))
    asked = Asked(settings, dtypes_of(dtype), QUICK if quick else Effort(), bool(peer))
    raise typer.Exit(engine(asked, report, Console(highlight=False)))


@bench.command(
    "faults",
    epilog="Examples: `pdrt bench faults` · `pdrt bench faults --only 'gone,mid-stream'` · a router"
    " that runs already, in front of 127.0.0.1:31001, 31002 (prefill) and 31011, 31012 (decode):"
    " `pdrt bench faults --url other=http://127.0.0.1:30000 --deadline 600`",
)
def bench_faults(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Routers that run already, URL or NAME=URL. [default: pdrt's is started]"
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Rows with one of these words, comma-separated.")] = "",
    instances: Annotated[
        str, typer.Option(help="Behind the router: scripted, real (without a model) or all.")
    ] = "all",
    ports: Annotated[
        str, typer.Option(help="Where routers that run find the backends: prefill/decode.")
    ] = "31001,31002/31011,31012",
    deadline: Annotated[
        float, typer.Option(min=0.5, max=3600.0, help="Seconds that a request may take there.")
    ] = 2.0,
    slow_reader: Annotated[
        float, typer.Option(min=0.5, max=3600.0, help="Seconds that a reader may stand still.")
    ] = 3.0,
    model: Annotated[str, typer.Option(help="What requests name.")] = "scripted",
    api_key: Annotated[
        str,
        typer.Option(envvar="PDRT_API_KEY", show_default=False, help="If the routers want one."),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the rows that wait for long limits.")
    ] = False,
    json_file: Annotated[str, typer.Option("--json", help="Write the rows here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """What a router answers when something goes wrong, when, and when both legs are let go.

    Backends that do wrong on command, clients that leave or send junk: a row each, with a verdict.
    """
    from pdrt.bench.faults import Asked, faults
    from pdrt.bench.faults_verdict import Limits
    from pdrt.bench.serve import servers_of
    from pdrt.bench.shell import Report

    asked = Asked(
        servers=servers_of(url or []),
        only=only,
        ports=ports,
        instances=instances,
        is_quick=quick,
        limits=Limits(deadline_s=deadline, slow_reader_s=slow_reader),
        api_key=api_key,
        model=model,
    )
    report = Report(json_file, is_quiet=quiet)
    environ = config.process_environ()
    raise typer.Exit(faults(asked, report, Console(highlight=False), environ))


@bench.command(
    "router",
    epilog="Examples: `pdrt bench router --quick` · `pdrt bench router --peer-python"
    " /opt/peers/bin/python` · routers that run already, in front of 127.0.0.1:31001 (prefill)"
    " and 31011, 31012 (decode): `pdrt bench router --url other=http://127.0.0.1:30000`",
)
def bench_router(
    url: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of a router on this machine; NAME=URL@PID tells its process."),
    ] = None,
    peer_python: Annotated[
        str, typer.Option(help="An interpreter that has sglang-router or vllm-router installed.")
    ] = "",
    backends: Annotated[
        str, typer.Option(help="PREFILL/DECODE,...: ports of backends that run. [default: ours]")
    ] = "",
    path: Annotated[str, typer.Option(help="/v1/completions or /generate.")] = "/v1/completions",
    conc: Annotated[str, typer.Option(help="Requests in flight, answered as JSON.")] = "1,16,128",
    streams: Annotated[str, typer.Option(help="Streams in flight.")] = "64,256,1000",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Turns of each router.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0.5, max=600.0, help="Of a turn; of one with streams twice that.")
    ] = 3.0,
    quick: Annotated[bool, typer.Option("--quick", help="One short round: a first look.")] = False,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no tables.")] = False,
) -> None:
    """What a request and a chunk cost pdrt's router: processor time, delay, memory, beside peers.

    Scripted backends and the client on one core, the router that has its turn on another.
    """
    from pdrt.bench.router import Asked, router, widths_of
    from pdrt.bench.shell import Report

    asked = Asked(
        given=url or (),
        peer_python=peer_python,
        backends=backends,
        path=path,
        conc=widths_of(conc, "--conc"),
        streams=widths_of(streams, "--streams"),
        rounds=1 if quick else rounds,
        json_s=1.0 if quick else seconds,
        stream_s=2.0 if quick else 2 * seconds,
    )
    report = Report(json_file, is_quiet=quiet)
    environ = config.process_environ()
    raise typer.Exit(router(asked, report, Console(highlight=False), environ))


def _bench_key(address: str, option: str) -> ClusterKey:
    """The cluster key of both ends: named, or on loopback the user's. Raises ConfigError."""
    from pdrt.bench.control_line import split_address

    host, _ = split_address(address, option)
    settings = with_key(config.load(NodeConfig, None), config.is_loopback(host))
    key = settings.security.cluster_key()
    if key is None:
        raise ConfigError(
            f"{option} {address} is not loopback: a cluster key is needed, the same on both hosts:"
            " PDRT_SECURITY_KEY_FILE=FILE or PDRT_SECURITY_KEY; make one with `openssl rand -hex"
            " 32`"
        )
    return key
