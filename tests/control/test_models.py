"""Several models behind one router: pairs and choices stay within one, and errors name it."""

from __future__ import annotations

import random

import pytest

from pdrt.config import RouterConfig, Target
from pdrt.control.fleet import Fleet
from pdrt.control.instances import Status
from pdrt.control.pairs import CanaryPassed, CanaryStarted, feed
from pdrt.control.policy import Ask
from pdrt.control.told import LoadTold
from pdrt.errors import BadRequest, NoDecode, NoPrefill, NotFound, Overloaded, Unavailable
from tests.control.router_rig import rig, until


def grouped(*models: str, **policy: object) -> Fleet:
    """One prefill and one decode instance of each, all alive and tried."""
    tables = {
        "prefill": [{"http": f"10.0.0.{n}:1"} for n in range(len(models))],
        "decode": [{"http": f"10.0.1.{n}:1"} for n in range(len(models))],
        "policy": policy,
    }
    fleet = Fleet.of(RouterConfig.model_validate(tables))
    for side in (fleet.prefill, fleet.decode):
        for each, model in zip(side, models, strict=True):
            each.heard(Status(role=each.role, state="ready", model=model))
    for pair in fleet.pairs:
        feed(pair, CanaryStarted())
        feed(pair, CanaryPassed())
    return fleet


async def test_pairs_are_within_one_model() -> None:
    fleet = grouped("a", "b", "a")
    assert len(fleet.pairs) == 5
    assert all(p.prefill and p.prefill.model == p.decode.model for p in fleet.pairs)


async def test_no_choice_ever_crosses_models() -> None:
    """CASES 78: once a decode instance of another model's group was used."""
    fleet, rng = grouped("a", "b", "a", "b"), random.Random(4)
    for _ in range(500):
        model = rng.choice("ab")
        choice = fleet.pick(Ask(model))
        assert choice.prefill is not None
        assert choice.prefill.model == choice.decode.model == model
        if rng.random() < 0.3:
            found = fleet.pick_prefill(choice.decode, {choice.prefill})
            assert found.prefill is not None
            assert found.prefill.model == model


async def test_the_only_model_need_not_be_named() -> None:
    fleet = grouped("a", "a")
    assert fleet.pick().decode.model == "a"
    assert fleet.pick(Ask("a")).decode.model == "a"


async def test_one_of_several_must_be_named_unless_there_is_a_default() -> None:
    with pytest.raises(BadRequest, match=r"model: several are served; name one of a, b"):
        grouped("a", "b").pick()
    assert grouped("a", "b", default_model="b").pick().decode.model == "b"


async def test_an_unknown_model_is_404_that_tells_what_is_served() -> None:
    with pytest.raises(NotFound, match=r"'c' is not served here; 'a', 'b' are"):
        grouped("a", "b").pick(Ask("c"))


async def test_while_nobody_is_there_no_model_is_unknown() -> None:
    fleet = grouped(registration=True)
    for name in ("a", ""):
        with pytest.raises(Unavailable, match="none is listed or registered"):
            fleet.pick(Ask(name))


async def test_while_somebody_has_not_said_what_it_serves_nothing_is_unknown() -> None:
    fleet = grouped("a")
    fleet.join("decode", Target(http="10.0.9.9:1"))
    with pytest.raises(Unavailable, match=r"10\.0\.9\.9:1 is unknown"):
        fleet.pick(Ask("c"))


async def test_who_is_missing_is_told_with_its_model() -> None:
    fleet = grouped("a", "b")
    fleet.decode[1].died("refused")
    with pytest.raises(NoDecode, match=r"of model 'b'.*10\.0\.1\.1"):
        fleet.pick(Ask("b"))
    fleet.prefill[1].died("refused")
    with pytest.raises(NoPrefill, match=r"of model 'b'.*10\.0\.0\.1"):
        fleet.pick(Ask("b"))
    assert fleet.pick(Ask("a")).decode is fleet.decode[0]


async def test_a_model_whose_last_member_left_is_missing_not_unknown() -> None:
    fleet = grouped("a", "b")
    fleet.leave(fleet.prefill[1])
    fleet.leave(fleet.decode[1])
    with pytest.raises(NoDecode, match="of model 'b'"):
        fleet.pick(Ask("b"))
    assert fleet.models == ["a"]


