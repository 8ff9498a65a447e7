"""Rotary position embedding in its variants: inverse frequencies, angles, rotation in place.

Up to their limits (see `modelspec`) all variants are plain rotations with other frequencies;
yarn also scales cosine and sine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdrt.modelspec import ModelSpec, Rope


def frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and what scales cosine and sine."""
    rope = spec.rope
    plain = 1.0 / rope.theta ** (_arange(0, spec.head_dim, 2) / spec.head_dim)
    match rope.kind:
        case "default" | "dynamic":  # dynamic: served only as far as it is the plain one
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, spec.head_dim), _yarn_scale(rope)


def _arange(start: int, end: int, step: int = 1) -> Tensor:
    return torch.arange(start, end, step, dtype=torch.int64).float()


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones stay, a ramp lies between."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    longest, shortest = rope.original_max_len / low, rope.original_max_len / high
    smooth = (rope.original_max_len / wavelength - low) / (high - low)
    ramp = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, ramp, stretched)


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """The dimension that turns so often over the original length."""
        turns = rope.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((_arange(0, head_dim // 2) - low) / width).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [tokens, heads, head_dim] in place; cos and sin are [tokens, 1, head_dim / 2].

    Each product is rounded before the sum, as in transformers: fused, bfloat16 differs in a third
    of what comes out, and over the layers in which of two near tokens is the likelier one.
    """
    first, second = x.chunk(2, dim=-1)
    across, back = second * sin, first * sin
    first.mul_(cos).sub_(across)
    second.mul_(cos).add_(back)
