"""The overview: what the router knows, as one bounded document of plain values."""

from __future__ import annotations

import json
from random import Random

import pytest

from pdrt.config import Target
from pdrt.control.breaker import Circuit
from pdrt.control.instances import Instance, Status
from pdrt.control.legs import State
from pdrt.control.overview import MOST_PAIRS, MOST_REQUESTS, STAGES, VERSION, condition
from pdrt.control.pairs import Faulted, feed
from pdrt.control.screen import MOST_ERRORS, MOST_WORDS
from pdrt.errors import Overloaded, PeerLost
from tests.control.overview_samples import (
    NOW,
    Cluster,
    Nobody,
    cluster,
    hold,
    instance,
    request,
    told,
    under_load,
)


def test_an_instance_is_told_with_its_load_and_what_it_does_now() -> None:
    made = under_load(cluster(), 30, 0)
    hold(made.decode[0], 3)
    prefill, decode = made.view()["instances"]
    assert (decode["name"], decode["role"]) == (made.decode[0].name, "decode")
    assert (decode["condition"], decode["health"], decode["state"]) == ("ready", "alive", "ready")
    assert (decode["legs"], decode["queued_tokens"]) == (3, 1260)
    assert (decode["running"], decode["waiting"], decode["retractions"]) == (4, 1, 1)
    assert decode["kv_blocks"]["total"] == 4096
    assert 300 < decode["tokens_per_s"] < 800
    assert (decode["prompt_tokens_per_s"], decode["sent_gb_per_s"]) == (0, 0)
    assert prefill["tokens_per_s"] == 0
    assert 0.1 < prefill["sent_gb_per_s"] < 0.35
    assert decode["workers"] == {"ready": 1, "total": 1, "last_problem": None}


def test_models_are_those_of_who_is_heard_whether_they_say_so_or_are_listed_with_one() -> None:
    plain = Instance("decode", Target(http="127.0.0.9:1", model="listed"), Nobody())
    made = Cluster(decode=[instance("decode", 1), plain])
    assert made.view()["models"] == ["SmolLM2-135M-Instruct"]
    plain.heard(Status(role="decode", state="ready"))
    assert made.view()["models"] == ["SmolLM2-135M-Instruct", "listed"]


def test_the_last_problem_of_a_worker_is_told() -> None:
    worker = {"rank": "0,0,0", "state": "loading", "last_problem": "it ended with signal 9"}
    made = Cluster(decode=[instance("decode", 1, told("decode", 1, workers=[worker]))])
    workers = made.view()["instances"][0]["workers"]
    assert workers == {"ready": 0, "total": 1, "last_problem": "it ended with signal 9"}


@pytest.mark.parametrize(
    ("state", "ranks", "word"),
    [
        ("ready", [0], "ready"),
        ("ready", [], "starting"),
        ("loading", [], "starting"),
        ("draining", [0], "draining"),
        ("failed", [], "down"),
    ],
)
def test_one_word_says_how_an_instance_is(state: str, ranks: list[int], word: str) -> None:
    found = instance("decode", 1, told("decode", 1, state=state, ready_ranks=ranks))
    assert condition(found) == word


def test_one_that_is_well_and_gets_nothing_says_why_in_a_word() -> None:
    found = instance("decode", 1)
    found.breaker.state = Circuit.OPEN
    assert condition(found) == "failing"
    drained = instance("decode", 1)
    drained.is_drained = True
    assert condition(drained) == "draining"


def test_silence_and_death_are_words_too() -> None:
    found = instance("decode", 1)
    found.missed("no answer within 1 s")
    assert condition(found) == "suspect"
    found.missed("no answer within 1 s")
    assert condition(found) == "down"
    never = Instance("decode", Target(http="127.0.0.1:1"), Nobody())
    assert condition(never) == "unknown"
    never.died("cannot connect: Connection refused")
    assert condition(never) == "down"


def test_a_dead_instance_is_told_with_the_reason_and_no_old_figures() -> None:
    made = under_load(cluster(), 10, 0)
    made.decode[0].died("cannot connect: Connection refused")
    made.screen.look(made.instances)
    row = made.view()["instances"][1]
    assert row["condition"] == "down"
    assert "Connection refused" in row["reason"]
    assert row["tokens_per_s"] == 0
    assert "kv_blocks" not in row


