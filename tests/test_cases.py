"""Every failure met in the field has a test here, or a reason why it cannot happen."""

from __future__ import annotations

from tests.cases import CASES, NOT_HERE, lines, named


def test_every_case_is_held_by_a_test_that_names_it() -> None:
    held = named().keys()
    assert [n for n in CASES if n not in held and n not in NOT_HERE] == []
    assert NOT_HERE.keys() <= CASES.keys() - held, "a test names it: it needs no reason any more"


def test_no_test_names_a_case_that_is_none() -> None:
    assert named().keys() <= CASES.keys()


def test_the_table_can_be_printed() -> None:
    text = "\n".join(lines())
    assert "no test" not in text
    assert "1. the router waits for decode though prefill failed" in text
