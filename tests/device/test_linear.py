"""Whichever kernel a matrix picks for a number of rows, the product is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdrt.device.linear import FEW_ROWS, Linear
from pdrt.device.models.blocks import Mlp, packed


def made(rows: int, dtype: torch.dtype, *, biased: bool) -> tuple[Tensor, Linear, Tensor]:
    """Activations, the matrix, and the product in float64."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(24, 40).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    want = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    return x, Linear(weight, bias), want


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS.start - 1, FEW_ROWS.start, 48, 49, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_product_is_that_of_the_definition(
    rows: int, dtype: torch.dtype, *, biased: bool, is_packed: bool
) -> None:
    x, linear, want = made(rows, dtype, biased=biased)
    found = (linear.pack() if is_packed else linear)(x)
    assert found.is_contiguous()
    assert found.dtype is dtype
    close = 1e-4 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(found.double(), want, atol=close, rtol=close / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_need_not_lie_one_after_the_other(dtype: torch.dtype) -> None:
    x, linear, want = made(6, dtype, biased=True)
    found = linear.pack()(torch.stack([x, -x], dim=1)[:, 0])
    torch.testing.assert_close(found.double(), want, atol=0.15, rtol=0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_replaces_the_plain_one_and_is_packed_once(dtype: torch.dtype) -> None:
    _, linear, _ = made(1, dtype, biased=False)
    plain = linear.weight
    replaced = linear.pack().weight
    assert linear.pack().weight is replaced
    assert replaced.shape == plain.shape
    dense = replaced.to_dense() if replaced.is_mkldnn else replaced
    assert torch.equal(dense, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_stay_plain(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 4, dtype=dtype)
    assert Linear(weight).pack().weight is weight


def test_all_matrices_of_a_part_are_packed() -> None:
    narrow = torch.bfloat16
    part = Mlp(Linear(torch.randn(8, 4, dtype=narrow)), Linear(torch.randn(4, 4, dtype=narrow)))
    plain = part.gate_up.weight, part.down.weight
    assert packed(part) is part
    _, single, _ = made(1, narrow, biased=False)
    if single.pack().weight.is_mkldnn:
        assert part.gate_up.weight is not plain[0]
        assert part.down.weight is not plain[1]
