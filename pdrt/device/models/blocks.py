"""What model families share: reading a shard's weights, norms, the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.linear import Linear
from pdrt.device.shard import Run, Shard
from pdrt.device.weights import Checkpoint


class FeedForward(Protocol):
    """What follows attention in a layer: an MLP, or experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part of the result for x [rows, hidden]; the ranks' sum is the whole."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gate and up matrices are one."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class Reader:
    """Makes tensors of one dtype on one device out of a checkpoint."""

    def __init__(self, weights: Checkpoint, dtype: torch.dtype, device: str) -> None:
        self.weights, self._dtype, self._device = weights, dtype, device

    def in_dtype(self, dtype: torch.dtype) -> Reader:
        return Reader(self.weights, dtype, self._device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        out = self.empty(*shape)
        self.weights.copy(name, out)
        return out

    def fused(self, at: str, rows: dict[str, Run], columns: Run, *, bias: bool = False) -> Linear:
        """The shard's parts of the matrices named in `rows`, one below the other."""
        total = sum(map(len, rows.values()))
        weight = self.empty(total, len(columns))
        offsets = self.empty(total) if bias else None
        first = 0
        for name, run in rows.items():
            part = slice(first, first + len(run))
            self.weights.copy(f"{at}{name}.weight", weight[part], (run, columns))
            if offsets is not None:
                self.weights.copy(f"{at}{name}.bias", offsets[part], (run,))
            first += len(run)
        return Linear(weight, offsets)


def mlp(shard: Shard, read: Reader, at: str, wide: Run) -> Mlp:
    """The columns `wide` of the MLP whose tensors' names begin with `at`."""
    hidden, bias = Run.all_of(shard.spec.hidden), shard.spec.mlp_bias
    return Mlp(
        gate_up=read.fused(at, {"gate_proj": wide, "up_proj": wide}, hidden, bias=bias),
        down=read.fused(at, {"down_proj": hidden}, wide, bias=bias and shard.is_first),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 whatever x is, as transformers does; torch's own is slow for many rows."""
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)
