"""Which prompts' beginnings were sent where: found by halving, bounded, forgotten with a life."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.prefixes import Prefixes, keys_of

TEXT = "0123456789abcdef" * 100


def test_who_was_sent_a_prompt_knows_as_much_of_another_as_they_share() -> None:
    held = Prefixes()
    one, two = held.take_seat(), held.take_seat()
    held.note(keys_of(TEXT[:640]), one)
    held.note(keys_of(TEXT[:320] + "x" * 320), two)
    assert held.lengths(keys_of(TEXT), [one, two, one | two]) == [10, 5, 10]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1500)), max_size=12))
def test_halving_finds_what_looking_at_each_would(notes: list[tuple[int, int]]) -> None:
    held = Prefixes()
    seats = [held.take_seat() for _ in range(4)]
    longest = [0] * 4
    for place, size in notes:
        keys = keys_of(TEXT[:size])
        held.note(keys, seats[place])
        longest[place] = max(longest[place], len(keys))
    assert held.lengths(keys_of(TEXT), seats) == longest


def test_it_is_bounded_and_what_comes_back_stays() -> None:
    held = Prefixes(1000)
    seat = held.take_seat()
    kept = keys_of("kept" * 100)
    for number in range(300):
        held.note(keys_of(f"{number} " * 200), seat)
        held.note(kept, seat)
    assert len(held) <= 1000 + 2 * len(keys_of("x" * 2000))
    assert held.lengths(kept, [seat]) == [len(kept)]
    assert held.lengths(keys_of("0 " * 200), [seat]) == [0]


def test_a_seat_is_used_again_only_when_nothing_of_it_is_left() -> None:
    held = Prefixes(100)
    seat = held.take_seat()
    keys = keys_of(TEXT)
    held.note(keys, seat)
    held.give_seat(seat)
    assert held.take_seat() != seat
    other = held.take_seat()
    for number in range(40):
        held.note(keys_of(f"{number} " * 400), other)
    again = held.take_seat()
    assert again == seat
    assert held.lengths(keys, [again]) == [0]


def test_seats_do_not_grow_with_restarts() -> None:
    held, seat = Prefixes(100), 0
    for number in range(1000):
        seat = held.take_seat()
        held.note(keys_of(f"{number} " * 400), seat)
        held.give_seat(seat)
    assert seat < 1 << 16


def test_any_form_of_a_prompt_has_prefixes_and_what_is_none_has_none() -> None:
    chat = [{"role": "user", "content": "x" * 100}]
    more = [*chat, {"role": "assistant", "content": "y" * 100}]
    assert keys_of(more)[: len(keys_of(chat)) - 1] == keys_of(chat)[:-1]
    ids = list(range(100))
    assert keys_of([*ids, 7])[: len(keys_of(ids))] == keys_of(ids)
    assert keys_of(["a" * 64, "b"])
    for nothing in (None, 7, [], "", "short", [1 << 40], [1, "x"], {"a": 1}):
        assert keys_of(nothing) == []


def test_salts_do_not_share() -> None:
    assert set(keys_of(TEXT, "a")).isdisjoint(keys_of(TEXT, "b"))
