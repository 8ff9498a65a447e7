"""The timeline that a leader tells: in the answer of /generate, in its log and in its figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from pdrt.control.dispatch import _joined
from pdrt.control.times import PHASES, Times
from pdrt.messages import Output
from pdrt.sched.spent import Phase
from tests.control.leader_rig import BEARER, events_of, out, rigged

SPENT = (("queue", 3.0), ("prefill", 20.0), ("first_decode", 4.0), ("decode", 50.0))


def ticking(step: float = 0.01) -> Iterator[float]:
    now = 100.0
    while True:
        yield now
        now += step


def test_both_sides_know_the_same_phases() -> None:
    assert set(PHASES) == {str(phase) for phase in Phase}


def test_gaps_are_those_between_the_tokens_of_one_choice() -> None:
    times = Times(arrived=1.0)
    times.said(2.0, 0.0, 1)
    times.said(2.5, 0.0, 1)  # another choice's first
    times.said(3.0, 2.0, 1)
    times.said(6.0, 3.0, 4)  # four at once, after a slow reader
    assert (times.first, times.gaps) == (2.0, 5)
    assert times.mean_s == pytest.approx(0.8)
    assert times.longest_s == 3.0


def test_a_phase_that_is_not_known_here_is_not_told() -> None:
    assert Times(0.0, spent_ms=(("queue", 1.0), ("surprise", 2.0))).phases == {"queue": 1.0}


async def test_generate_tells_marks_phases_and_gaps() -> None:
    clock = ticking()
    async with rigged(clock=lambda: next(clock)) as rig:
        asked = asyncio.ensure_future(rig.post("/generate", {"prompt": "abc"}))
        room = (await rig.worker.next_submit()).room
        for said in (
            out("a", spent_ms=SPENT[:2]),
            out("b", spent_ms=SPENT[:3]),
            out("c"),
            out("d", "length", spent_ms=SPENT),
        ):
            rig.worker.say(room, said)
            for _ in range(4):  # until it is read, alone
                await asyncio.sleep(0)
        body = await (await asked).json()
        told = body["timings_ms"]
        assert {name: told[name] for name, _ in SPENT} == dict(SPENT)
        assert told["token_mean"] > 0
        assert told["token_max"] >= told["token_mean"]
        assert 0 < told["tokenise"] <= told["first_token"] <= told["total"]
        text = await (await rig.client.get("/metrics")).text()
        assert "pdrt_token_mean_seconds_count 1.0" in text
        assert "pdrt_token_longest_seconds_count 1.0" in text


async def test_a_stream_tells_them_with_its_end_and_after_a_stop_string_what_is_known() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("a", spent_ms=SPENT[:2]), out("b"), out("STOP"), out("more")]
        asked = {"prompt": "x", "stream": True, "sampling_params": {"stop": "STOP"}}
        events = await events_of(await rig.post("/generate", asked))
        last = json.loads(events[-2][1])
        assert last["timings_ms"]["prefill"] == 20.0
        assert "decode" not in last["timings_ms"]


async def test_openai_answers_have_them_in_the_log_and_in_the_figures_only() -> None:
    async with rigged() as rig:
        rig.worker.script = [out("a", spent_ms=SPENT[:2]), out("b", "length", spent_ms=SPENT)]
        with capture_logs() as logs:
            answer = await rig.post("/v1/completions", {"prompt": "abc"})
            body = await answer.json()
        assert "timings_ms" not in body
        (ended,) = [line for line in logs if line["event"] == "request_ended"]
        assert ended["timings_ms"]["prefill"] == 20.0
        text = await (await rig.client.get("/metrics")).text()
        assert 'pdrt_phase_seconds_sum{phase="prefill"} 0.02' in text


async def test_a_prefill_leg_tells_the_router_and_the_log() -> None:
    async with rigged("prefill") as rig:
        spent = (("bootstrap", 1.0), ("queue", 2.0), ("prefill", 3.0), ("transfer", 4.0))
        rig.worker.script = [out("", "prefilled", spent_ms=spent)]
        with capture_logs() as logs:
            asked = {"prompt": "abc", **rig.leg()}
            body = await (await rig.post("/generate", asked, headers=BEARER)).json()
        assert {name: body["timings_ms"][name] for name, _ in spent} == dict(spent)
        (ended,) = [line for line in logs if line["event"] == "request_ended"]
        assert ended["timings_ms"] == body["timings_ms"]
        text = await (await rig.client.get("/metrics")).text()
        assert 'pdrt_phase_seconds_sum{phase="transfer"} 0.004' in text


def test_outputs_that_are_read_together_tell_the_newest() -> None:
    kept = [
        Output(room=1, spent_ms=SPENT[:1]),
        Output(room=1, spent_ms=SPENT[:2]),
        Output(room=1),
    ]
    assert _joined(kept).spent_ms == SPENT[:2]
