"""Attention over latents (MLA): what the pool has of a token is one vector for all heads.

A head's keys and values are the latent through that head's rows of the layer's up matrix. There
are two ways to the same numbers. Absorbed: queries go down through these rows instead, all heads
attend to the latents as they are, and what they found goes up to values; the pool is read once
for all heads. Expanded: keys and values are made of the latents first, and are narrower than the
latents. Which of them is less work depends on how many new tokens share the expansion: a decode
step is always absorbed, a long chunk expanded (`is_expansion_faster`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.batch import SeqStep
from pdrt.device.kv import KvPool
from pdrt.modelspec import Latent

CACHE_BYTES: Final = 2 << 20
"""Of a core's own cache. It pays that latents stay in it between their gathering and their use:
8 sequences of 2,048 tokens on one thread take 18 ms a layer, together 41 (bfloat16: 10 and 12)."""

ATTENTION_COST: Final = 3
"""In bfloat16, of a multiplication in attention by one in a matrix product; measured with torch
2.13 on AMX cores, where V2-Lite's shape expands from some 50 new tokens on (float32: 170)."""


@dataclass(frozen=True, slots=True)
class Up:
    """A layer's up matrix, the rows of this rank's heads.

    Keys and values are apart: batched products copy what is not contiguous.
    """

    keys: Tensor  # [heads, nope_dim, kv_lora]
    values: Tensor  # [heads, v_dim, kv_lora]
    shape: Latent

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [rows, heads, nope_dim + rope_dim] as they meet latents, [rows, heads, width]."""
        nope, turned = q[..., : self.shape.nope_dim], q[..., self.shape.nope_dim :]
        down = torch.bmm(nope.transpose(0, 1), self.keys)
        return torch.cat([down.transpose(0, 1), turned], dim=-1)

    def release(self, attended: Tensor) -> Tensor:
        """Values [rows, heads * v_dim] of sums over latents [rows, heads, width]."""
        found = attended[..., : self.shape.kv_lora].transpose(0, 1)
        values = torch.bmm(found, self.values.transpose(1, 2))
        return values.transpose(0, 1).flatten(1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, both [heads, tokens, nope_dim + rope_dim], of latents [tokens, width].

        Values that are narrower than keys end in zeros: torch's flash attention wants one width.
        """
        shape, heads = self.shape, len(self.keys)
        low, turned = latents[:, : shape.kv_lora], latents[:, shape.kv_lora :]
        nope, values = (
            F.linear(low, part.flatten(0, 1)).view(len(low), heads, -1)
            for part in (self.keys, self.values)
        )
        keys = torch.cat([nope, turned.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        values = F.pad(values, (0, max(0, keys.shape[-1] - shape.v_dim)))
        return keys.transpose(0, 1), values.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Handful:
    """Single tokens of so few sequences that their latents of a layer stay in the cache."""

    strips: Tensor  # [1, sequences, 1, blocks]
    mask: Tensor  # [sequences, 1, 1, tokens], added to scores

    def attend(self, layer: int, absorbed: Tensor, pool: KvPool, scale: float) -> Tensor:
        """Heads are rows of one head. Latents are keys and values as they are, the rotated part
        too: flash attention wants one width, and the surplus is a tenth of the work."""
        latents = pool.read(layer, self.strips)[0]
        mask = self.mask.expand(-1, -1, absorbed.shape[1], -1)
        queries = absorbed.unsqueeze(1)
        found = F.scaled_dot_product_attention(queries, latents, latents, mask, scale=scale)
        return found.squeeze(1)


@dataclass(frozen=True, slots=True)
class Singles:
    """Rows first..end of the wave: one token each of sequences of similar length, absorbed."""

    first: int
    end: int
    handfuls: Sequence[Handful]
    ups: Sequence[Up]
    scale: float

    def attend(self, layer: int, q: Tensor, _kv: Tensor, pool: KvPool) -> Tensor:
        absorbed = self.ups[layer].absorb(q)
        parts = absorbed.split([len(each.mask) for each in self.handfuls])  # type: ignore[no-untyped-call]
        found = [
            each.attend(layer, part, pool, self.scale)
            for each, part in zip(self.handfuls, parts, strict=True)
        ]
        return self.ups[layer].release(found[0] if len(found) == 1 else torch.cat(found))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows first..end of the wave: consecutive tokens of one sequence."""

    first: int
    end: int
    strips: Tensor | None  # [1, 1, 1, blocks]; None: nothing came before the chunk
    mask: Tensor | None  # [rows, tokens], added to scores; None: causal
    ups: Sequence[Up]
    scale: float

    def attend(self, layer: int, q: Tensor, kv: Tensor, pool: KvPool) -> Tensor:
        up, latents = self.ups[layer], kv
        if self.strips is not None and self.mask is not None:
            latents = pool.read(layer, self.strips)[0, 0, 0, : self.mask.shape[1]]
        if is_expansion_faster(up.shape, len(q), len(latents), q.dtype):
            found = self._over(q, *up.expand(latents))
            return found[..., : up.shape.v_dim].flatten(1)
        shared = latents.unsqueeze(0).expand(q.shape[1], -1, -1)
        return up.release(self._over(up.absorb(q), shared, shared))

    def _over(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads, width] for q [rows, heads, ..] and keys and values [heads, tokens, ..]."""
        found = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            self.mask,
            is_causal=self.mask is None,
            scale=self.scale,
        )
        return found[0].transpose(0, 1)


def is_expansion_faster(shape: Latent, rows: int, tokens: int, dtype: torch.dtype) -> bool:
    """Whether `rows` queries over `tokens` are answered sooner expanded than absorbed.

    Multiplications are counted: to expand is a product for each token, to absorb and release one
    for each row; in return a key and value of a head is `nope + v` wide, not twice the latent.
    """
    through_up = shape.kv_lora * (shape.nope_dim + shape.v_dim)
    pairs = rows * tokens * (ATTENTION_COST if dtype is torch.bfloat16 else 1)
    expanded = tokens * through_up + pairs * (shape.nope_dim + shape.v_dim)
    absorbed = rows * through_up + pairs * 2 * shape.kv_lora
    return expanded < absorbed


@dataclass(frozen=True, slots=True)
class LatentLayouts:
    """How `attention.lay_out` lays out a batch of a model whose layers have these up matrices."""

    pool: KvPool
    dtype: torch.dtype
    ups: Sequence[Up]
    scale: float
    cache_bytes: int = CACHE_BYTES

    def singles(self, row: int, steps: Sequence[SeqStep]) -> Singles:
        many = self._at_once(max(step.start for step in steps) + 1)
        found = [self._handful(steps[i : i + many]) for i in range(0, len(steps), many)]
        return Singles(row, row + len(steps), found, self.ups, self.scale)

    def _at_once(self, tokens: int) -> int:
        """Sequences whose latents are attended to together: one at least for each thread."""
        if self.pool.device != "cpu":
            return sys.maxsize
        threads, width = torch.get_num_threads(), self.pool.layout.head_dim
        return threads * max(1, self.cache_bytes // (tokens * width * self.dtype.itemsize))

    def _handful(self, steps: Sequence[SeqStep]) -> Handful:
        size = self.pool.block_size
        counts = [step.start // size + 1 for step in steps]
        tables = np.empty((len(steps), max(counts)), np.int64)
        for table, step, count in zip(tables, steps, counts, strict=True):
            table[:count] = step.blocks[:count]
            table[count:] = step.blocks[0]  # its own: no foreign NaN can come in through padding
        ends = np.array([step.start for step in steps])
        beyond = np.arange(tables.shape[1] * size) > ends[:, None]
        return Handful(self.pool.strips_of(tables), self._added(beyond)[:, None, None])

    def chunk(self, row: int, step: SeqStep) -> Chunk:
        rows = len(step.tokens)
        if step.start == 0:
            return Chunk(row, row + rows, None, None, self.ups, self.scale)
        end = step.start + rows
        table = np.array([step.blocks[: -(-end // self.pool.block_size)]], np.int64)
        beyond = np.arange(end) > np.arange(step.start, end)[:, None]
        strips, mask = self.pool.strips_of(table), self._added(beyond)
        return Chunk(row, row + rows, strips, mask, self.ups, self.scale)

    def _added(self, beyond: np.typing.NDArray[np.bool_]) -> Tensor:
        """0 and minus infinity."""
        mask = torch.zeros(beyond.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(beyond), -np.inf).to(self.pool.device)