async def test_an_instance_that_serves_another_model_changes_its_pairs() -> None:
    fleet = grouped("a", "b")
    fleet.decode[1].heard(Status(role="decode", state="ready", model="a", instance_epoch=2))
    assert {pair.name for pair in fleet.pairs} == {
        "prefill 10.0.0.0:1 + decode 10.0.1.0:1",
        "prefill 10.0.0.0:1 + decode 10.0.1.1:1",
    }


# Full instances (CASES 79).


def _say_full(fleet: Fleet, *places: int, is_full: bool = True) -> None:
    for place in places:
        one = fleet.decode[place]
        said = Status(role="decode", state="ready", model=one.model, load=LoadTold(is_full=is_full))
        one.heard(said)


async def test_a_full_instance_is_passed_by_and_when_all_are_full_it_is_429() -> None:
    fleet = grouped("a", "a")
    _say_full(fleet, 0)
    assert {fleet.pick().decode for _ in range(4)} == {fleet.decode[1]}
    _say_full(fleet, 1)
    with pytest.raises(Overloaded, match="full"):
        fleet.pick()
    _say_full(fleet, 0, is_full=False)
    assert fleet.pick().decode is fleet.decode[0]


async def test_a_hybrid_helps_out_when_all_pairs_are_full_and_says_why() -> None:
    fleet = grouped("a")
    hybrid = fleet.join("hybrid", Target(http="10.0.2.0:1"))
    hybrid.heard(Status(role="hybrid", state="ready", model="a"))
    feed(fleet.pairs[-1], CanaryStarted())
    feed(fleet.pairs[-1], CanaryPassed())
    assert fleet.pick().prefill is not None
    _say_full(fleet, 0)
    choice = fleet.pick()
    assert (choice.prefill, choice.decode, choice.fallback) == (None, hybrid, "overloaded")


async def test_a_refusal_for_fullness_keeps_the_next_request_away_until_it_is_heard_again() -> None:
    fleet = grouped("a", "a")
    fleet.decode[0].overflowed()
    assert fleet.decode[0].nudged.is_set()
    assert {fleet.pick().decode for _ in range(4)} == {fleet.decode[1]}
    _say_full(fleet, 0, is_full=False)
    assert fleet.pick().decode is fleet.decode[0]


# Over HTTP.


async def test_models_are_listed_with_their_lengths_and_the_body_chooses() -> None:
    async with rig(prefill=2, decode=2, wait=False) as r:
        for leader, name, length in zip(r.leaders, "abab", (100, 200, 90, 200), strict=True):
            leader.status |= {"model": name, "max_model_len": length}
            r.instance(leader).nudged.set()
        await until(lambda: r.router.fleet.models == ["a", "b"])
        await r.ready()
        await r.look()
        listed = (await r.get("/v1/models")).json["data"]
        assert [(m["id"], m["max_model_len"]) for m in listed] == [("a", 90), ("b", 200)]
        assert (await r.get("/v1/models/b")).json == listed[1]
        assert (await r.get("/v1/models/c")).status == 404
        for _ in range(3):
            assert (await r.send(model="b")).status == 200
        assert (len(r.prefill[1].seen), len(r.decode[1].seen)) == (3, 3)
        assert not r.prefill[0].seen + r.decode[0].seen
        got = await r.send(model="c")
        assert (got.status, got.error["code"]) == (404, "not_found")
        got = await r.send()
        assert (got.status, got.error["code"]) == (400, "bad_request")
        assert "a, b" in got.error["message"]


async def test_every_instance_full_is_429_with_retry_after_and_none_is_503() -> None:
    """CASES 79."""
    async with rig() as r:
        r.decode[0].status["load"] = {"is_full": True}
        await r.look()
        got = await r.send()
        assert (got.status, got.error["code"]) == (429, "overloaded")
        assert got.headers["retry-after"]
        await r.lose(r.decode[0])
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "no_decode")


async def test_a_plain_backend_takes_any_model_unless_its_target_names_one() -> None:
    async with rig(key=None, policy={"backends": "plain"}) as r:
        assert (await r.send({"model": "whatever", "prompt": "x"})).status == 200
        assert (await r.send({"prompt": "x"})).status == 200


def test_names_that_clients_make_up_are_not_kept() -> None:
    """What strangers send takes bounded memory."""
    fleet = grouped("", backends="plain")
    for number in range(500):
        assert fleet.pick(Ask(f"made up {number}")).prefill is not None
        assert fleet.pick(Ask("x" * 10_000 + str(number))).prefill is not None
    kept = fleet.views
    assert len(kept) <= 65
    assert max(map(len, kept)) < 400
    assert "made up 499" in kept  # asked for a moment ago: found at once
