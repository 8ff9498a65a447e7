"""Where each rank of an instance is: every rank on one node, tensor-parallel groups together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt import grid
from pdrt.config import NodeConfig, ParallelSection, Place, check
from pdrt.messages import Rank

ON_NODES: list[tuple[dict[str, int], list[str]]] = [  # dp,cp,tp of each node
    ({"tp": 2}, ["0,0,0", "0,0,1"]),
    ({"dp": 2}, ["0,0,0", "1,0,0"]),
    ({"tp": 2, "dp": 2}, ["0,0,0 0,0,1", "1,0,0 1,0,1"]),
    ({"tp": 4}, ["0,0,0 0,0,1", "0,0,2 0,0,3"]),
    ({"tp": 2, "cp": 2}, ["0,0,0 0,0,1", "0,1,0 0,1,1"]),
    ({"cp": 2, "dp": 2}, ["0,0,0 0,1,0", "1,0,0 1,1,0"]),
]


def parallel(nodes: int, instances: int = 1, **sizes: int) -> ParallelSection:
    world = 1
    for size in sizes.values():
        world *= size
    tables: dict[str, Any] = {
        **sizes,
        "world_size": world,
        "devices_per_node": world // nodes,
        "ips": [f"10.0.0.{n}" for n in range(nodes * instances)],
        "local_ip": "10.0.9.9",
    }
    return check(NodeConfig, {"parallel": tables}, "test").parallel


@pytest.mark.parametrize(("sizes", "nodes"), ON_NODES)
def test_tp_varies_fastest_then_cp_then_dp(sizes: dict[str, int], nodes: list[str]) -> None:
    made = parallel(len(nodes), **sizes)
    found = [" ".join(map(str, grid.ranks_on(made, n))) for n in range(len(nodes))]
    assert found == nodes


@given(tp=st.integers(1, 4), cp=st.integers(1, 3), dp=st.integers(1, 4), each=st.integers(1, 4))
def test_every_rank_is_on_one_node_and_each_node_has_as_many_as_devices(
    tp: int, cp: int, dp: int, each: int
) -> None:
    world = tp * cp * dp
    nodes = world // each if world % each == 0 else 1
    made = parallel(nodes, tp=tp, cp=cp, dp=dp)
    held = [grid.ranks_on(made, node) for node in range(nodes)]
    assert {len(ranks) for ranks in held} == {made.devices_per_node}
    assert [rank for ranks in held for rank in ranks] == grid.all_ranks(made)
    numbers = [grid.number_of(made, rank) for rank in grid.all_ranks(made)]
    assert numbers == list(range(world))
    groups = [[r for r in grid.all_ranks(made) if r.dp == n] for n in range(dp)]
    for n, group in enumerate(groups):
        assert [grid.member_of(made, rank) for rank in group] == list(range(grid.group_size(made)))
        assert [grid.rank_of(made, n, member) for member in range(cp * tp)] == group
        assert [rank.is_head for rank in group] == [True] + [False] * (cp * tp - 1)


def test_the_first_rank_of_a_node_is_the_one_that_its_place_says() -> None:
    made = parallel(2, instances=2, tp=2, dp=2)
    for index in range(4):
        place = Place.of(made, index)
        first = grid.ranks_on(made, index % 2)[0]
        assert grid.number_of(made, first) == place.first_rank


def test_the_nodes_of_an_instance_have_the_addresses_in_ips() -> None:
    made = parallel(2, instances=2, tp=2)
    assert grid.address_of(made, 1, 0) == "10.0.0.2"
    assert grid.address_of(made, 1, 1) == "10.0.0.3"
    alone = check(NodeConfig, {"parallel": {"local_ip": "10.0.9.9"}}, "test").parallel
    assert grid.address_of(alone, 0, 0) == "10.0.9.9"
    assert grid.node_of(alone, Rank()) == 0
