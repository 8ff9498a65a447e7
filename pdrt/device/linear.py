"""A matrix that multiplies activations: which kernel is fastest for how many rows.

Decode reads each weight once for a handful of rows, so what counts is the memory bandwidth a
kernel reaches. Measured with torch 2.13 on AVX-512/AMX cores: for one row `F.linear` reaches
the limit in float32 and a matrix-vector product comes near it in bfloat16; for a few rows
W @ x^T beats `F.linear` by a third (float32) to double (bfloat16); for many it does not.
oneDNN's packed weights (private operators of torch) are a third faster still for 4 to 16
float32 rows and a quarter slower for one; they were left out.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS: Final = range(5, 49)  # W @ x^T in float32; in bfloat16 from two rows


class Linear:
    """y = x W^T + b for x [rows, in]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        w, rows = self.weight, x.shape[0]
        is_float32 = w.dtype is torch.float32
        if not w.is_cpu or rows >= FEW_ROWS.stop or (is_float32 and rows < FEW_ROWS.start):
            return F.linear(x, w, self.bias)
        y = torch.mv(w, x[0])[None] if rows == 1 else torch.mm(w, x.t()).t().contiguous()
        return y if self.bias is None else y.add_(self.bias)
