"""A matrix that multiplies activations: which kernel is fastest for how many rows.

Decode reads each weight once for a handful of rows, so what counts is the memory bandwidth a
kernel reaches. Measured with torch 2.13 on two AVX-512/AMX cores (docs/log.md): float32
`F.linear` reaches the limit for one row; for bfloat16 a matrix-vector product (one row) and
W @ x^T (few rows) are up to twice as fast as `F.linear`, which wins again for many rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 48


class Linear:
    """y = x W^T + b for x [rows, in]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        w, rows = self.weight, x.shape[0]
        if w.dtype is torch.float32 or rows > FEW_ROWS or not w.is_cpu:
            return F.linear(x, w, self.bias)
        y = torch.mv(w, x[0])[None] if rows == 1 else torch.mm(w, x.t()).t().contiguous()
        return y if self.bias is None else y.add_(self.bias)
