"""What model families share: reading a shard's weights, norms, the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.linear import Linear
from pdrt.device.quantized import Matrix, Quantizer
from pdrt.device.shard import Run, Shard
from pdrt.device.weights import Checkpoint
from pdrt.modelspec import Quantize


class FeedForward(Protocol):
    """What follows attention in a layer: an MLP, or experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part of the result for x [rows, hidden]; the ranks' sum is the whole."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gate and up matrices are one."""

    gate_up: Matrix
    down: Matrix

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class Reader:
    """Makes tensors of one dtype on one device out of a checkpoint, and matrices, maybe in int8."""

    def __init__(
        self, weights: Checkpoint, dtype: torch.dtype, device: str, quantize: Quantize = "none"
    ) -> None:
        self.weights, self._dtype, self._device = weights, dtype, device
        self._quantizer = Quantizer(weights, device) if quantize == "int8" else None

    def in_dtype(self, dtype: torch.dtype) -> Reader:
        return Reader(self.weights, dtype, self._device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        out = self.empty(*shape)
        self.weights.copy(name, out)
        return out

    def fused(self, at: str, rows: dict[str, Run], columns: Run, *, bias: bool = False) -> Matrix:
        """The shard's parts of the matrices named in `rows`, one below the other."""
        total = sum(map(len, rows.values()))
        offsets = self.empty(total) if bias else None
        if offsets is not None:
            self._fill(offsets, {f"{at}{name}.bias": run for name, run in rows.items()})
        parts = {f"{at}{name}.weight": run for name, run in rows.items()}
        return self.matrix(parts, columns, total, offsets)

    def matrix(
        self, parts: dict[str, Run], columns: Run, rows: int, bias: Tensor | None = None
    ) -> Matrix:
        """The rows of these tensors one below the other, then zeros up to `rows` in all."""
        if self._quantizer is not None:
            return self._quantizer.read(parts, columns, rows, bias)
        return Linear(self.table(parts, columns, rows), bias)

    def table(self, parts: dict[str, Run], columns: Run, rows: int) -> Tensor:
        """As `matrix`, never in int8."""
        weight = self.empty(rows, len(columns))
        weight[self._fill(weight, parts, columns) :] = 0
        return weight

    def _fill(self, out: Tensor, parts: dict[str, Run], *columns: Run) -> int:
        """With the rows of these tensors; how many."""
        first = 0
        for name, run in parts.items():
            self.weights.copy(name, out[first : first + len(run)], (run, *columns))
            first += len(run)
        return first


def mlp(shard: Shard, read: Reader, at: str, wide: Run) -> Mlp:
    """The columns `wide` of the MLP whose tensors' names begin with `at`."""
    hidden, bias = Run.all_of(shard.spec.hidden), shard.spec.mlp_bias
    return Mlp(
        gate_up=read.fused(at, {"gate_proj": wide, "up_proj": wide}, hidden, bias=bias),
        down=read.fused(at, {"down_proj": hidden}, wide, bias=bias and shard.is_first),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 whatever x is, as transformers does.

    Of the ways to say it in torch the one with the fewest passes, twice as fast as its own.
    """
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale if wide is x else wide.mul_(scale)).to(x.dtype).mul_(weight)
