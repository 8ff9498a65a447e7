"""The `pdrt` command: options become config objects, errors become one line and an exit status.

Thin on purpose: each command imports what it runs only when it runs, so `--help` is quick and
a router never loads torch. Exit status: 0 well, 1 it failed, 2 the command or a setting is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from pdrt import __version__, config
from pdrt.bench.commands import bench
from pdrt.bench.sim_commands import sim
from pdrt.config import NodeConfig, RouterConfig, TransportName
from pdrt.conformance.command import EXAMPLES as CONFORMANCE
from pdrt.conformance.command import conformance
from pdrt.errors import ConfigError, PdrtError
from pdrt.given import demo_model_directory, with_key, with_model, with_size
from pdrt.keycommands import keys
from pdrt.sim.plan_command import PLAN, plan
from pdrt.top.command import TOP, top

app = typer.Typer(
    name="pdrt",
    help="Serves large language models with prefill and decode on separate instances.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")
app.add_typer(sim, name="sim")
app.add_typer(keys, name="keys")


class RoleName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"


ModelOption = Annotated[
    str, typer.Option(help="A Hugging Face directory, `demo`, or `null` for no model.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
ConfOption = Annotated[Path | None, typer.Option(help="A TOML file; see conf/ for examples.")]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens with this share.")
]


@app.command(
    epilog="Examples: `pdrt up` · `pdrt up --prefill 2 --decode 2` ·"
    " `pdrt up --prefill-tp 3 --decode-dp 2 --transport tcp` ·"
    " `pdrt up --hybrid 1 --model ./Qwen3-0.6B` · `PDRT_PORTS_ROUTER=9000 pdrt up`"
)
def up(
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Prefill instances. [default: 1, beside decode]")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=0, help="Decode instances. [default: 1, beside prefill]")
    ] = None,
    hybrid: Annotated[
        int | None, typer.Option(min=0, help="Instances with both phases. [default: 0]")
    ] = None,
    prefill_tp: Annotated[
        int, typer.Option(min=1, help="Workers that share the model in a prefill instance.")
    ] = 1,
    prefill_cp: Annotated[
        int, typer.Option(min=1, help="Workers that share the rows of long prompts there.")
    ] = 1,
    decode_tp: Annotated[
        int,
        typer.Option(
            min=1, help="The same as --prefill-tp in a decode instance, for each of its dp ranks."
        ),
    ] = 1,
    decode_dp: Annotated[
        int,
        typer.Option(min=1, help="Dp ranks of a decode instance, each with requests of its own."),
    ] = 1,
    model: ModelOption = "",
    dtype: DtypeOption = "",
    transport: Annotated[
        str, typer.Option(help=f"How KV moves: auto, {', '.join(get_args(TransportName))}.")
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Open a chat; leaving it stops all.")
    ] = False,
) -> None:
    """Start a whole cluster on this machine: 1 prefill, 1 decode and a router unless told.

    Ctrl-C drains and stops it.
    """
    from pdrt.up.layout import Wanted
    from pdrt.up.shell import chatting
    from pdrt.up.shell import up as bring_up

    chosen = {"model": {name: v for name, v in (("path", model), ("dtype", dtype)) if v}}
    chosen["transfer"] = {"transport": transport} if transport else {}
    defaults = config.load(NodeConfig, None, options=chosen)
    is_hybrid_only = bool(hybrid) and prefill is None and decode is None
    usual = 0 if is_hybrid_only else 1
    wanted = Wanted(
        prefill=usual if prefill is None else prefill,
        decode=usual if decode is None else decode,
        hybrid=hybrid or 0,
        prefill_tp=prefill_tp,
        prefill_cp=prefill_cp,
        decode_tp=decode_tp,
        decode_dp=decode_dp,
        dtype=dtype,
        transport=defaults.transfer.transport,
    )
    wanted.check()
    wanted = with_size(wanted, defaults)
    raise typer.Exit(bring_up(wanted, defaults, _out(), os.environ, chatting if chat else None))


@bench.command(
    "first-token",
    epilog="Example: `pdrt bench first-token --rounds 50 --json first-token.json`",
)
def bench_first_token(
    rounds: Annotated[int, typer.Option(min=1, help="Requests over each path.")] = 50,
    model: ModelOption = "",
    dtype: DtypeOption = "",
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
) -> None:
    """What disaggregation adds to the first token of a short prompt, against colocated.

    Starts prefill, decode, router and a hybrid instance, and asks both paths in turn.
    """
    from pdrt.bench.first_token import measuring
    from pdrt.up.layout import Wanted
    from pdrt.up.shell import up as bring_up

    chosen = {"model": {name: v for name, v in (("path", model), ("dtype", dtype)) if v}}
    defaults = config.load(NodeConfig, None, options=chosen)
    wanted = with_size(Wanted(hybrid=1, dtype=dtype), defaults)
    meanwhile = measuring(rounds, _out(), json_file)
    raise typer.Exit(bring_up(wanted, defaults, _out(), os.environ, meanwhile))


@bench.command(
    "interference",
    epilog="Example: `pdrt bench interference --chunks 64,256 --json figures.json --plot a.png`",
)
def bench_interference(
    model: Annotated[
        str, typer.Option(help="A model's directory, or llama-100m or tiny: random ones made here.")
    ] = "llama-100m",
    dtype: DtypeOption = "",
    chunks: Annotated[str, typer.Option(help="Chunk sizes of hybrid.")] = "64,128,256,512",
    streams: Annotated[int, typer.Option(min=1, max=256, help="That decode all the time.")] = 8,
    output_len: Annotated[
        int, typer.Option("--output", min=16, help="Tokens of each of their answers.")
    ] = 256,
    input_len: Annotated[
        int, typer.Option("--input", min=16, help="Tokens of the prompts that come meanwhile.")
    ] = 2048,
    every: Annotated[
        float, typer.Option(min=0.0, help="Seconds from prompt to prompt; 0: see --share.")
    ] = 0.0,
    share: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Of the prefill core's time, for prompts.")
    ] = 0.8,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Of each turn.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each layout.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short turn of each, two chunk sizes: a first look.")
    ] = False,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    plot: Annotated[str, typer.Option(help="Draw them here: .png, .svg or .pdf.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """What long prompts do to decode streams: 1P1D with a core each, hybrid on both cores.

    Starts 1P1D, hybrid without chunks and hybrid with each chunk size, one after the other.
    """
    from pdrt.bench.interference import Asked, chunks_of, cores_of, interference
    from pdrt.bench.layouts import Ground
    from pdrt.bench.random_model import NAMED, prepared
    from pdrt.bench.shell import Report
    from pdrt.bench.traffic import Pace, Traffic
    from pdrt.modelspec import ModelSpec
    from pdrt.up.layout import Wanted

    if model in NAMED:
        model = str(prepared(config.cache_dir(), model, NAMED[model]))
    chosen = {"model": {name: v for name, v in (("path", model), ("dtype", dtype)) if v}}
    defaults = config.load(NodeConfig, None, options=chosen)
    wanted = with_size(Wanted(dtype=dtype, transport=defaults.transfer.transport), defaults)
    sizes = chunks_of(chunks)
    asked = Asked(
        traffic=Traffic(
            vocab=ModelSpec.read(wanted.model, backend=defaults.model.backend).vocab,
            streams=streams,
            stream_output=output_len,
            prompt_input=input_len,
            seconds=min(seconds, 15.0) if quick else seconds,
        ),
        chunks=sizes[1::2] or sizes if quick else sizes,
        rounds=1 if quick else rounds,
        pace=Pace(every, share),
    )
    cores = cores_of(list(os.sched_getaffinity(0)))
    ground = Ground(wanted, defaults, os.environ, cores)
    raise typer.Exit(interference(asked, ground, Report(json_file, plot, quiet), _out()))


@app.command(
    "demo-model",
    epilog="Example: `pdrt generate 'Hello' --model $(pdrt demo-model --path)`",
)
def demo_model(
    path: Annotated[
        bool, typer.Option("--path", help="Print the directory and nothing else.")
    ] = False,
) -> None:
    """Prepare the demo model (SmolLM2-135M-Instruct, 269 MB) in your cache directory."""
    made = demo_model_directory()
    typer.echo(made if path else f"the demo model is in {made}")


@app.command(
    epilog="Example: `pdrt node --role prefill --conf conf/prefill.toml`, and so for decode,"
    " then `pdrt router --conf conf/router.toml`"
)
def node(
    role: Annotated[RoleName, typer.Option(help="What this node does.")],
    conf: ConfOption = None,
    node_index: Annotated[int, typer.Option(min=0, help="Place in [parallel] ips.")] = 0,
) -> None:
    """Run one node: a supervisor and its device workers."""
    settings = node_settings(conf)
    from pdrt.node import main as run_node

    raise typer.Exit(run_node(role.value, settings, node_index))


@app.command(
    epilog="Examples: `pdrt router --conf conf/router.toml` ·"
    " `pdrt router --prefill-addrs 10.0.0.1:8001 --decode-addrs 10.0.0.2:8100,10.0.0.3:8100`"
)
def router(
    conf: ConfOption = None,
    prefill_addrs: Annotated[str, typer.Option(help="Leaders, host:port, comma-separated.")] = "",
    decode_addrs: Annotated[str, typer.Option(help="Leaders, host:port, comma-separated.")] = "",
    hybrid_addrs: Annotated[str, typer.Option(help="Leaders, host:port, comma-separated.")] = "",
) -> None:
    """Run the router, the one address that clients talk to."""
    named = {"prefill": prefill_addrs, "decode": decode_addrs, "hybrid": hybrid_addrs}
    settings = router_settings(conf, named)
    from pdrt.control.router import main as run_router

    raise typer.Exit(run_router(settings))


@app.command(epilog="Example: `pdrt generate 'The capital of France is' --max-tokens 32`")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; `-` reads standard input.")],
    model: ModelOption = "",
    dtype: DtypeOption = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same answer.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a chat, with its template.")] = False,
) -> None:
    """Generate in this process, prefill and decode together; streams to the terminal."""
    from pdrt.messages import Sampling
    from pdrt.offline import generate as run_here

    chosen = {name: v for name, v in (("path", model), ("dtype", dtype)) if v}
    settings = config.load(NodeConfig, None, options={"model": chosen})
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    raise typer.Exit(run_here(text, with_model(settings), sampling, _out(), is_chat=chat))


@app.command(epilog="Example: `pdrt chat --url http://127.0.0.1:8000`")
def chat(
    url: Annotated[
        str, typer.Option(help="Any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Empty: the first that the server names.")] = "",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens an answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token each time.")
    ] = 0.1,
    api_key: Annotated[
        str,
        typer.Option(envvar="PDRT_API_KEY", show_default=False, help="If the server wants one."),
    ] = "",
) -> None:
    """Talk to a served model, token by token. Reads questions from a pipe too, one a line."""
    from pdrt.chat import Manner
    from pdrt.chat import chat as talk

    manner = Manner(
        url=url,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        api_key=api_key,
    )
    raise typer.Exit(talk(manner, _out(), sys.stdin))


app.command(epilog=CONFORMANCE)(conformance)
app.command(epilog=TOP)(top)
app.command(epilog=PLAN)(plan)


@app.command(epilog="Example: `pdrt doctor --conf conf/decode.toml --role decode`")
def doctor(
    conf: ConfOption = None,
    role: Annotated[
        RoleName | None, typer.Option(help="Look at this role's ports only. [default: at all]")
    ] = None,
) -> None:
    """Check config, model, memory, ports, peers and transports; one line each, with advice."""
    from pdrt.doctor import examine, show

    findings = examine(conf, role.value if role else None, config.cache_dir())
    raise typer.Exit(show(findings, _out()))


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"pdrt {__version__}")
        raise typer.Exit


def node_settings(conf: Path | None) -> NodeConfig:
    """What `pdrt node --conf` runs with: a real model directory, and a key. Raises ConfigError."""
    try:
        settings = config.load(NodeConfig, conf)
    except ConfigError as error:
        from pdrt.doctor import is_router

        if conf is not None and is_router(conf):
            raise ConfigError(f"{conf} is a router's: pdrt router --conf {conf}") from error
        raise
    return with_model(with_key(settings, config.is_loopback(settings.parallel.local_ip)))


def router_settings(conf: Path | None, named: Mapping[str, str]) -> RouterConfig:
    """What `pdrt router` runs with, from a file or from addresses. Raises ConfigError."""
    targets = {role: _targets(text) for role, text in named.items() if text}
    if conf is not None and targets:
        raise ConfigError("give either --conf or addresses, not both")
    try:
        settings = config.load(RouterConfig, conf, options=targets)
    except ConfigError as error:
        if conf is None and not targets and "no targets" in str(error):
            raise ConfigError(
                "no targets: give --conf FILE, or --prefill-addrs and --decode-addrs, or let"
                " instances register themselves with PDRT_POLICY_REGISTRATION=true"
            ) from error
        from pdrt.doctor import is_node

        if conf is not None and is_node(conf):
            raise ConfigError(f"{conf} is a node's: pdrt node --role ROLE --conf {conf}") from error
        raise
    hosts = [t.http for t in (*settings.prefill, *settings.decode, *settings.hybrid)]
    is_local = all(map(_is_loopback_target, hosts)) and config.is_loopback(settings.local_ip)
    return with_key(settings, is_local)


def main(arguments: Sequence[str] | None = None) -> None:
    """Where `pdrt` starts. A mistake of the user is one line, never a traceback."""
    try:
        app(arguments)
    except ConfigError as error:
        _fail(error, 2)
    except PdrtError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: PdrtError, status: int) -> None:
    typer.echo(f"pdrt: {str(error) or error.code}", err=True)
    sys.exit(status)


def _out() -> Console:
    return Console(highlight=False)


def _targets(text: str) -> list[dict[str, str]]:
    return [{"http": one.strip()} for one in text.split(",") if one.strip()]


def _is_loopback_target(http: str) -> bool:
    from pdrt.control.instances import base_url

    _, where = base_url(http)
    return config.is_loopback(where.rpartition(":")[0].strip("[]"))