def test_a_pair_is_told_with_its_trust_its_canary_and_its_way() -> None:
    made = cluster(prefill=1, decode=1, hybrid=1)
    feed(made.pairs[0], Faulted())
    made.pairs[0].reason = "a fault in decode"
    split, alone = made.view()["pairs"]
    assert (split["trust"], split["reason"]) == ("doubtful", "a fault in decode")
    assert (split["path"], split["canary_ms"]) == ("disagg", 23.4)
    assert (split["transport"], split["gb_per_s"]) == ("shm", 5.32)
    assert (alone["prefill"], alone["path"], alone["transport"]) == (None, "local", None)


def test_a_way_that_is_told_in_other_words_is_passed_on_without_a_speed() -> None:
    ways = {"tcp://127.0.0.2:7000#1.1": "pigeons"}
    worker = {"rank": "0,0,0", "state": "ready", "transports": ways}
    made = cluster()
    made.decode[0].heard(told("decode", 1, workers=[worker]))
    pair = made.view()["pairs"][0]
    assert (pair["transport"], pair["gb_per_s"]) == ("pigeons", None)


def test_each_state_of_a_request_is_a_stage() -> None:
    assert set(STAGES) == set(State)
    chance, made = Random(1), cluster(hybrid=1)
    made.requests = [request(made, number, chance) for number in range(5)]
    stages = {row["stage"] for row in made.view()["requests"]}
    assert stages == {"prefill", "transfer", "decode", "retry"}


def test_a_request_that_a_hybrid_serves_alone_transfers_nothing() -> None:
    made = cluster(prefill=0, decode=0, hybrid=1)
    made.requests = [request(made, 1, Random(1))]
    assert made.requests[0].state is State.AWAITING
    assert made.view()["requests"][0]["stage"] == "prefill"


def test_the_oldest_requests_are_told_when_there_are_too_many() -> None:
    chance, made = Random(1), cluster()
    made.requests = [request(made, number, chance) for number in range(MOST_REQUESTS + 50)]
    view = made.view()
    ages = [row["age_s"] for row in view["requests"]]
    assert (len(ages), view["requests_total"]) == (MOST_REQUESTS, MOST_REQUESTS + 50)
    assert ages == sorted(ages, reverse=True)
    assert ages[0] == max(round(each.age_s, 2) for each in made.requests)


def test_pairs_that_are_not_well_are_told_first_when_there_are_too_many() -> None:
    made = cluster(prefill=30, decode=30)
    feed(made.pairs[-1], Faulted())
    view = made.view()
    assert (len(view["pairs"]), view["pairs_total"]) == (MOST_PAIRS, 900)
    assert view["pairs"][0]["trust"] == "doubtful"


def test_the_last_errors_are_kept_newest_first_and_cut_to_size() -> None:
    made = cluster()
    lost = PeerLost("x" * 5000)
    lost.stage = "decode"
    for number in range(60):
        made.now = float(number)
        made.screen.failed(Overloaded(f"number {number}"), 429, f"r{number}")
    made.screen.failed(lost, 503, "last")
    errors = made.view()["errors"]
    assert len(errors) == MOST_ERRORS
    assert (errors[0]["code"], errors[0]["stage"], errors[0]["status"]) == (
        "peer_lost",
        "decode",
        503,
    )
    assert len(errors[0]["message"]) == MOST_WORDS
    assert errors[1] == {
        "at": NOW + 59,
        "status": 429,
        "code": "overloaded",
        "stage": "router",
        "message": "number 59",
        "request_id": "r59",
    }


def test_the_series_are_columns_of_one_length_that_end_now() -> None:
    made = under_load(cluster(), 120, 0)
    view = made.view()
    assert view["version"] == VERSION
    series = view["series"]
    columns = [
        *(series[name] for name in ("requests_per_s", "ended_per_s", "errors_per_s")),
        *(series[name] for name in ("pieces_per_s", "tokens_per_s", "sent_gb_per_s")),
        *(series[name][share] for name in ("ttft_ms", "itl_ms") for share in ("p50", "p99")),
    ]
    assert {len(column) for column in columns} == {120}
    assert series["ends_at"] == NOW + 120
    assert all(p50 <= p99 for p50, p99 in zip(*series["itl_ms"].values(), strict=True))
    assert series["last_minute"]["ttft_ms"]["p50"] > 10


def test_tokens_are_those_of_decode_and_of_hybrids() -> None:
    split = under_load(cluster(), 30, 0).view()["series"]["tokens_per_s"][-1]
    both = under_load(cluster(hybrid=1), 30, 0).view()["series"]["tokens_per_s"][-1]
    assert split > 0
    assert both == pytest.approx(2 * split, rel=0.01)


def test_the_document_is_json_of_a_bounded_size() -> None:
    made = under_load(cluster(prefill=50, decode=50), 300, 400)
    text = json.dumps(made.view(), allow_nan=False)
    assert len(text) < 250_000
