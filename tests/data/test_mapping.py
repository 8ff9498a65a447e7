"""Rank mapping: the cases of the table, heads and their replicas, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from pdrt.data.mapping import HeadSpan, TargetRankMapping, check_heads, heads_of
from pdrt.data.topology import Topology
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout, Rank, RankAddress, Route
from tests.data.ranks import process

SIZES = [*product((1, 2, 4), (1, 2, 4)), (8, 2), (2, 8), (6, 3)]
HEADS = (1, 2, 4, 8)
CASES = [(p, d, h) for p, d in SIZES for h in HEADS if (p, d) != (6, 3)] + [(6, 3, 12), (6, 3, 3)]
LAYOUT = KvLayout(block_size=4, dtype="uint8", layers=1, kv_heads=4, head_dim=2, total_kv_heads=4)


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
    mapping = TargetRankMapping(prefill, decode, rank, total_kv_heads=4)
    assert mapping.writers(room=5) == writers
    assert (mapping.handshakes, mapping.slots) == (handshakes, slots)


@pytest.mark.parametrize(
    ("rank", "tp", "total", "heads"),
    [(0, 1, 4, [0, 1, 2, 3]), (1, 2, 4, [2, 3]), (3, 4, 4, [3]), (2, 4, 2, [1]), (7, 8, 2, [1])],
)
def test_heads_are_split_in_order_and_replicas_are_neighbours(
    rank: int, tp: int, total: int, heads: list[int]
) -> None:
    assert list(heads_of(rank, tp, total)) == heads


@pytest.mark.parametrize(
    ("prefill", "decode", "rank", "total", "source", "span"),
    [
        (1, 2, 1, 4, 0, HeadSpan(2, 0, 2)),  # the second half of what it holds
        (2, 1, 0, 4, 1, HeadSpan(0, 2, 2)),  # into the second half of ours
        (4, 4, 3, 2, 3, HeadSpan(0, 0, 1)),
        (1, 4, 3, 2, 0, HeadSpan(1, 0, 1)),
        (4, 1, 0, 2, 2, HeadSpan(0, 1, 1)),
    ],
)
def test_a_rank_gives_the_heads_that_both_hold(
    prefill: int, decode: int, rank: int, total: int, source: int, span: HeadSpan
) -> None:
    assert TargetRankMapping(prefill, decode, rank, total).heads_from(source) == span


@pytest.mark.parametrize(("prefill", "decode", "total"), CASES)
@pytest.mark.parametrize("room", [0, 1, 5, 1 << 62])
def test_each_head_of_each_decode_rank_is_written_once(
    prefill: int, decode: int, total: int, room: int
) -> None:
    for rank in range(decode):
        mapping = TargetRankMapping(prefill, decode, rank, total)
        written = Counter[int]()
        for writer in mapping.writers(room):
            span = mapping.heads_from(writer)
            written.update(range(span.target, span.target + span.count))
            theirs, mine = heads_of(writer, prefill, total), heads_of(rank, decode, total)
            assert theirs[span.source] == mine[span.target]
        assert written == Counter(range(len(heads_of(rank, decode, total))))


@pytest.mark.parametrize(("prefill", "decode", "total"), CASES)
@pytest.mark.parametrize("cp", [1, 2])
def test_each_writer_has_a_slot_of_its_own_and_all_of_the_span_are_told(
    prefill: int, decode: int, total: int, cp: int
) -> None:
    """CASES 51: each slot has exactly one writer."""
    for rank, room in product(range(decode), range(8)):
        mapping = TargetRankMapping(prefill, decode, rank, total, prefill_cp=cp)
        places = mapping.places(room)
        assert places.keys() == {*product(range(cp), mapping.span)}
        assert sorted(n for n in places.values() if n >= 0) == list(range(mapping.slots))
        assert mapping.slots == len(mapping.writers(room)) * cp


@pytest.mark.parametrize(("prefill", "decode", "total"), CASES)
@pytest.mark.parametrize("latent", [True, False])
def test_each_prefill_rank_waits_for_as_many_as_tell_it(
    prefill: int, decode: int, total: int, latent: bool
) -> None:
    mappings = [TargetRankMapping(prefill, decode, r, total, latent) for r in range(decode)]
    for writer in range(prefill):
        readers = [m for m in mappings if writer in m.span]
        assert {m.handshakes for m in readers} == {len(readers)}


@pytest.mark.parametrize(("prefill", "decode", "total"), CASES)
def test_rooms_share_the_work_among_replicas(prefill: int, decode: int, total: int) -> None:
    for rank in range(decode):
        mapping = TargetRankMapping(prefill, decode, rank, total)
        writers = Counter(w for room in range(24) for w in mapping.writers(room))
        assert writers.keys() == {*mapping.span}
        assert len({*writers.values()}) == 1


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_of_latent_kv_one_rank_writes_the_only_slot_and_rooms_share_the_work(
    prefill: int, decode: int
) -> None:
    """CASES 51: each slot has exactly one writer."""
    for rank in range(decode):
        mapping = TargetRankMapping(prefill, decode, rank, 1, latent=True)
        writers = [mapping.writers(room) for room in range(16)]
        assert {len(w) for w in writers} == {1}
        assert mapping.slots == 1
        assert {w[0] for w in writers} == set(mapping.span)
        assert mapping.heads_from(mapping.span[0]) == HeadSpan(0, 0, 1)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), (2, 3), (4, 6)])
def test_sizes_that_do_not_divide_are_refused_by_both_names(prefill: int, decode: int) -> None:
    """CASES 5, 63."""
    with pytest.raises(ConfigError, match=f"prefill tp = {prefill} and decode tp = {decode}"):
        TargetRankMapping(prefill, decode, 0, 12)


@pytest.mark.parametrize(("prefill", "decode", "total"), [(4, 1, 6), (1, 4, 6), (2, 2, 3)])
def test_heads_that_cannot_be_split_are_refused_by_both_values(
    prefill: int, decode: int, total: int
) -> None:
    """CASES 5, 63."""
    tp = max(prefill, decode)
    with pytest.raises(ConfigError, match=f"kv heads = {total} and tp = {tp}"):
        TargetRankMapping(prefill, decode, 0, total)


def test_a_rank_outside_its_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside tp = 2"):
        TargetRankMapping(2, 2, 2, 4)


def test_a_layout_that_is_not_its_ranks_is_refused() -> None:
    check_heads(replace(LAYOUT, kv_heads=2), 1, 2)
    check_heads(replace(LAYOUT, kind="latent", kv_heads=1), 1, 2)
    with pytest.raises(ConfigError, match="describes 4 kv heads, but 2 of the model's 4"):
        check_heads(LAYOUT, 0, 2)


# What a decode rank makes of a route.


def route(tp: int, cp: int = 1, layout: KvLayout = LAYOUT) -> Route:
    address = RankAddress(rank_ip="127.0.0.1", rank_port=6000, process=process(1))
    return Route(
        attn_tp_size=tp,
        attn_cp_size=cp,
        dp_size=2,
        block_size=layout.block_size,
        kv_cache_dtype=layout.dtype,
        fingerprint=layout,
        instance_epoch=1,
        ranks={f"{d},{c},{t}": address for d in range(2) for c in range(cp) for t in range(tp)},
    )


def test_all_of_the_span_are_told_and_the_writers_have_places() -> None:
    topology = Topology(replace(LAYOUT, kv_heads=1, total_kv_heads=1), Rank(tp=1), 2, writers=4)
    other = replace(LAYOUT, kv_heads=1, total_kv_heads=1)
    places = topology.places(route(4, cp=2, layout=other), room=3, dp_rank=1)
    assert places == {"1,0,2": -1, "1,0,3": 0, "1,1,2": -1, "1,1,3": 1}
    assert topology.handshakes(route(4, cp=2, layout=other)) == 1


@pytest.mark.parametrize(
    ("topology", "other", "text"),
    [
        (Topology(LAYOUT, Rank(), 1, 3), route(4), "[transfer] writers = 3 on the decode side"),
        (Topology(LAYOUT, Rank(), 1, 3), route(2, cp=2), "4 prefill ranks write"),
        (Topology(LAYOUT, Rank(cp=1), 1), route(1), "a decode instance has cp = 1"),
        (Topology(LAYOUT, Rank(), 1), route(3), "kv heads = 4 and tp = 3"),
        (
            Topology(replace(LAYOUT, kv_heads=2), Rank(), 2),
            route(3),
            "prefill tp = 3 and decode tp = 2",
        ),
        (
            Topology(LAYOUT, Rank(), 1),
            route(1, layout=replace(LAYOUT, head_dim=4)),
            "head_dim: 2 here, 4 there",
        ),
    ],
)
def test_a_route_that_can_never_fit_is_refused_before_anything_is_written(
    topology: Topology, other: Route, text: str
) -> None:
    """CASES 5, 63: with both values."""
    with pytest.raises(ConfigError) as refused:
        topology.places(other, room=1, dp_rank=0)
    assert text in str(refused.value)
