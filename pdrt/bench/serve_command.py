"""The command `pdrt bench serve`: its options, and what is refused of them by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from pdrt.bench.options import ItlLimit, RequestTimeout, TtftLimit
from pdrt.errors import ConfigError

if TYPE_CHECKING:
    from pdrt.sim.workload import Arrivals

SERVE: Final = (
    "Examples: `pdrt bench serve --concurrency 16 --input 64..256` · `pdrt bench serve --rate 4"
    " --burstiness 0.5 --output lognormal:128:0.6` · `pdrt bench serve --url"
    " pdrt=http://127.0.0.1:8000 --url vllm=http://127.0.0.1:9000 --profile peers`"
)
_TYPED: Final = "COMMANDLINE"
# Parameters that say nothing where another one is given.
_UNUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "profile": (
        *("requests", "concurrency", "rate", "burstiness", "input_len", "output_len", "turns"),
        *("shared_prefix", "prefixes", "dataset", "ttft_limit", "itl_limit", "tpot_limit"),
    ),
    "dataset": ("input_len", "output_len", "prompts", "vocab", "shared_prefix", "prefixes"),
}


def serve(
    ctx: typer.Context,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="An OpenAI-compatible server, URL or NAME=URL; several take turns."
            " [default: http://127.0.0.1:8000]"
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Empty: the first that each server names.")] = "",
    dialect: Annotated[
        str, typer.Option(help="completions (/v1/completions), or generate (pdrt's /generate).")
    ] = "completions",
    profile: Annotated[
        str, typer.Option(help="peers: a fixed set of loads instead of the options below.")
    ] = "",
    requests: Annotated[int, typer.Option(min=1, help="Of each round, to each server.")] = 64,
    concurrency: Annotated[
        int,
        typer.Option(min=0, max=4096, help="In flight. [default: 8; with --rate as many as come]"),
    ] = 0,
    rate: Annotated[
        float,
        typer.Option(min=0.0, help="Requests a second that come by chance; inf: all at once."),
    ] = 0.0,
    burstiness: Annotated[
        float,
        typer.Option(help="Of --rate: below 1 more bursts, above 1 more even (gamma); 1: Poisson."),
    ] = 1.0,
    input_len: Annotated[
        str,
        typer.Option(
            "--input", help="Tokens of prompts: 128, 64..256 or lognormal:MEAN:SIGMA[:MOST]."
        ),
    ] = "128",
    output_len: Annotated[str, typer.Option("--output", help="Tokens of the answers.")] = "64",
    turns: Annotated[
        str, typer.Option(help="Of a conversation: each asks with all that was said before.")
    ] = "1",
    prompts: Annotated[
        str, typer.Option(help="ids, or words where a server takes no token ids.")
    ] = "ids",
    vocab: Annotated[
        int, typer.Option(min=4, help="Ids are drawn below this; 256 is in every vocabulary.")
    ] = 256,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that prompts begin with; else none is alike.")
    ] = 0,
    prefixes: Annotated[
        int, typer.Option(min=1, help="So many different ones are shared, in turns.")
    ] = 1,
    dataset: Annotated[
        str, typer.Option(help="A ShareGPT-style JSON file of conversations, instead.")
    ] = "",
    rounds: Annotated[
        int, typer.Option(min=0, help="0: one for one server, five for several.")
    ] = 0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests that do not count.")] = 4,
    ttft_limit: TtftLimit = 2000.0,
    itl_limit: ItlLimit = 100.0,
    tpot_limit: Annotated[
        float, typer.Option(min=0.0, help="Goodput: mean milliseconds of its tokens; 0: any.")
    ] = 0.0,
    timeout: RequestTimeout = 300.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts; 0: a new one.")] = 0,
    api_key: Annotated[
        str,
        typer.Option(envvar="PDRT_API_KEY", show_default=False, help="If the servers want one."),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few requests: a first look.")] = False,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
    plot: Annotated[str, typer.Option(help="Draw them here: .png, .svg or .pdf.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no tables.")] = False,
) -> None:
    """Throughput, TTFT, ITL, TPOT, whole answers and goodput of servers under load.

    Several servers take turns in each round; the table ends with their ratios to the first.
    """
    from pdrt.bench.load import form_of
    from pdrt.bench.prompts import Prompts, kind_of, talks_of
    from pdrt.bench.rounds import Effort
    from pdrt.bench.serve import USUAL_CONCURRENCY, Asked, servers_of
    from pdrt.bench.serve import serve as measure
    from pdrt.bench.shell import Report
    from pdrt.bench.summary import Limits
    from pdrt.sim.lengths import Lengths

    if profile not in ("", "peers"):
        raise ConfigError(f"--profile {profile!r}: peers is the one that there is")
    check_given(ctx)
    servers = servers_of(url or ["http://127.0.0.1:8000"], form_of(dialect))
    few = 1 if quick or len(servers) == 1 else 5
    arrivals = arrivals_of(rate, burstiness)
    asked = Asked(
        servers=servers,
        prompts=Prompts(
            input=Lengths.parse(input_len, "--input"),
            output=Lengths.parse(output_len, "--output"),
            kind=kind_of(prompts),
            vocab=vocab,
            shared_prefix=shared_prefix,
            seed=seed,
            talks=talks_of(dataset),
            turns=Lengths.parse(turns, "--turns"),
            prefixes=prefixes,
        ),
        requests=requests,
        concurrency=concurrency or (0 if arrivals else USUAL_CONCURRENCY),
        arrivals=arrivals,
        effort=Effort(rounds or few, warm_up, timeout, api_key, model),
        limits=Limits(ttft_limit / 1000, itl_limit / 1000, tpot_limit / 1000 or math.inf),
        is_peers=bool(profile),
        is_quick=quick,
    )
    asked.check()
    raise typer.Exit(measure(asked, Report(json_file, plot, quiet), Console(highlight=False)))


def arrivals_of(rate: float, burstiness: float) -> Arrivals | None:
    """None: another request comes when one is over. Raises ConfigError."""
    from pdrt.sim.workload import Arrivals

    if not 0.001 <= burstiness <= 1000:
        raise ConfigError(f"--burstiness {burstiness:g}: want 0.001 to 1000; 1 is Poisson")
    if burstiness != 1 and not 0 < rate < math.inf:
        raise ConfigError("--burstiness is of requests that come by chance: give --rate too")
    return Arrivals(rate, burstiness) if rate else None


def check_given(ctx: typer.Context) -> None:
    """Raises ConfigError for an option that another one makes void."""
    options = {str(each.name): each.opts[0] for each in ctx.command.params}
    sources = {name: ctx.get_parameter_source(name) for name in options}
    is_given = {name for name, source in sources.items() if source and source.name == _TYPED}
    for name, unused in _UNUSED.items():
        for other in is_given.intersection(unused) if ctx.params.get(name) else ():
            raise ConfigError(f"{options[other]} says nothing beside {options[name]}: leave it out")
    if "prefixes" in is_given and not ctx.params.get("shared_prefix"):
        raise ConfigError("--prefixes are of --shared-prefix: say how many tokens they have")
    if "vocab" in is_given and ctx.params.get("prompts") == "words":
        raise ConfigError("--vocab says nothing beside --prompts words: leave it out")
