"""Attention over the paged pool for a model that transformers computes.

Keys and values go to the pool; each sequence's rows attend to its own blocks. Which tokens a row
sees is what the model's own mask function says of their positions, so that sliding windows and
chunks need no code of their own, and blocks that no row sees are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.attention import Wave
from pdrt.device.batch import SeqStep
from pdrt.device.foreignattention import Rule, Terms
from pdrt.device.kv import Ints, KvPool


@dataclass(frozen=True, slots=True)
class Span:
    """Rows first..end of a wave: single tokens of several sequences, or a chunk of one."""

    first: int
    end: int
    strips: Tensor  # [2, sequences, kv_heads, blocks]
    positions: Tensor  # [sequences, 1, rows of each, 1]

    def attend(self, layer: int, q: Tensor, _kv: Tensor, pool: KvPool) -> Tensor:
        """As a model does that asks for nothing in particular."""
        terms = Terms(q.shape[-1] ** -0.5)
        return self.attend_on(layer, q, self.look(terms, pool.block_size), terms, pool).flatten(1)

    def look(self, terms: Terms, block_size: int) -> Seen:
        tokens = torch.arange(self.strips.shape[-1] * block_size, device=self.positions.device)
        mask = tokens <= self.positions
        if terms.window:
            mask = mask & (tokens > self.positions - terms.window)
        if terms.rule is not None:
            none = self.positions.new_zeros(())
            mask = mask & terms.rule(none, none, self.positions, tokens)
        first = int(mask.flatten(0, 2).any(0).nonzero()[0]) // block_size
        return Seen(mask[..., first * block_size :].contiguous(), first)

    def attend_on(self, layer: int, q: Tensor, seen: Seen, terms: Terms, pool: KvPool) -> Tensor:
        """[rows, heads, head_dim] for the span's own q [rows, heads, head_dim]."""
        keys, values = pool.read(layer, self.strips[..., seen.first_block :].contiguous())
        sequences, kv_heads = keys.shape[:2]
        by_head = q.view(sequences, -1, kv_heads, q.shape[1] // kv_heads, q.shape[2])
        grouped = by_head.permute(0, 2, 3, 1, 4)
        is_plain = not terms.softcap and terms.sinks is None
        attention = _plain if is_plain else _elaborate
        out = attention(grouped, keys, values, seen.mask, terms)
        return out.permute(0, 3, 1, 2, 4).reshape(q.shape)


class Seen(NamedTuple):
    """Which tokens a span's rows see, and the block from which on they lie."""

    mask: Tensor  # [sequences, 1, rows, tokens]
    first_block: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Lays out a wave for `PagedStep`."""

    pool: KvPool

    def singles(self, row: int, steps: Sequence[SeqStep]) -> Span:
        counts = [step.start // self.pool.block_size + 1 for step in steps]
        tables = np.empty((len(steps), max(counts)), np.int64)
        for table, step, count in zip(tables, steps, counts, strict=True):
            table[:count] = step.blocks[:count]
            table[count:] = step.blocks[0]  # its own: no foreign NaN can come in through padding
        starts = np.array([step.start for step in steps], np.int64)
        return self._span(row, len(steps), tables, starts[:, None, None, None])

    def chunk(self, row: int, step: SeqStep) -> Span:
        end = step.start + len(step.tokens)
        table = np.array([step.blocks[: -(-end // self.pool.block_size)]], np.int64)
        positions = np.arange(step.start, end)[None, None, :, None]
        return self._span(row, len(step.tokens), table, positions)

    def _span(self, row: int, rows: int, tables: Ints, positions: Ints) -> Span:
        strips = self.pool.strips_of(tables)
        return Span(row, row + rows, strips, self.pool.index(positions))


class PagedStep:
    """One forward pass over a pool: the n-th call is layer n's."""

    def __init__(self, wave: Wave, pool: KvPool) -> None:
        self._cells, self._pool = wave.cells, pool
        self.spans = [part for part in wave.parts if isinstance(part, Span)]
        self._seen = dict[tuple[int, Rule | None, int], Seen]()
        self.layers = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        layer, self.layers = self.layers, self.layers + 1
        self._pool.write(layer, self._cells, torch.cat([k, v], dim=1))
        return torch.cat(
            [
                span.attend_on(
                    layer, q[span.first : span.end], self._visible(span, terms), terms, self._pool
                )
                for span in self.spans
            ]
        )

    def _visible(self, span: Span, terms: Terms) -> Seen:
        """Made once a step for all layers that ask the same."""
        key = (span.first, terms.rule, terms.window)
        if key not in self._seen:
            self._seen[key] = span.look(terms, self._pool.block_size)
        return self._seen[key]


def _plain(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, terms: Terms) -> Tensor:
    """For q [sequences, kv_heads, group, rows, head_dim], whose heads share keys by the group."""
    scale = terms.scaling
    if q.shape[3] == 1:  # the group's heads are rows
        out = F.scaled_dot_product_attention(q[..., 0, :], keys, values, mask, scale=scale)
        return out.unsqueeze(3)
    k, v = (tensor[0].unsqueeze(1).expand(-1, q.shape[2], -1, -1) for tensor in (keys, values))
    return F.scaled_dot_product_attention(q[0], k, v, mask[0], scale=scale).unsqueeze(0)


def _elaborate(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, terms: Terms) -> Tensor:
    """The same with capped scores and sinks, which no fused attention knows."""
    group, by_row = q.shape[2], q.shape[:4]
    scores = torch.matmul(q.flatten(2, 3), keys.transpose(-1, -2)).float() * terms.scaling
    scores = scores.view(*by_row, -1)
    if terms.softcap:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(1, -1, group, 1, 1).expand(*by_row, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return torch.matmul(weights.flatten(2, 3), values).view(q.shape)
