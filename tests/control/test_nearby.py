"""Which prompts decode computes itself: those that are short, or whose first token is sooner so."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.config import RouterConfig, Target
from pdrt.control.choice import Because, Choice
from pdrt.control.fleet import Fleet
from pdrt.control.instances import Instance, Status
from pdrt.control.nearby import AUTO_MOST, ENOUGH, TRIED, TRIED_EVERY, Line, Nearby
from pdrt.control.policy import Ask, Load, choose
from pdrt.control.prefixes import Prefixes
from pdrt.control.views import Candidates


def taught(local: tuple[float, float], disagg: tuple[float, float], seen: int = 200) -> Nearby:
    """It has served a mix of prompts, on machines with these costs: (each request, each token)."""
    nearby, chance = Nearby("auto"), Random(3)
    for _ in range(seen):
        tokens = chance.choice([8, 40, 100, 300, 1000, 4000])
        is_local = bool(nearby.why(tokens))
        once, each = local if is_local else disagg
        noise = chance.uniform(0.9, 1.1)
        nearby.heard(tokens, (once + each * tokens) * noise, is_local=is_local)
    return nearby


def test_a_number_is_the_longest_prompt() -> None:
    assert [Nearby(100).why(tokens) for tokens in (0, 100, 101)] == ["short", "short", ""]
    assert Nearby(0).why(1) == ""


def test_auto_finds_the_length_up_to_which_local_is_sooner() -> None:
    """The way to prefill and back costs 30 ms; a token costs 0.2 ms here, 0.05 ms there: 200."""
    nearby = taught(local=(0.005, 0.0002), disagg=(0.035, 0.00005))
    assert all(nearby.why(tokens) for tokens in (1, 50, 150))
    assert not any(nearby.why(tokens) for tokens in (260, 500))


def test_auto_leaves_long_prompts_alone_whatever_was_measured() -> None:
    """They would hold up those that decode."""
    nearby = taught(local=(0.0, 0.0), disagg=(1.0, 0.0))
    assert nearby.why(AUTO_MOST)
    assert not nearby.why(AUTO_MOST + 1)


def test_auto_gives_a_way_up_that_is_slower_and_tries_it_again_now_and_then() -> None:
    nearby = taught(local=(0.2, 0.001), disagg=(0.01, 0.0001), seen=60)
    assert not nearby.why(10)
    tries = 0
    for _ in range(1000):
        is_local = bool(nearby.why(10))
        tries += is_local
        nearby.heard(10, 0.2 if is_local else 0.01, is_local=is_local)
    assert tries == 1000 // TRIED_EVERY


def test_auto_follows_machines_that_change() -> None:
    nearby = taught(local=(0.2, 0.001), disagg=(0.01, 0.0001))
    for _ in range(10_000):
        is_local = bool(nearby.why(10))
        nearby.heard(10, 0.002 if is_local else 0.01, is_local=is_local)
    assert nearby.why(10)


def test_nothing_is_believed_before_enough_was_seen() -> None:
    nearby = Nearby("auto")
    for _ in range(int(ENOUGH) + 1):
        assert nearby.why(TRIED)
        assert not nearby.why(TRIED + 1)
        nearby.heard(TRIED, 0.001, is_local=True)
    assert not nearby.why(TRIED)  # the other way has to be seen now


@given(
    st.floats(0, 1),
    st.floats(0, 0.01),
    st.lists(st.integers(1, 4000), min_size=20, max_size=60),
    st.integers(1, 4000),
)
def test_a_line_is_found_and_one_length_alone_gives_its_mean(
    once: float, each: float, lengths: list[int], at: int
) -> None:
    line = Line()
    for tokens in lengths:
        line.add(tokens, once + each * tokens)
    found = line.at(at)
    assert found >= 0 or each == 0
    if len(set(lengths)) > 5 and max(lengths) > 2 * min(lengths):
        assert found == pytest.approx(once + each * at, rel=0.05, abs=0.01 + 0.02 * each * at)


# With what decode holds already.


def test_what_decode_holds_already_is_not_computed_again() -> None:
    prompt = list(range(400))
    held = Prefixes()
    seat, load = held.take_seat(), Load()
    load.seats = seat
    decode = Instance("decode", Target(http="127.0.0.1:1"), Fleet(RouterConfig.model_construct()))
    decode.status = Status(role="decode", state="ready", local_prefill=True)
    prefill = Instance("prefill", Target(http="127.0.0.1:2"), Fleet(RouterConfig.model_construct()))
    nearby = Nearby(100)

    def considered(asked: list[int]) -> Choice:
        ask = Ask(prompt=asked, weight=len(asked))
        picked = choose("prefix_aware", [load], ask, held)
        found = Candidates([decode], [load])
        because = Because(ask, None, (found, picked))
        return nearby.considered(Choice(prefill, decode, because=because), len(asked))

    assert considered(prompt).prefill is prefill
    held.note(Ask(prompt=prompt).keys, seat)
    longer = considered([*prompt, *range(50)])
    assert (longer.prefill, longer.local) == (None, "cached")
    assert considered([*prompt, *range(300)]).prefill is prefill
    assert considered(list(range(60))).local == "short"
