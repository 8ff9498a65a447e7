"""Whichever kernel a matrix picks for a number of rows, the product is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdrt.device.linear import FEW_ROWS, Linear

COUNTS = sorted(
    {1, 2, 200} | {n for few in FEW_ROWS.values() for n in (few.start, few.stop - 1, few.stop)}
)


def made(rows: int, dtype: torch.dtype, *, biased: bool) -> tuple[Tensor, Linear, Tensor]:
    """Activations, the matrix, and the product in float64."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(24, 40).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    want = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    return x, Linear(weight, bias), want


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_that_of_the_definition(
    rows: int, dtype: torch.dtype, *, biased: bool
) -> None:
    x, linear, want = made(rows, dtype, biased=biased)
    found = linear(x)
    assert found.is_contiguous()
    assert found.dtype is dtype
    close = 1e-4 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(found.double(), want, atol=close, rtol=close / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_need_not_lie_one_after_the_other(dtype: torch.dtype) -> None:
    x, linear, want = made(6, dtype, biased=True)
    found = linear(torch.stack([x, -x], dim=1)[:, 0])
    torch.testing.assert_close(found.double(), want, atol=0.15, rtol=0.04)


def test_other_dtypes_are_multiplied_too() -> None:
    x, linear, want = made(6, torch.float64, biased=True)
    torch.testing.assert_close(linear(x), want)
