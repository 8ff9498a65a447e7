"""Whichever kernel a matrix picks for a number of rows, the product is the same."""

from __future__ import annotations

import pytest
import torch

from pdrt.device.linear import FEW_ROWS, Linear


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS.start - 1, FEW_ROWS.start, 48, 49])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_that_of_the_definition(
    rows: int, dtype: torch.dtype, *, biased: bool
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(24, 40).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    want = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    found = Linear(weight, bias)(x)
    assert found.is_contiguous()
    assert found.dtype is dtype
    close = 1e-4 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(found.double(), want, atol=close, rtol=close / 4)
