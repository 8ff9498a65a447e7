"""DeepSeek-V2 and V3: latent attention and experts, in their own words.

`kv_heads` is 1, the latent that all heads share, and `head_dim` what of it is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from pdrt.families.common import check_experts, decoder
from pdrt.families.fields import Fields
from pdrt.modelspec import Experts, Latent, ModelSpec


def deepseek_v2(f: Fields) -> ModelSpec:
    method = f.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise f.refuse("topk_method", "not supported; supported are greedy, group_limited_greedy")
    _only(f, "scoring_func", "softmax")
    _only(f, "norm_topk_prob", False)  # transformers ignores it, DeepSeek's code drops the scale
    _only(f, "mlp_bias", False)
    return _spec(f, "DeepseekV2ForCausalLM", _grouped(f) if method != "greedy" else _experts(f))


def deepseek_v3(f: Fields) -> ModelSpec:
    _only(f, "topk_method", "noaux_tc")
    _only(f, "scoring_func", "sigmoid")
    _only(f, "rope_interleave", True)
    grouped = _grouped(f)
    if grouped.count < 2 * grouped.groups:
        raise f.refuse("n_group", "a group needs two experts, whose scores are its own")
    experts = replace(
        grouped,
        scoring="sigmoid",
        normed=f.get("norm_topk_prob", True),
        group_score="top2",
        has_bias=True,
    )
    return _spec(f, "DeepseekV3ForCausalLM", experts)


def _spec(f: Fields, architecture: str, experts: Experts) -> ModelSpec:
    _only(f, "attention_bias", False)
    latent = Latent(
        kv_lora=f.size("kv_lora_rank"),
        rope_dim=f.size("qk_rope_head_dim"),
        nope_dim=f.size("qk_nope_head_dim"),
        v_dim=f.size("v_head_dim"),
        q_lora=f.get("q_lora_rank", 0),
    )
    spec = decoder(f, architecture)
    return replace(
        spec,
        kv_heads=1,
        head_dim=latent.rope_dim,
        latent=latent,
        experts=check_experts(f, experts),
    )


def _experts(f: Fields) -> Experts:
    _only(f, "moe_layer_freq", 1)
    wide = f.size("moe_intermediate_size")
    layers = range(f.get("first_k_dense_replace", 0), f.size("num_hidden_layers"))
    return Experts(
        count=f.size("n_routed_experts"),
        per_token=f.size("num_experts_per_tok"),
        intermediate=wide,
        layers=frozenset(layers),
        shared_intermediate=wide * f.size("n_shared_experts"),
        scale=f.get("routed_scaling_factor", 1.0),
    )


def _grouped(f: Fields) -> Experts:
    return replace(_experts(f), groups=f.size("n_group"), top_groups=f.size("topk_group"))


def _only(f: Fields, key: str, value: bool | int | str) -> None:
    """Raises ConfigError when it says anything else."""
    if f.raw(key) not in (None, value):
        raise f.refuse(key, f"not supported; supported is {value!r}")
