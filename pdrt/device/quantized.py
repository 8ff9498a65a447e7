"""A matrix held as int8 with one float32 scale a row: half the memory of bfloat16, and its traffic.

Weights alone are rounded, to the nearest of 255 steps between minus and plus the row's largest
magnitude. Activations stay as they are, and int8 is exact in bfloat16, so the one error is that of
rounding weights. Compiled loops read the matrix as it is; here it is widened for each product,
into memory that all matrices share: fresh memory would cost more than the product.

A rank's part of a matrix is scaled as the whole is: a model says the same whatever its `tp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.linear import Linear
from pdrt.device.shard import Run
from pdrt.device.weights import Checkpoint
from pdrt.errors import ConfigError

MOST: Final = 127
TOGETHER: Final = 1 << 22  # values that are in float32 at once while a matrix is read


class Room:
    """Memory for one widened matrix at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def widened(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """It holds until the next one."""
        memory, size = self._memory, weight.numel()
        if memory.dtype != dtype or memory.device != weight.device or memory.numel() < size:
            self._memory = torch.empty(size, dtype=dtype, device=weight.device)
        return self._memory[:size].view(weight.shape).copy_(weight)

    def empty(self) -> None:
        self._memory = torch.empty(0)


class QuantizedLinear:
    """As Linear: y = scale * (x W^T) + b, where W is int8 [out, in] and the scale float32 [out]."""

    __slots__ = ("_room", "bias", "scale", "weight")

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, room: Room | None = None
    ) -> None:
        self.weight, self.scale, self.bias = weight, scale, bias
        self._room = room or Room()

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._room.widened(self.weight, x.dtype)).mul_(self.scale)
        return y if self.bias is None else y.add_(self.bias)

    def let_go(self) -> None:
        """Of the memory in which matrices are widened, until one is again."""
        self._room.empty()

    @property
    def exact(self) -> Tensor:
        """The matrix that this stands for, in float32."""
        return self.weight * self.scale.unsqueeze(1)


Matrix: TypeAlias = Linear | QuantizedLinear


def scales(rows: Tensor) -> Tensor:
    """Of matrix rows in float32; those that have only zeros may have any scale."""
    found = rows.abs().amax(dim=1) / MOST
    return torch.where(found == 0, 1.0, found)


class Quantizer:
    """Reads matrices out of a checkpoint into int8; `together` values at a time, or a row."""

    def __init__(self, weights: Checkpoint, device: str, together: int = TOGETHER) -> None:
        self._weights, self._device, self._together = weights, device, together
        self._room = Room()

    def read(
        self, parts: dict[str, Run], columns: Run, rows: int, bias: Tensor | None = None
    ) -> QuantizedLinear:
        """The rows of these tensors one below the other, then zeros up to `rows` in all."""
        weight = torch.zeros(rows, len(columns), dtype=torch.int8, device=self._device)
        scale = torch.ones(rows, device=self._device)
        first = 0
        for name, run in parts.items():
            for some in _portions(run, max(1, self._together // columns.whole)):
                part = slice(first, first + len(some))
                self._fill(name, some, columns, weight[part], scale[part])
                first += len(some)
        return QuantizedLinear(weight, scale, bias, self._room)

    def _fill(self, name: str, rows: Run, columns: Run, weight: Tensor, scale: Tensor) -> None:
        whole = torch.empty(len(rows), columns.whole, device=self._device)
        self._weights.copy(name, whole, (rows, Run.all_of(columns.whole)))
        scale.copy_(scales(whole))
        if not bool(scale.isfinite().all()):
            raise ConfigError(
                f"[model] quantize = 'int8': {name} has values that are not finite numbers"
            )
        own = whole[:, columns.first : columns.end]
        weight.copy_((own / scale.unsqueeze(1)).round_())


def _portions(rows: Run, count: int) -> Iterator[Run]:
    for first in range(rows.first, rows.end, count):
        yield Run(first, min(first + count, rows.end), rows.whole)
