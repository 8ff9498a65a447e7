"""Rotation rounds where transformers rounds, so that bfloat16 comes out the same to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pdrt.device.rope import rotate_

TOKENS, HEADS, HEAD_DIM = 37, 3, 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_equals_that_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator).to(dtype)
    angles = torch.randn(TOKENS, HEAD_DIM // 2, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    states = x.transpose(0, 1)[None].clone()  # [1, heads, tokens, head_dim]
    whole = (torch.cat([each, each], dim=-1)[None] for each in (cos, sin))
    wanted, _ = apply_rotary_pos_emb(states, states, *whole)
    rotate_(x, cos.unsqueeze(1), sin.unsqueeze(1))
    assert torch.equal(x.transpose(0, 1), wanted[0])
