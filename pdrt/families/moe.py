"""Decoders with a mixture of experts whose attention is the plain one."""

from __future__ import annotations

from dataclasses import replace

from pdrt.families.common import check_experts, decoder
from pdrt.families.fields import Fields
from pdrt.families.llama import optional_window
from pdrt.modelspec import Experts, ModelSpec


def qwen3_moe(f: Fields) -> ModelSpec:
    f.size("num_key_value_heads")
    bias = f.get("attention_bias", False)
    spec = replace(
        decoder(f, "Qwen3MoeForCausalLM"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_window=optional_window(f),
    )
    layers = _sparse_layers(f, spec.layers)
    if not layers:
        return spec
    experts = Experts(
        count=f.size("num_experts" if f.raw("num_local_experts") is None else "num_local_experts"),
        per_token=f.size("num_experts_per_tok", 8),
        intermediate=f.size("moe_intermediate_size"),
        layers=layers,
        normed=f.get("norm_topk_prob", False),
    )
    return replace(spec, experts=check_experts(f, experts))


def _sparse_layers(f: Fields, layers: int) -> frozenset[int]:
    """Every so many layers has experts, unless it is named as dense."""
    dense = f.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise f.refuse("mlp_only_layers", "must be a list of integers")
    step = f.size("decoder_sparse_step", 1)
    return frozenset(set(range(step - 1, layers, step)) - set(dense))


def mixtral(f: Fields) -> ModelSpec:
    spec = decoder(f, "MixtralForCausalLM")
    experts = Experts(
        count=f.size("num_local_experts", 8),
        per_token=f.size("num_experts_per_tok", 2),
        intermediate=spec.intermediate,
        layers=frozenset(range(spec.layers)),
        normed=True,
    )
    window = f.get("sliding_window", 0)
    return replace(spec, experts=check_experts(f, experts), sliding_window=window)
