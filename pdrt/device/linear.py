"""A matrix that multiplies activations: packed for the CPU's fastest kernel where that is had.

Decode reads each weight once for a handful of rows, so what counts is the memory bandwidth that a
kernel reaches. In bfloat16 oneDNN's packed weights (private operators of torch) beat every plain
kernel of torch 2.13 on AVX-512/AMX cores, by up to a third, at any number of rows. They are
packed as for `PACKED_FOR` rows: what oneDNN picks when it is told fewer, or none, is slower.

In float32 a transposed copy is multiplied faster than the matrix as it is saved, by 1.1 to 1.6
for 1 to 64 rows and no slower for many; its rows are kept apart by a cache line, as rows that
are a power of two long meet in the same sets of a cache. oneDNN's packed form would be a third
faster for 4 to 16 rows, and a quarter slower for one.

Where a matrix stays plain, W @ x^T beats `F.linear` for a few rows, by a third (float32) to double
(bfloat16), and a matrix-vector product for one row in bfloat16.
"""

from __future__ import annotations

import platform
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FOR: Final = 64  # rows
APART: Final = 16  # float32 values: a cache line
FEW_ROWS: Final = range(5, 49)  # W @ x^T in float32; in bfloat16 from two rows
_X86: Final = ("x86_64", "AMD64")


class Linear:
    """y = x W^T + b for x [rows, in]."""

    __slots__ = ("_packed", "_turned", "_weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self.bias = weight, bias
        self._packed: Tensor | None = None
        self._turned: Tensor | None = None  # [in, out]

    @property
    def weight(self) -> Tensor:
        """[out, in]; until it is packed it may be changed."""
        return self._weight

    def pack(self) -> Linear:
        """Replace the matrix by its packed form where that is faster: memory holds it once.

        Only when nobody else holds it.
        """
        if self._packed is not None or self._turned is not None or not _is_measured(self._weight):
            return self
        if self._weight.dtype is torch.float32:
            self._turned = _turned(self._weight)
            self._weight = self._turned.t()
        elif self._weight.dtype is torch.bfloat16 and _multiplies_bfloat16():
            reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - no public one
            self._packed = self._weight = reorder(self._weight, PACKED_FOR)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        if self._turned is not None:
            turned, bias = self._turned, self.bias
            return torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)
        if self._packed is None:
            return _plain(x, self._weight, self.bias)
        multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - no public one
        y: Tensor = multiply(x, self._packed, self.bias, "none", [], "")
        return y


def _is_measured(weight: Tensor) -> bool:
    """Whether packing is known to help on this processor."""
    return weight.is_cpu and platform.machine() in _X86


def _multiplies_bfloat16() -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - no public one


def _turned(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    turned = weight.new_empty(columns, rows + APART)[:, :rows]
    return turned.copy_(weight.t())


def _plain(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    rows, is_float32 = x.shape[0], w.dtype is torch.float32
    if not w.is_cpu or rows >= FEW_ROWS.stop or (is_float32 and rows < FEW_ROWS.start):
        return F.linear(x, w, bias)
    y = torch.mv(w, x[0])[None] if rows == 1 else torch.mm(w, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)
