"""Context parallelism: ranks share the rows of long prompts, and each keeps all of their KV.

A rank computes its own rows and attends with their queries alone. In each layer the ranks give
each other the keys and values (or latents) of their rows before they attend, so that each pool
holds what one rank alone would have put there, and a row sees all that came before it. So the
result is exact, and any rank can write any block to a peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from pdrt.device.batch import SeqStep
from pdrt.device.collective import Collective
from pdrt.device.kv import KvPool
from pdrt.device.models.registry import Model
from pdrt.device.shard import Shard
from pdrt.device.slices import Context, Share, share_of, slices


class Asked(NamedTuple):
    """Hidden states of the rows that draw and of those that are scored, in the batch's order."""

    drawn: Tensor
    scored: Tensor


class Exchange:
    """The rows of all ranks of one step, for its layers."""

    def __init__(self, group: Collective, cells: Tensor, rows: Sequence[int]) -> None:
        """`cells` are where the KV of our own rows goes; each rank has so many `rows`."""
        self._group, self._rows = group, rows
        own = rows[group.rank]
        everyone = self._gathered(cells.view(own, -1))
        self._cells = [part.reshape(-1) for part in everyone]

    def of(self, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each rank's KV with its cells, for our own KV [rows, ...]."""
        return zip(self._cells, self._gathered(kv), strict=True)

    def _gathered(self, values: Tensor) -> list[Tensor]:
        """Each rank's [rows, ...]; on their way they are as long as the longest."""
        padded = values.new_zeros(max(self._rows), *values.shape[1:])
        padded[: len(values)] = values
        found = self._group.all_gather(padded)
        return [part[:count] for part, count in zip(found, self._rows, strict=True)]


class SharedPool(KvPool):
    """A pool whose `write` puts there what all ranks bring, while a step is shared."""

    _exchange: Exchange | None = None

    @contextmanager
    def sharing(self, exchange: Exchange) -> Iterator[None]:
        self._exchange = exchange
        try:
            yield
        finally:
            self._exchange = None

    def write(self, layer: int, cells: Tensor, kv: Tensor) -> None:
        if self._exchange is None:
            super().write(layer, cells, kv)
            return
        for its_cells, its_kv in self._exchange.of(kv):
            super().write(layer, its_cells, its_kv)


class Groups(NamedTuple):
    """A rank's ends: of those that share its rows' work, and of those that share the rows."""

    tensor: Collective
    context: Collective


def places(shard: Shard, context: Context) -> tuple[int, int]:
    """The rank's number in the whole group, and how many it has."""
    return context.rank * shard.size + shard.rank, context.size * shard.size


def compute(model: Model, batch: Sequence[SeqStep], pool: SharedPool, groups: Groups) -> Asked:
    """Run a batch of at least one step through the model, alone or with the other ranks."""
    group = groups.context
    whose = slices(batch, group.size)
    if whose is None:
        wave = model.lay_out(batch, pool)
        hidden = model.forward(wave, pool, groups.tensor)
        return Asked(hidden[wave.drawn], hidden[wave.scored])
    share = share_of(batch, whose[group.rank])
    wave = model.lay_out(share.steps, pool)
    rows = [sum(map(len, own)) for own in whose]
    with pool.sharing(Exchange(group, wave.cells, rows)):
        hidden = model.forward(wave, pool, groups.tensor)
    return _brought(batch, share, hidden[wave.drawn], hidden[wave.scored], group)


def _brought(
    batch: Sequence[SeqStep], share: Share, drawn: Tensor, scored: Tensor, group: Collective
) -> Asked:
    """All ranks' rows on each of them: a row is added to the zeros of the ranks without it."""
    draws = sum(step.draw is not None for step in batch)
    total = draws + sum(len(step.scoring.targets) for step in batch if step.scoring is not None)
    found = drawn.new_zeros(total, drawn.shape[1])
    own = [*share.drawn, *(draws + place for place in share.scored)]
    found[torch.tensor(own, dtype=torch.long, device=found.device)] = torch.cat([drawn, scored])
    if total:
        group.all_reduce_(found)
    return Asked(found[:draws], found[draws:])
