"""`pdrt conformance`: against real clusters, and against servers that are wrong."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import openai
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdrt.cli import app
from pdrt.conformance.check import Check, Failed, NotServed, Result, alike, compared, must, same
from pdrt.conformance.command import named
from pdrt.conformance.endpoint import Endpoint
from pdrt.conformance.shell import Asked, all_checks, checked, chosen, judged, show
from pdrt.control.order import Chat
from pdrt.control.template import ChatTemplate
from pdrt.errors import BadRequest, ConfigError
from tests.conformance.wrong_server import Manner, serving
from tests.e2e.cluster import PATIENT, Cluster

KEY = "a client's key"
# What a leader asked directly does not keep: it tells strangers nothing, not even what is missing.


def nothing(_text: str) -> None:
    return None


async def asked_of(url: str, **more: Any) -> list[list[Result]]:
    asked = Asked(urls=[("wrong", url)], timeout_s=1.0, **more)
    return await checked(asked, all_checks(), nothing)


# Each check can fail.


@pytest.mark.timeout(120)
async def test_every_check_fails_against_some_server_that_is_wrong() -> None:
    verdicts = defaultdict[tuple[str, str], set[str]](set)
    for manner in get_args(Manner):
        async with serving(manner) as url:
            for row in await asked_of(url, api_key=KEY):
                verdicts[row[0].group, row[0].check].add(row[0].verdict)
    assert len(verdicts) == len(all_checks()) > 60
    assert [name for name, found in verdicts.items() if "FAIL" not in found] == []


async def test_a_server_that_hears_nothing_passes_little() -> None:
    async with serving("deaf") as url:
        rows = await asked_of(url)
    passed = [row[0].check for row in rows if row[0].verdict == "pass"]
    assert len(passed) < 20
    assert not {"n = 4", "logprobs", "an unknown field is named"} & set(passed)


async def test_a_failure_says_what_was_expected_and_what_came() -> None:
    async with serving("empty") as url:
        rows = await asked_of(url)
    failed = [row[0] for row in rows if row[0].verdict == "FAIL"]
    assert failed
    assert all("expected" in result.why for result in failed)


# How a check ends.


def test_must_and_same_name_both_sides() -> None:
    must(True, "a", "b")
    same(1, 1, "one")
    with pytest.raises(Failed, match="expected two, got 'three'"):
        must(False, "two", "three")
    with pytest.raises(Failed, match="it: expected 1, got 2"):
        same(1, 2, "it")


def test_a_model_that_takes_no_tools_does_not_support_them_and_has_not_failed() -> None:
    template = ChatTemplate("{{ messages }}", {}, datetime.now)
    with pytest.raises(BadRequest) as refused:
        template.render(Chat(({"role": "user", "content": "hi"},), {}, ({"type": "function"},)))
    answer: Any = SimpleNamespace(status_code=400, headers={}, request=None)
    told = openai.BadRequestError(str(refused.value), response=answer, body=None)
    assert judged(told)[0] == "not supported"


def test_what_is_ours_is_not_blamed_on_the_server() -> None:
    assert judged(KeyError("x"))[0] == "FAIL"
    with pytest.raises(RuntimeError):
        judged(RuntimeError("ours"))


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        ([0.5, {"a": -1.25}], [0.5005, {"a": -1.2501}], True),
        ([0.5], [0.52], False),
        ("a", "b", False),
        ({"a": 1}, {"b": 1}, False),
        ([1], [1, 2], False),
        ((1, "x"), [1, "x"], True),
    ],
)
def test_answers_are_alike_but_for_rounding(one: object, other: object, is_alike: bool) -> None:
    assert alike(one, other) is is_alike


async def _never(_endpoint: Endpoint) -> object:
    raise NotServed("no")


def test_two_servers_are_compared_where_both_pass() -> None:
    checks = [Check("g", "c", _never, is_compared=True), Check("g", "d", _never)]

    def results(told: object, verdict: Any = "pass") -> list[Result]:
        return [Result("c", "g", "a", "pass", told="x"), Result("c", "g", "b", verdict, told=told)]

    def verdict(*pair: list[Result]) -> tuple[str, str]:
        ((found,),) = compared(checks, pair)
        return found.verdict, found.why

    other = results("x")
    assert verdict(results("x"), other) == ("pass", "")
    assert verdict(results("y"), other) == ("FAIL", "a says 'x', b 'y'")
    assert verdict(results("y", "not supported"), other) == ("not compared", "b: not supported")


def test_the_table_has_a_column_an_endpoint_and_the_reasons(tmp_path: Path) -> None:
    rows = [[Result("c", "g", "a", "pass"), Result("c", "g", "b", "FAIL", "expected 1, got [2]")]]
    file = tmp_path / "out"
    with file.open("w") as out:
        show(Console(file=out, width=100), ["a", "b"], rows)
    text = file.read_text()
    assert "b: c: FAIL: expected 1, got [2]" in text
    assert "a: 1 pass" in text
    assert "b: 1 FAIL" in text


# The command.


def test_checks_can_be_chosen() -> None:
    assert {check.group for check in chosen("refusals")} == {"refusals"}
    with pytest.raises(ConfigError, match="no check has that"):
        chosen("nonsense")


def test_urls_have_names_of_their_own() -> None:
    assert named(["http://a:1/v1/", "b=https://c"]) == [("a:1", "http://a:1"), ("b", "https://c")]
    for wrong in (["a"], ["x=http://a", "x=http://b"]):
        with pytest.raises(ConfigError, match="--url"):
            named(wrong)


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["conformance", "--url", "http://127.0.0.1:9", "--quiet"])
    assert "nobody serves at http://127.0.0.1:9" in str(ran.exception)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hybrid_and_1p1d_conform_and_answer_alike(tmp_path: Path) -> None:
    """CASES 85, 86, 87, 89, 90, 93, 94: as the official client sees them, whole and streamed."""
    keys = {"security": {"api_keys": [KEY]}}
    cluster = Cluster.make(tmp_path, 1, 1, 0, PATIENT, router=keys)
    cluster.add_node("hybrid0", "hybrid", PATIENT, keys)
    file = tmp_path / "results.json"
    cluster.start()
    try:
        urls = [f"hybrid={cluster.nodes['hybrid0'].url}", f"pd={cluster.url}"]
        options = [part for url in urls for part in ("--url", url)]
        command = ["conformance", *options, "--api-key", KEY, "--json", str(file)]
        async with cluster.session():
            ran = await asyncio.to_thread(CliRunner().invoke, app, command)
    finally:
        await asyncio.to_thread(cluster.stop)
    found = json.loads(file.read_text())
    failed = {(each["endpoint"], each["check"]) for each in found if each["verdict"] == "FAIL"}
    assert not failed, ran.output
    assert ran.exit_code == 0, ran.output
    assert sum(each["verdict"] == "pass" for each in found) > 100
