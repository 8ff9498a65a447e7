"""Attention of a mixed batch over the paged pool: decode steps together, prompt chunks singly.

Single tokens are grouped by length and answered in one padded call a group and layer; a chunk
attends alone. Query heads that share a kv head are that head's rows, so nothing is repeated.
What the layers share (index tensors, masks) is made once a step in `Wave`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.batch import SeqStep
from pdrt.device.kv import Ints, KvPool

SMALL_GROUP = 8  # blocks; padding up to here costs less than a further call


class Part(Protocol):
    """Rows first..end of a wave, which attend in one call a layer."""

    @property
    def first(self) -> int: ...

    @property
    def end(self) -> int: ...

    def attend(self, layer: int, q: Tensor, kv: Tensor, pool: KvPool) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Singles:
    """Rows first..end of the wave: one token each of sequences of similar length."""

    first: int
    end: int
    strips: Tensor  # [2, sequences, kv_heads, blocks]
    mask: Tensor  # [sequences, 1, 1, tokens], added to scores

    def attend(self, layer: int, q: Tensor, _kv: Tensor, pool: KvPool) -> Tensor:
        keys, values = pool.read(layer, self.strips)
        sequences, kv_heads, _, head_dim = keys.shape
        grouped = q.view(sequences, kv_heads, -1, head_dim)
        mask = self.mask.expand(-1, -1, grouped.shape[2], -1)
        return F.scaled_dot_product_attention(grouped, keys, values, mask).flatten(1)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows first..end of the wave: consecutive tokens of one sequence."""

    first: int
    end: int
    strips: Tensor | None  # [2, 1, kv_heads, blocks]; None: nothing came before the chunk
    mask: Tensor | None  # [rows, tokens], added to scores; None: causal

    def attend(self, layer: int, q: Tensor, kv: Tensor, pool: KvPool) -> Tensor:
        rows, heads, head_dim = q.shape
        if self.strips is None or self.mask is None:
            keys, values = kv.transpose(0, 1).chunk(2)
        else:
            keys, values = pool.read(layer, self.strips)[:, 0, :, : self.mask.shape[1]]
        if not q.is_cpu:  # there no fused kernel takes grouped heads together with a mask
            copies = heads // keys.shape[0]
            keys, values = (each.repeat_interleave(copies, 0) for each in (keys, values))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            self.mask,
            is_causal=self.mask is None,
            enable_gqa=q.is_cpu,
        )
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)


