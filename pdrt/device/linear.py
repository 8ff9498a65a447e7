"""A matrix that multiplies activations, by whichever kernel is fastest for so many rows.

It stays as it is saved, [out, in] with contiguous rows, so that compiled loops can read it too.
Measured with torch 2.13 on AVX-512/AMX cores, on matrices that no cache holds:

In bfloat16 a matrix-vector product is a third faster than `F.linear` for one row, and
W @ x^T by a quarter for 2 to 32 rows, on one thread for 64. oneDNN's packed weights would be
another tenth to quarter faster up to 128 rows, and are a fifth slower from 512 on.

In float32 oneDNN's inner product (a private operator of torch) is faster by 5 to 20 % for 4 to
256 rows, and slower for fewer and for more.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS: Final = {torch.bfloat16: range(1, 65), torch.float32: range(4, 257)}
_NONE: Final = range(0)


class Linear:
    """y = x W^T + b for x [rows, in]; the weight is [out, in]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        w, bias = self.weight, self.bias
        if len(x) not in FEW_ROWS.get(w.dtype, _NONE) or not w.is_cpu:
            return F.linear(x, w, bias)
        if w.dtype is torch.float32:
            return _inner_product(x, w, bias) if _has_onednn() else F.linear(x, w, bias)
        y = torch.mv(w, x[0])[None] if len(x) == 1 else torch.mm(w, x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)


def _inner_product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - no public one
    y: Tensor = multiply(x, w, bias, "none", [], "")
    return y


@cache
def _has_onednn() -> bool:
    """Whether torch was built with it, and with the operator: since 2.0, on x86 and others."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
