"""`pdrt bench serve`: what clients of OpenAI-compatible servers would see, one or several."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console
from rich.table import Table

from pdrt.bench import peers
from pdrt.bench.bar import Bar
from pdrt.bench.facts import machine_facts
from pdrt.bench.load import Form, Server
from pdrt.bench.prompts import Prompts
from pdrt.bench.rounds import Effort, Load, Turns, measure
from pdrt.bench.serve_plot import draw
from pdrt.bench.shell import Report, run, write_points
from pdrt.bench.summary import Limits, Turn, point, ratios
from pdrt.errors import ConfigError
from pdrt.sim.workload import Arrivals

_BUSY: Final = 0.5  # of a core: above, the client's own queue shows in the figures
_MANY: Final = 1.2  # tokens an event: gaps are no longer those of tokens
_LOAD: Final = "load"
_LONGEST_S: Final = 86400.0  # until the last request has come
USUAL_CONCURRENCY: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    servers: Sequence[Server]
    prompts: Prompts
    requests: int
    concurrency: int  # 0: no limit, where they arrive
    effort: Effort
    limits: Limits
    arrivals: Arrivals | None = None
    is_peers: bool = False
    is_quick: bool = False

    def check(self) -> None:
        """Raises ConfigError."""
        has_turns = self.prompts.turns.most > 1
        is_text = self.prompts.kind == "words" or self.prompts.talks
        if has_turns and not is_text and any(one.form == "completions" for one in self.servers):
            raise ConfigError(
                "--turns: /v1/completions tells an answer's text and not its ids, which the next"
                " prompt needs: give --prompts words, or --dialect generate for pdrt"
            )
        if self.arrivals is not None and self.requests / self.arrivals.rate > _LONGEST_S:
            raise ConfigError(
                f"--rate {self.arrivals.rate:g}: {self.requests} requests would come over more than"
                " a day: ask for a higher rate or fewer --requests"
            )

    def loads(self) -> list[Load]:
        if self.is_peers:
            return peers.loads(self.prompts, is_quick=self.is_quick)
        few = 2 * (self.concurrency or USUAL_CONCURRENCY)
        requests = min(self.requests, few) if self.is_quick else self.requests
        return [Load(_LOAD, self.prompts, requests, self.concurrency, self.arrivals)]


def servers_of(urls: Sequence[str], form: Form = "completions") -> list[Server]:
    """Raises ConfigError for a name that is there twice."""
    servers = [Server.parse(url, form) for url in urls]
    if len({server.name for server in servers}) < len(servers):
        raise ConfigError("--url: two servers have the same name: give NAME=URL")
    return servers


def fresh(prompts: Prompts) -> Prompts:
    """With a seed that no run had before, unless there is one."""
    return prompts if prompts.seed else replace(prompts, seed=1 + secrets.randbits(32))


def serve(asked: Asked, report: Report, console: Console) -> int:
    """Measure and report; the exit status is 1 when a request failed. Raises PdrtError."""
    report.check()
    if report.plot and asked.is_peers:
        raise ConfigError("--plot draws distributions, which --profile peers has none of")
    asked = replace(asked, prompts=fresh(asked.prompts))
    loads = asked.loads()
    total = asked.effort.requests(len(asked.servers), loads)
    with Bar(report.is_quiet, total, "warming up") as bar:
        turns = run(measure(asked.servers, loads, asked.effort, bar.step))
    if not report.is_quiet:
        if asked.is_peers:
            peers.show(console, asked.servers, turns)
        else:
            show(console, asked.servers, turns, asked.limits)
        whole = Turn.pooled([turn for each in turns.values() for turn in each])
        tell_busy(console, whole, sum(map(len, turns.values())))
        tell_client(console, whole)
    failed = tell_failures(Console(stderr=True, highlight=False), asked.servers, turns)
    if report.json_file:
        write_points(report.json_file, points(asked, turns))
    if report.plot:
        draw(report.plot, {s.name: Turn.pooled(turns[_LOAD, s.name]) for s in asked.servers})
    return 1 if failed else 0


def points(asked: Asked, turns: Turns) -> list[Mapping[str, object]]:
    """For `--json`."""
    machine = machine_facts()
    if asked.is_peers:
        return [{**told, "machine": machine} for told in peers.points(asked.servers, turns)]
    first = turns[_LOAD, asked.servers[0].name]
    load = {
        **told_load(asked.prompts, asked.concurrency, asked.arrivals),
        "requests": asked.loads()[0].requests,
        "rounds": asked.effort.rounds,
        "machine": machine,
    }
    return [
        {
            "name": server.name,
            "url": server.base,
            "dialect": server.form,
            **point(Turn.pooled(mine), asked.limits),
            "of_first": ratios(mine, first),
            "busy_turns": sum(turn.busy for turn in mine),
            **load,
        }
        for server in asked.servers
        for mine in [turns[_LOAD, server.name]]
    ]


def told_load(
    prompts: Prompts, concurrency: int, arrivals: Arrivals | None
) -> dict[str, str | int | float | None]:
    """What was asked of a server; JSON has no infinite numbers."""
    rate = arrivals.rate if arrivals else None
    is_random = not prompts.talks
    return {
        "input_len": str(prompts.input) if is_random else "dataset",
        "output_len": str(prompts.output) if is_random else "dataset",
        "turns": str(prompts.turns),
        "shared_prefix": prompts.shared_prefix,
        "prefixes": prompts.prefixes,
        "rate": "inf" if rate == math.inf else rate,
        "burstiness": arrivals.burstiness if arrivals else None,
        "concurrency": concurrency or None,
        "seed": prompts.seed,
    }


# For a person.


def show(console: Console, servers: Sequence[Server], turns: Turns, limits: Limits) -> None:
    """Figures of all rounds together; ratios are between figures of the same round."""
    first = turns[_LOAD, servers[0].name]
    table = Table("", *(server.name for server in servers))
    pooled = [Turn.pooled(turns[_LOAD, server.name]) for server in servers]
    against = [ratios(turns[_LOAD, server.name], first) for server in servers]
    for title, cells in _rows(pooled, limits):
        table.add_row(title, *cells)
    if len(servers) > 1:
        table.add_section()
        for name in against[0]:
            told = [f"{each[name]:.2f}" if name in each else "none" for each in against]
            table.add_row(f"{name} of {servers[0].name}'s", *told)
    console.print(table)
    console.print(str(limits))


def _rows(pooled: Sequence[Turn], limits: Limits) -> Iterator[tuple[str, list[str]]]:
    yield "completed, errors", [f"{len(turn.answers)}, {turn.errors}" for turn in pooled]
    yield "output tok/s", [f"{turn.output_tok_per_s:.1f}" for turn in pooled]
    yield "requests/s", [f"{turn.requests_per_s:.2f}" for turn in pooled]
    yield "goodput/s", [f"{turn.goodput_per_s(limits):.2f}" for turn in pooled]
    spreads = {
        "TTFT": [turn.ttft for turn in pooled],
        "ITL": [turn.itl for turn in pooled],
        "TPOT": [turn.tpot for turn in pooled],
        "E2E": [turn.e2e for turn in pooled],
    }
    for name, those in spreads.items():
        for part in ("mean", "p50", "p90", "p99"):
            told = [spread.json()[part] if spread else None for spread in those]
            yield f"{name} {part}, ms", ["none" if ms is None else f"{ms:.1f}" for ms in told]
    if any(turn.tokens_per_event > _MANY for turn in pooled):
        yield "tokens an event", [f"{turn.tokens_per_event:.2f}" for turn in pooled]


def tell_busy(console: Console, whole: Turn, turns: int) -> None:
    if whole.busy:
        advice = "what else runs here shows in their figures"
        console.print(f"{whole.busy} of {turns} turns began on a busy machine: {advice}")


def tell_client(console: Console, whole: Turn) -> None:
    share = whole.client_share
    advice = "; that much shows in the figures: lower the load" if share > _BUSY else ""
    console.print(f"the client itself used {share:.1%} of one core{advice}")


def tell_failures(err: Console, servers: Sequence[Server], turns: Turns) -> bool:
    """A line for each kind of failure of each server; whether there was any."""
    has_failed = False
    for server in servers:
        mine = Turn.pooled(
            [t for (_, name), ts in turns.items() if name == server.name for t in ts]
        )
        for code, count in mine.failures.most_common():
            has_failed = True
            line = f"{server.name}: {count} x {code}, the first: {mine.reasons[code]}"
            err.print(line, style="red", soft_wrap=True, markup=False)
    return has_failed