@dataclass(frozen=True, slots=True)
class Wave:
    """A batch laid out for the layers: its tokens in rows, decode steps first."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    cells: Tensor  # where the rows' KV goes
    parts: tuple[Part, ...]
    drawn: Tensor  # rows whose logits are wanted, in the batch's order
    scored: Tensor  # rows whose targets are scored, in the batch's order

    def attend(self, layer: int, q: Tensor, kv: Tensor, pool: KvPool) -> Tensor:
        """[rows, heads * head_dim] for q [rows, heads, head_dim]; the pool holds the KV."""
        found = [p.attend(layer, q[p.first : p.end], kv[p.first : p.end], pool) for p in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)


class Layouts(Protocol):
    """Makes the parts of a wave that begin at `row`: attention over keys and values, or another."""

    def singles(self, row: int, steps: Sequence[SeqStep]) -> Part: ...

    def chunk(self, row: int, step: SeqStep) -> Part: ...


@dataclass(frozen=True, slots=True)
class KvLayouts:
    pool: KvPool
    dtype: torch.dtype

    def singles(self, row: int, steps: Sequence[SeqStep]) -> Singles:
        return _singles(row, steps, self.pool, self.dtype)

    def chunk(self, row: int, step: SeqStep) -> Chunk:
        return _chunk(row, step, self.pool, self.dtype)


def lay_out(batch: Sequence[SeqStep], pool: KvPool, layouts: Layouts) -> Wave:
    """Rows, index tensors and masks for a batch of at least one step."""
    size = pool.block_size
    singles = [i for i, step in enumerate(batch) if len(step.tokens) == 1]
    groups = [
        [singles[j] for j in group]
        for group in grouped([batch[i].start // size + 1 for i in singles])
    ]
    chunks = [i for i, step in enumerate(batch) if len(step.tokens) > 1]
    order = [i for group in groups for i in group] + chunks
    steps = [batch[i] for i in order]
    ends = np.cumsum([len(step.tokens) for step in steps])
    last_row = dict(zip(order, (ends - 1).tolist(), strict=True))

    parts = list[Part]()
    row = 0
    for group in groups:
        parts.append(layouts.singles(row, [batch[i] for i in group]))
        row += len(group)
    for i in chunks:
        parts.append(layouts.chunk(row, batch[i]))
        row += len(batch[i].tokens)

    positions = np.concatenate([np.arange(s.start, s.start + len(s.tokens)) for s in steps])
    blocks = np.concatenate([blocks_of(step, size) for step in steps])
    wanted = [last_row[i] for i, step in enumerate(batch) if step.draw is not None]
    scored = [row for i, step in enumerate(batch) for row in scored_rows(step, last_row[i])]
    return Wave(
        tokens=pool.index(np.concatenate([np.asarray(s.tokens, np.int64) for s in steps])),
        positions=pool.index(positions),
        cells=pool.cells_of(blocks, positions % size),
        parts=tuple(parts),
        drawn=pool.index(np.array(wanted, np.int64)),
        scored=pool.index(np.array(scored, np.int64)),
    )


def scored_rows(step: SeqStep, last_row: int) -> range:
    """The rows of the step that have a target."""
    if step.scoring is None:
        return range(0)
    first = last_row - len(step.tokens) + 1
    return range(first, first + len(step.scoring.targets))


def grouped(blocks: Sequence[int]) -> list[list[int]]:
    """Indices by length, longest first, so that no group's padding exceeds its contents much.

    A sequence joins a group when it is at least half as long as the longest one in it, or so
    short that padding is cheaper than another call.
    """
    groups = list[list[int]]()
    longest = 0
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i]):
        if groups and (2 * blocks[i] >= longest or longest <= SMALL_GROUP):
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = blocks[i]
    return groups


def blocks_of(step: SeqStep, size: int) -> Ints:
    """The block of each of the step's tokens."""
    if len(step.tokens) == 1:
        return np.array([step.blocks[step.start // size]], np.int64)
    table = np.asarray(step.blocks, np.int64)
    return table[np.arange(step.start, step.start + len(step.tokens)) // size]


def _singles(row: int, steps: Sequence[SeqStep], pool: KvPool, dtype: torch.dtype) -> Singles:
    size = pool.block_size
    counts = [step.start // size + 1 for step in steps]
    tables = np.empty((len(steps), max(counts)), np.int64)
    for table, step, count in zip(tables, steps, counts, strict=True):
        table[:count] = step.blocks[:count]
        table[count:] = step.blocks[0]  # its own: no foreign NaN can come in through padding
    ends = np.array([step.start for step in steps])
    beyond = np.arange(tables.shape[1] * size) > ends[:, None]
    return Singles(row, row + len(steps), pool.strips_of(tables), _added(beyond, pool, dtype))


def _chunk(row: int, step: SeqStep, pool: KvPool, dtype: torch.dtype) -> Chunk:
    rows = len(step.tokens)
    if step.start == 0:
        return Chunk(row, row + rows, None, None)
    end = step.start + rows
    table = np.array([step.blocks[: -(-end // pool.block_size)]], np.int64)
    beyond = np.arange(end) > np.arange(step.start, end)[:, None]
    mask = _added(beyond, pool, dtype)[:, 0, 0]
    return Chunk(row, row + rows, pool.strips_of(table), mask)


def _added(beyond: np.typing.NDArray[np.bool_], pool: KvPool, dtype: torch.dtype) -> Tensor:
    """[n, 1, 1, tokens] of 0 and minus infinity."""
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(torch.from_numpy(beyond), -np.inf)
    return mask[:, None, None].to(pool.device)
