"""Rank mapping: the three cases of the table, and what it refuses."""

from __future__ import annotations

from itertools import product

import pytest

from pdrt.data.mapping import TargetRankMapping
from pdrt.errors import ConfigError

SIZES = [*product((1, 2, 4), (1, 2, 4)), (8, 2), (2, 8), (6, 3)]


@pytest.mark.parametrize(
    ("prefill", "decode", "rank", "writers", "handshakes", "slots"),
    [
        (2, 2, 1, (1,), 1, 1),
        (2, 4, 0, (0,), 2, 1),
        (2, 4, 3, (1,), 2, 1),
        (4, 2, 0, (0, 1), 1, 2),
        (4, 2, 1, (2, 3), 1, 2),
        (1, 1, 0, (0,), 1, 1),
    ],
)
def test_the_table_of_the_specification(
    prefill: int, decode: int, rank: int, writers: tuple[int, ...], handshakes: int, slots: int
) -> None:
    mapping = TargetRankMapping(prefill, decode, rank)
    assert mapping.writers(room=5) == writers
    assert (mapping.handshakes, mapping.slots) == (handshakes, slots)


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_each_prefill_rank_waits_for_as_many_as_it_writes_to(prefill: int, decode: int) -> None:
    mappings = [TargetRankMapping(prefill, decode, rank) for rank in range(decode)]
    for writer in range(prefill):
        readers = [m for m in mappings if writer in m.writers(0)]
        assert {m.handshakes for m in readers} == {len(readers)}


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_of_latent_kv_one_rank_writes_the_only_slot_and_rooms_share_the_work(
    prefill: int, decode: int
) -> None:
    """CASES 51: each slot has exactly one writer."""
    for rank in range(decode):
        mapping = TargetRankMapping(prefill, decode, rank, latent=True)
        writers = [mapping.writers(room) for room in range(16)]
        assert {len(w) for w in writers} == {1}
        assert mapping.slots == 1
        assert {w[0] for w in writers} == set(mapping.span)


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_there_are_as_many_slots_as_writers(prefill: int, decode: int) -> None:
    """CASES 51."""
    for rank in range(decode):
        mapping = TargetRankMapping(prefill, decode, rank)
        assert mapping.slots == len(mapping.writers(3))


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), (2, 3), (4, 6)])
def test_sizes_that_do_not_divide_are_refused_by_both_names(prefill: int, decode: int) -> None:
    with pytest.raises(ConfigError, match=f"prefill tp = {prefill} and decode tp = {decode}"):
        TargetRankMapping(prefill, decode, 0)


def test_a_rank_outside_its_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside tp = 2"):
        TargetRankMapping(2, 2, 2)
