"""Torch's tensors through the compiled loops: threads and scratch memory, and the calls.

One `Loops` serves a device thread. Nothing is copied but what is a few rows.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdrt.device.jit import decode, prefill, products, tiles
from pdrt.device.jit.chunks import BLOCK, QUERIES, Desk, Prompts
from pdrt.device.jit.crew import Crew
from pdrt.device.jit.decode import PHASES, Pool, Rows, Shape, Weights
from pdrt.device.jit.panels import DEPTH
from pdrt.device.jit.prefill import LOT, TALL
from pdrt.device.jit.products import PORTION, Scratch
from pdrt.device.jit.sizes import DEEP, TILE

STEP: Final = DEEP  # widths of matrices are multiples of this, heads of LANES
Floats = npt.NDArray[np.float32]
KINDS: Final[dict[torch.dtype, np.generic]] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.int8: np.int8(0),
}
_LINE: Final = 64  # bytes
_NOTHING: Final = np.zeros(0, np.float32)


class Loops:
    """For a pool and matrices of one dtype, float32 or bfloat16.

    Matrices may be in int8 instead; what they multiply is rounded as with those of the dtype.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        crew: Crew,
        *,
        tiled: bool = True,
        quantized: bool = False,
    ) -> None:
        """`tiled`: bfloat16 goes through AMX where there is one. `quantized`: in int8."""
        self._pool_kind = KINDS[dtype]
        self._kind = KINDS[torch.int8] if quantized else self._pool_kind
        self._is_tiled = tiled and dtype is torch.bfloat16 and tiles.are_usable()
        self._crew = crew
        self._tiles = _configurations(crew.size)
        self._room = _aligned(crew.size, tiles.ROOM)
        self._memory: dict[str, Floats] = {}

    def decode(self, weights: Weights, shape: Shape, pool: Pool, rows: Rows, wide: int) -> None:
        """One token of each row through all layers: `rows.x` becomes the hidden states.

        `wide` is the MLP's intermediate size.
        """
        count, hidden = rows.x.shape
        widest = max(hidden, shape.heads * shape.head_dim, wide)
        scratch = self._scratch(PHASES * pool.layers, count, widest)._replace(
            normed=self._floats("normed", self.threads, count, hidden),
            hidden=self._floats("hidden", count, wide),
        )
        scratch = self._to_attend(scratch, shape, rows, pool)
        fixed = self._kind, self._pool_kind, self._is_tiled
        self._crew.run(lambda me: decode.decode(*fixed, me, weights, shape, pool, rows, scratch))

    def has_prefill(self, head_dim: int) -> bool:
        """Whether `prefill` can compute a model of these matrices and heads."""
        if self._pool_kind is KINDS[torch.float32]:
            return True
        return self._is_tiled and head_dim % DEEP == 0

    def prefill(
        self, weights: Weights, shape: Shape, pool: Pool, prompts: Prompts, wide: int
    ) -> None:
        """Chunks of prompts, and single tokens, through all layers: `prompts.x` becomes the hidden
        states. `wide` is the MLP's intermediate size.
        """
        desk = self._desk(shape, prompts, wide)
        scratch = self._scratch(prefill.PHASES * pool.layers, 0, 0)
        scratch = self._to_attend(scratch, shape, prompts.singles, pool)
        given = weights, shape, pool, prompts, desk, scratch
        fixed = self._pool_kind, self._kind
        self._crew.run(lambda me: prefill.prefill(*fixed, me, *given))

    def _to_attend(self, scratch: Scratch, shape: Shape, rows: Rows, pool: Pool) -> Scratch:
        """With what single tokens need for attention."""
        count, tokens = len(rows.positions), rows.tables.shape[1] * pool.size
        group, q = shape.heads // shape.kv_heads, shape.heads * shape.head_dim
        return scratch._replace(
            qkv=self._floats("qkv", count, q + 2 * shape.kv_heads * shape.head_dim),
            attended=self._floats("attended", count, q),
            scores=self._floats("scores", self.threads, group * tokens),
            shares=self._floats("shares", self.threads, group, tokens),
        )

    def _desk(self, shape: Shape, prompts: Prompts, wide: int) -> Desk:
        panels, hidden, _ = prompts.x.shape
        q, dim, kv = shape.heads * shape.head_dim, shape.head_dim, shape.kv_heads
        keys = int(prompts.chunks[:, 4].sum())
        longest = int(prompts.chunks[:, 4].max(initial=0))
        straight = longest if self._pool_kind.itemsize == 2 else 0
        room = 2 * LOT * DEPTH if self._kind is not self._pool_kind else 0
        return Desk(
            self._narrow("panels normed", panels, hidden),
            self._wide("panels of qkv", panels, q + 2 * kv * dim),
            self._narrow("queries", panels, q),
            self._narrow("panels attended", panels, q),
            self._narrow("panels of the MLP", panels, wide),
            self._of_kind("keys", kv, keys, dim),
            self._of_kind("values", kv, keys, dim),
            self._of_kind("straight", self.threads, straight, dim),
            self._wide("gates", self.threads, 2, TALL, LOT),
            self._of_kind("room", self.threads, room),
            self._wide("line", self.threads),
            self._wide("panels of scores", self.threads, QUERIES, BLOCK),
            self._wide("sums", self.threads, QUERIES, dim),
            self._wide("state", self.threads, QUERIES, 3),
        )

    def _wide(self, name: str, *shape: int) -> Floats:
        return self._floats(name, *shape, TILE)

    def _narrow(self, name: str, panels: int, width: int) -> npt.NDArray[np.uint32]:
        size = width * self._pool_kind.itemsize // 4
        return self._floats(name, panels, size, TILE).view(np.uint32)

    def _of_kind(self, name: str, *shape: int) -> npt.NDArray[np.generic]:
        found = self._floats(name, math.prod(shape) * self._pool_kind.itemsize // 4)
        return found.view(self._pool_kind.dtype).reshape(shape)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """x [rows, in] times weight [out, in] transposed, in float32; a scale a row of int8.

        `norm`: float32 weights [in] of an RMSNorm that x goes through before.
        """
        out, wide = torch.empty(x.shape[0], weight.shape[0]), x.float().contiguous().numpy()
        kind = KINDS[weight.dtype]
        normed = self._floats("normed", self.threads, *x.shape)
        scratch = self._scratch(1, *x.shape)._replace(normed=normed)
        scales, norms = (_NOTHING if each is None else each.numpy() for each in (scale, norm))
        fixed = kind, self._is_tiled
        given = wide, norms, eps, weight.data_ptr(), scales, _NOTHING, out.numpy(), scratch
        self._crew.run(lambda me: products.linear(*fixed, me, *given))
        return out

    @property
    def threads(self) -> int:
        return self._crew.size

    def _scratch(self, phases: int, rows: int, width: int) -> Scratch:
        """What every call needs, for x [rows, width]."""
        threads, padded = self.threads, -(-rows // TILE) * TILE
        deep = width // 2 if self._is_tiled else 0
        packed = self._floats("packed", threads, padded * deep)
        plane, cube = np.zeros((0, 0), np.float32), np.zeros((0, 0, 0), np.float32)
        return Scratch(
            sync=np.zeros(products.sync_size(phases, threads), np.int64),
            tiles=self._tiles,
            packed=packed.view(np.uint32),
            room=self._room,
            portion=self._floats("portion", threads, 2, PORTION, padded),
            normed=cube,
            qkv=plane,
            attended=plane,
            hidden=plane,
            scores=plane,
            shares=cube,
        )

    def _floats(self, name: str, *shape: int) -> Floats:
        """Memory that is used again, with whatever the last call left there."""
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = _aligned(4 * (size + size // 4)).view(np.float32)
        return self._memory[name][:size].reshape(shape)


def _aligned(*shape: int) -> npt.NDArray[np.uint8]:
    """To lines of the cache: a vector that lies in two of them takes twice as long."""
    memory = np.empty(math.prod(shape) + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + math.prod(shape)].reshape(shape)


def _configurations(threads: int) -> npt.NDArray[np.uint8]:
    """For each thread: all tiles 16 rows of 64 bytes, and room for what was there before."""
    found = np.zeros((threads, 2, 64), np.uint8)
    found[:, 0, 0] = 1  # the palette
    found[:, 0, 16:32:2], found[:, 0, 48:56] = 64, TILE
    return found
