"""`pdrt bench serve`: figures, rounds, comparisons, and a run against real processes."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdrt.bench import peers
from pdrt.bench.heard import Record, Told
from pdrt.bench.load import Ran, Server
from pdrt.bench.prompts import Prompts
from pdrt.bench.rounds import Effort, Load, measure, rotated
from pdrt.bench.serve import Asked, fresh, points, serve, servers_of, show, tell_busy, tell_failures
from pdrt.bench.serve_plot import shares
from pdrt.bench.shell import Report
from pdrt.bench.summary import METRICS, Limits, Spread, Turn, quantile, ratio, ratios
from pdrt.cli import app
from pdrt.errors import ConfigError, Unavailable
from pdrt.sim.lengths import Lengths, exactly
from pdrt.sim.workload import Arrivals
from tests.bench.scripted import Scripted, documented, serving
from tests.e2e.cluster import Cluster

PROMPTS = Prompts(Lengths(8, 8), Lengths(4, 4), seed=1)


def answer(first: float, gap: float, tokens: int = 3, began: float = 0.0) -> Told:
    at = [began + first + gap * number for number in range(tokens)]
    return Told(began, at[-1], at, tokens, over_at=at[-1])


def turn(*answers: Told, seconds: float = 2.0) -> Turn:
    return Turn(list(answers), seconds=seconds)


def asked(urls: Sequence[str], **more: object) -> Asked:
    usual = Asked(
        servers=servers_of(urls),
        prompts=PROMPTS,
        requests=6,
        concurrency=3,
        effort=Effort(rounds=2, warm_up=2, timeout_s=20.0),
        limits=Limits(),
    )
    return replace(usual, **more)  # type: ignore[arg-type]


async def at_once() -> bool:
    return True


# Figures.


def test_a_spread_has_a_mean_and_quantiles_in_milliseconds() -> None:
    spread = Spread.of([n / 1000 for n in range(1, 101)])
    assert spread is not None
    found = spread.json()
    assert found == pytest.approx({"mean": 50.5, "p50": 50.5, "p90": 91, "p99": 100, "max": 100})
    assert Spread.of([]) is None


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_a_quantile_is_one_of_the_values(share: float, expected: float) -> None:
    assert quantile([1, 2, 3, 4], share) == expected


@pytest.mark.parametrize(
    ("told", "is_kept"),
    [
        (answer(1.0, 0.1), True),
        (answer(1.01, 0.1), False),
        (answer(1.0, 0.11), False),
        (answer(1.0, 9.0, tokens=1), True),  # there is no time between tokens
        (Told(0.0), False),
    ],
)
def test_goodput_counts_answers_that_keep_both_limits(told: Told, is_kept: bool) -> None:
    limits = Limits(ttft_s=1.0, itl_s=0.1 + 1e-9)
    assert limits.are_kept(told) is is_kept
    good = turn(told, answer(0.1, 0.01), answer(5.0, 0.01))
    assert good.goodput_per_s(limits) == (1 + is_kept) / 2


def gapped(*gaps_s: float) -> Told:
    at = [1.0, *itertools.accumulate(gaps_s, initial=1.0)][1:]
    return Told(0.0, at[-1], at, len(at), over_at=at[-1])


def test_goodput_looks_at_each_gap_and_not_at_their_mean() -> None:
    limits = Limits(ttft_s=2.0, itl_s=0.1)
    assert limits.are_kept(gapped(*[0.01] * 98, 0.09))
    assert not limits.are_kept(gapped(*[0.01] * 98, 0.2)), "of fewer than 100 none may be late"
    assert limits.are_kept(gapped(*[0.01] * 99, 0.2))
    assert not limits.are_kept(gapped(*[0.01] * 98, 0.2, 0.2))


def test_goodput_may_ask_for_the_mean_as_well() -> None:
    told = gapped(0.02, 0.04)
    assert Limits(tpot_s=0.031).are_kept(told)
    assert not Limits(tpot_s=0.029).are_kept(told)
    assert "TPOT <= 29 ms" in str(Limits(tpot_s=0.029))


def test_time_per_token_is_of_requests_and_between_tokens_of_gaps() -> None:
    one = turn(gapped(0.1, 0.1, 0.1, 0.1), gapped(0.3), gapped())
    assert one.tpot is not None
    assert one.itl is not None
    assert one.tpot.mean == pytest.approx(200)
    assert one.itl.mean == pytest.approx(140)


def test_throughput_is_of_the_whole_turn() -> None:
    one = turn(answer(0.5, 0.1), answer(0.5, 0.1, tokens=5))
    assert (one.output_tok_per_s, one.requests_per_s) == (4.0, 1.0)
    whole = Turn.pooled([one, turn(answer(0.5, 0.1), seconds=6.0)])
    assert (whole.output_tok_per_s, whole.requests_per_s) == (11 / 8, 3 / 8)


def test_several_tokens_an_event_count_as_so_many() -> None:
    told = replace(answer(0.5, 0.2), tokens=6)
    assert turn(told).token_s == pytest.approx(0.1)
    assert turn(answer(0.5, 0.2)).token_s == pytest.approx(0.2)
    assert turn().token_s is None


def test_a_ratio_is_the_median_of_same_round_ratios() -> None:
    mine, first = [10.0, 40.0, 9.0], [5.0, 10.0, 4.0]  # 2, 4, 2.25; of the medians it would be 2
    assert ratio(mine, first) == 2.25
    assert ratio([None, 8.0], [1.0, 2.0]) == 4.0
    assert ratio([None], [1.0]) is None
    assert ratio([1.0], [0.0]) is None


def test_servers_are_compared_in_every_figure_that_both_have() -> None:
    slow, fast = [turn(answer(0.4, 0.2), seconds=4.0)], [turn(answer(0.2, 0.1))]
    found = ratios(slow, fast)
    assert found["output_tok_per_s"] == pytest.approx(0.5)
    assert found["ttft_p50"] == found["itl_p99"] == found["itl_p50"] == pytest.approx(2.0)
    assert "itl_p50" not in ratios([turn(answer(0.4, 0.2, tokens=1))], fast)


def test_failures_are_counted_by_code_and_leave_the_latencies_alone() -> None:
    records = [Record(0.0, 1.0, failure="timeout", reason=reason) for reason in ("r", "s")]
    found = Turn.of(Ran(records, 2.0, 0.1))
    assert (found.errors, dict(found.failures), found.reasons) == (
        2,
        {"timeout": 2},
        {"timeout": "r"},
    )
    assert (found.answers, found.ttft) == ([], None)
    out = io.StringIO()
    servers, turns = [Server("a", "http://a")], {("load", "a"): [found]}
    assert tell_failures(Console(file=out), servers, turns)
    assert "a: 2 x timeout, the first: r" in out.getvalue()
    assert not tell_failures(Console(file=out), servers, {("load", "a"): [turn()]})


def test_a_distribution_is_drawn_from_its_first_to_its_last_value() -> None:
    assert shares([0.002, 0.001]) == ([1.0, 2.0], [0.5, 1.0])
    ms, share = shares([n / 1000 for n in range(10_003)])
    assert len(ms) < 2100
    assert (ms[-1], share[-1]) == (10_002, 1.0)
    assert shares([]) == ([], [])


# Rounds.


def test_turns_rotate() -> None:
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


async def test_each_server_has_a_turn_in_each_round_and_the_warm_up_does_not_count() -> None:
    one, other, steps = Scripted(), Scripted(), list[str]()
    async with serving(one) as url, serving(other) as url2:
        servers = servers_of([f"a={url}", f"b={url2}"])
        loads = [Load("x", PROMPTS, 3, 2), Load("y", PROMPTS, 2, 0, Arrivals(1000.0))]
        effort = Effort(2, 1, 5.0)
        turns = await measure(servers, loads, effort, steps.append, at_once)
    assert {name: [len(t.answers) for t in found] for name, found in turns.items()} == {
        ("x", "a"): [3, 3],
        ("x", "b"): [3, 3],
        ("y", "a"): [2, 2],
        ("y", "b"): [2, 2],
    }
    warm_up, before_each_turn = 2 * 1, 2 * 2
    counted = 2 * (3 + 2)
    assert len(one.bodies) == len(other.bodies) == warm_up + before_each_turn + counted
    assert effort.requests(2, loads) == len(steps) == 20
    assert steps == [
        *(["x: a"] * 3 + ["x: b"] * 3 + ["y: a"] * 2 + ["y: b"] * 2),
        *(["x: b"] * 3 + ["x: a"] * 3 + ["y: b"] * 2 + ["y: a"] * 2),
    ]


async def test_before_a_turn_among_others_the_machine_gets_quiet_and_the_server_is_asked() -> None:
    servers, seen, told = [Scripted(), Scripted()], list[tuple[int, ...]](), iter([True, False] * 2)

    async def quiet() -> bool:
        seen.append(tuple(len(server.bodies) for server in servers))
        assert not any(server.in_flight for server in servers)
        return next(told)

    async with serving(servers[0]) as url, serving(servers[1]) as url2:
        both = servers_of([f"a={url}", f"b={url2}"])
        loads = [Load("x", PROMPTS, 3, 2)]
        turns = await measure(both, loads, Effort(2, 0, 5.0), lambda _whose: None, quiet)
    assert seen == [(0, 0), (4, 0), (4, 4), (4, 8)]
    busy = {name: [turn.busy for turn in found] for (_, name), found in turns.items()}
    assert busy == {"a": [0, 1], "b": [1, 0]}
    for server in servers:
        shapes = {(len(body["prompt"]), body["max_tokens"]) for body in server.bodies}
        assert shapes == {(8, 4)}, "what does not count is like what does"
        assert len({tuple(body["prompt"]) for body in server.bodies}) == 8, "and not the same"


async def test_what_a_server_answers_before_its_turn_does_not_count() -> None:
    one, other = Scripted(script=[429]), Scripted()
    async with serving(one) as url, serving(other) as url2:
        servers = servers_of([f"a={url}", f"b={url2}"])
        loads = [Load("x", PROMPTS, 3, 1)]
        turns = await measure(servers, loads, Effort(1, 0, 5.0), lambda _whose: None, at_once)
    assert [(len(t.answers), t.errors) for t in turns["x", "a"]] == [(3, 0)]


async def test_no_two_prompts_of_a_run_begin_alike_whatever_their_loads() -> None:
    """A prefix cache would spare one server what it does not spare another."""
    scripted = Scripted()
    async with serving(scripted) as url:
        loads = peers.loads(PROMPTS, is_quick=True)
        await measure(servers_of([url]), loads, Effort(2, 2, 5.0), lambda _whose: None)
    begins = [tuple(body["prompt"][:16]) for body in scripted.bodies]
    assert len(set(begins)) == len(begins) == 4 * 2 + 2 * (2 + 16 + 2 + 2)


async def test_a_server_alone_waits_for_nothing_and_is_asked_nothing_more() -> None:
    async def quiet() -> bool:
        raise AssertionError("nobody was here before")

    scripted = Scripted()
    async with serving(scripted) as url:
        loads = [Load("x", PROMPTS, 3, 1)]
        await measure(servers_of([url]), loads, Effort(2, 0, 5.0), lambda _whose: None, quiet)
    assert len(scripted.bodies) == 6


async def test_a_server_that_cannot_warm_up_is_not_measured() -> None:
    scripted = Scripted(script=[429])
    async with serving(scripted) as url:
        with pytest.raises(Unavailable, match="a, warming up: overloaded: too many"):
            await measure(
                servers_of([f"a={url}"]), [Load("x", PROMPTS, 1, 1)], Effort(1, 1, 5.0), print
            )


async def test_later_failures_are_figures_too() -> None:
    scripted = Scripted(script=[429])
    async with serving(scripted) as url:
        loads = [Load("x", PROMPTS, 3, 1)]
        turns = await measure(servers_of([f"a={url}"]), loads, Effort(1, 0, 5.0), print)
    [found] = turns["x", "a"]
    assert (len(found.answers), dict(found.failures)) == (2, {"overloaded": 1})


# The command.


def test_two_servers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="same name"):
        servers_of(["http://h:1", "h:1/v1"])


def test_a_run_has_new_prompts_unless_a_seed_is_given() -> None:
    seeds = {fresh(replace(PROMPTS, seed=0)).seed for _ in range(4)}
    assert len(seeds) == 4
    assert 0 not in seeds
    assert fresh(PROMPTS) is PROMPTS


def test_tables_and_points_tell_the_same() -> None:
    wanted = asked(["a=h:1", "b=h:2"])
    turns = {
        ("load", "a"): [turn(answer(0.2, 0.1)), turn(answer(0.2, 0.1))],
        ("load", "b"): [turn(answer(0.4, 0.1)), turn(answer(0.6, 0.1))],
    }
    out = io.StringIO()
    show(Console(file=out, width=120), wanted.servers, turns, wanted.limits)
    lines = {
        line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if "│" in line
    }
    assert "500.0" in lines["TTFT p50, ms"]
    assert "2.50" in lines["ttft_p50 of a's"]
    first, second = points(wanted, turns)
    assert (first["name"], second["name"]) == ("a", "b")
    spec = {"completed", "errors", "requests_per_s", "output_tok_per_s", "goodput_per_s"}
    assert spec | {"ttft_ms", "itl_ms", "e2e_ms"} <= second.keys()
    assert second["of_first"]["ttft_p50"] == pytest.approx(2.5)  # type: ignore[index]
    assert {"mean", "p50", "p90", "p99"} <= second["itl_ms"].keys()  # type: ignore[attr-defined]


def test_every_key_of_the_json_is_in_the_docs_and_no_other() -> None:
    turns = {("load", "a"): [turn(answer(0.2, 0.1))]}
    [steady] = points(asked(["a=h:1"]), turns)
    [told] = points(asked(["a=h:1"], arrivals=Arrivals(math.inf), concurrency=0), turns)
    assert set(told) == set(steady) == documented("### JSON of a load")
    assert json.loads(json.dumps(told, allow_nan=False))["rate"] == "inf"
    spread = {"mean", "p50", "p90", "p99", "max"}
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert told[name].keys() == spread  # type: ignore[attr-defined]
    text = Path(__file__).parents[2].joinpath("docs/benchmarks.md").read_text()
    assert all(f"`{name}`" in text for name in METRICS)


def test_turns_that_began_on_a_busy_machine_are_told() -> None:
    turns = [Turn([answer(0.2, 0.1)], seconds=2.0, busy=busy) for busy in (1, 0, 1)]
    told = [io.StringIO(), io.StringIO()]
    tell_busy(Console(file=told[0], width=120), Turn.pooled(turns), 3)
    tell_busy(Console(file=told[1], width=120), Turn.pooled(turns[1:2]), 1)
    assert "2 of 3 turns began on a busy machine" in told[0].getvalue()
    assert told[1].getvalue() == ""
    wanted = asked(["a=h:1", "b=h:2"])
    of_loads = {("load", "a"): turns, ("load", "b"): turns[1:2] * 3}
    assert [each["busy_turns"] for each in points(wanted, of_loads)] == [2, 0]
    of_rows = {(row.load, name): turns for row in peers.ROWS for name in ("a", "b")}
    found = peers.points(wanted.servers, of_rows)
    assert {each["busy_turns"] for each in found} == {2}


def test_peers_are_compared_row_by_row() -> None:
    servers = servers_of(["a=h:1", "b=h:2"])
    loads = peers.loads(PROMPTS, is_quick=False)
    assert {(load.title, load.concurrency) for load in loads} == {
        ("single", 1),
        ("streams", 8),
        ("512", 1),
        ("2048", 1),
    }
    turns = {
        (load.title, server.name): [turn(answer(0.5 * times, 0.1 * times)) for _ in range(2)]
        for load in loads
        for times, server in enumerate(servers, 1)
    }
    found = {
        (told["name"], told["row"]): (told["value"], told["of_first"])
        for told in peers.points(servers, turns)
    }
    assert found["a", "decode, single stream"] == (pytest.approx(10), 1.0)
    assert found["b", "decode, 8 streams"] == (pytest.approx(40), pytest.approx(0.5))
    assert found["b", "8 streams with prefill"] == (1.5, 1.0)
    assert found["b", "first token, prompt of 2048"] == (pytest.approx(1000), pytest.approx(2.0))
    out = io.StringIO()
    peers.show(Console(file=out, width=120), servers, turns)
    assert "1000 ms (2.00)" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "x"], "peers"),
        (["--input", "x"], "--input"),
        (["--prompts", "x"], "ids or words"),
        (["--url", "ftp://h"], "--url"),
        (["--plot", "x.gif"], ".png"),
        (["--profile", "peers", "--plot", "x.png"], "--plot"),
        (["--profile", "peers", "--input", "9"], "--input says nothing beside --profile"),
        (["--dataset", "x", "--output", "9"], "--output says nothing beside --dataset"),
        (["--prefixes", "3"], "--shared-prefix"),
        (["--prompts", "words", "--vocab", "9"], "--vocab says nothing"),
        (["--dialect", "chat"], "--dialect 'chat'"),
        (["--burstiness", "0.5"], "give --rate"),
        (["--burstiness", "0.5", "--rate", "inf"], "give --rate"),
        (["--burstiness", "0", "--rate", "1"], "--burstiness 0"),
        (["--rate", "1e-9"], "more than a day"),
        (["--turns", "3"], "--dialect generate"),
        (["--input", "lognormal:5:9"], "lognormal:MEAN"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_real_server_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pdrt[plot]'")
    cluster = Cluster.make(tmp_path, 0, 0, 1)
    cluster.startup_s = 100.0  # on a machine that others use too
    cluster.start()
    try:
        asyncio.run(_until_ready(cluster))
        out, file, picture = io.StringIO(), tmp_path / "x.json", tmp_path / "x.png"
        wanted = asked([f"hybrid={cluster.url}"])
        console = Console(file=out, width=100)
        assert serve(wanted, Report(str(file), str(picture)), console) == 0
        [told] = json.loads(file.read_text())
        assert (told["completed"], told["errors"], told["output_tokens"]) == (12, 0, 48)
        assert (told["prompt_tokens"], told["cached_tokens"]) == (12 * 8, 0)
        assert 0 < told["ttft_ms"]["p50"] <= told["e2e_ms"]["p50"]
        assert picture.stat().st_size > 1000
        assert "the client itself used" in out.getvalue()
        quick = replace(wanted, is_peers=True, is_quick=True, effort=Effort(1, 1, 20.0))
        assert serve(quick, Report(str(file), is_quiet=True), console) == 0
        told = json.loads(file.read_text())
        assert [row["row"] for row in told] == [row.title for row in peers.ROWS]
        assert all(row["value"] > 0 and row["of_first"] == 1.0 for row in told[2:])
        talks = replace(PROMPTS, input=exactly(24), turns=exactly(3), seed=7)
        servers = servers_of([f"hybrid={cluster.url}"], "generate")
        all_at_once = {"arrivals": Arrivals(math.inf), "concurrency": 0}
        turns = asked([], servers=servers, prompts=talks, effort=Effort(1, 0, 20.0), **all_at_once)
        assert serve(turns, Report(str(file), is_quiet=True), console) == 0
        [told] = json.loads(file.read_text())
        assert (told["completed"], told["rate"], told["dialect"]) == (6, "inf", "generate")
        assert told["prompt_tokens"] == 2 * (24 + 52 + 80)  # the answers of 4 are in them
        assert told["cached_tokens"] >= 2 * (16 + 48)  # what was said before is known
    finally:
        cluster.stop()
    assert "measured" in capfd.readouterr().err


async def _until_ready(cluster: Cluster) -> None:
    async with cluster.session():
        """It is."""
