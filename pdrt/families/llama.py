"""Llama and its dense kin: they differ in biases, in a norm on queries and keys, in windows."""

from __future__ import annotations

from dataclasses import replace

from pdrt.families.common import decoder
from pdrt.families.fields import Fields
from pdrt.modelspec import ModelSpec


def llama(f: Fields) -> ModelSpec:
    bias = f.get("attention_bias", False)
    return replace(
        decoder(f, "LlamaForCausalLM"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=f.get("mlp_bias", False),
    )


def mistral(f: Fields) -> ModelSpec:
    spec = decoder(f, "MistralForCausalLM")
    return replace(spec, sliding_window=f.get("sliding_window", 0))


def qwen2(f: Fields) -> ModelSpec:
    f.size("num_key_value_heads")  # transformers' default is no model's
    spec = decoder(f, "Qwen2ForCausalLM")
    return replace(spec, qkv_bias=True, sliding_window=optional_window(f))


def qwen3(f: Fields) -> ModelSpec:
    f.size("num_key_value_heads")
    bias = f.get("attention_bias", False)
    return replace(
        decoder(f, "Qwen3ForCausalLM"),
        head_dim=f.size("head_dim", 128),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_window=optional_window(f),
    )


def optional_window(f: Fields) -> int:
    """Qwen names a window that another key turns on."""
    return f.get("sliding_window", 0) if f.get("use_sliding_window", False) else 0
