"""Which ranks an instance has, and on which of its nodes each of them is.

Ranks are counted with tp varying fastest, then cp, then dp; a node has the next
`devices_per_node` of them. So a tensor-parallel group shares a node where it can. The ranks of one
dp rank are a group with one scheduler, counted within it in the same order.
"""

from __future__ import annotations

from pdrt.config import ParallelSection
from pdrt.messages import Rank


def rank_at(parallel: ParallelSection, number: int) -> Rank:
    """The rank that is counted `number`, from 0."""
    rest, tp = divmod(number, parallel.tp)
    dp, cp = divmod(rest, parallel.cp)
    return Rank(dp=dp, cp=cp, tp=tp)


def number_of(parallel: ParallelSection, rank: Rank) -> int:
    return (rank.dp * parallel.cp + rank.cp) * parallel.tp + rank.tp


def group_size(parallel: ParallelSection) -> int:
    return parallel.cp * parallel.tp


def member_of(parallel: ParallelSection, rank: Rank) -> int:
    """The rank's number in its group; 0 has the scheduler."""
    return number_of(parallel, rank) % group_size(parallel)


def rank_of(parallel: ParallelSection, dp: int, member: int) -> Rank:
    """The rank that is counted `member` in the group of this dp rank."""
    return rank_at(parallel, dp * group_size(parallel) + member)


def all_ranks(parallel: ParallelSection) -> list[Rank]:
    return [rank_at(parallel, number) for number in range(parallel.world_size)]


def node_of(parallel: ParallelSection, rank: Rank) -> int:
    """The rank's node, counted within its instance from its leader, which is 0."""
    return number_of(parallel, rank) // parallel.devices_per_node


def ranks_on(parallel: ParallelSection, node: int) -> list[Rank]:
    """The ranks of a node of the instance, counted likewise."""
    return [rank for rank in all_ranks(parallel) if node_of(parallel, rank) == node]


def address_of(parallel: ParallelSection, instance: int, node: int) -> str:
    """Where a node of an instance is, as `ips` says."""
    if not parallel.ips:
        return parallel.local_ip
    return parallel.ips[instance * parallel.nodes_per_instance + node]
