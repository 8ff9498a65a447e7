"""What most families say in the same words of config.json: shapes, rope, limits, end tokens."""

from __future__ import annotations

from typing import get_args

from pdrt.errors import ConfigError
from pdrt.families.fields import Fields, read_json
from pdrt.modelspec import Dtype, Experts, ModelSpec, Rope, RopeKind


def decoder(f: Fields, architecture: str) -> ModelSpec:
    """The plain decoder that Llama made common; a family replaces what it says otherwise."""
    if f.get("hidden_act", "silu") != "silu":
        raise f.refuse("hidden_act", "not supported; supported is silu")
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    kv_heads = f.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    turns = rope(f)
    return ModelSpec(
        architecture=architecture,
        vocab=f.size("vocab_size"),
        max_model_len=max_len(f, turns),
        eos_token_ids=eos_token_ids(f),
        dtype=dtype(f),
        layers=f.size("num_hidden_layers"),
        hidden=hidden,
        intermediate=f.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.size("head_dim", hidden // heads),
        rms_norm_eps=f.get("rms_norm_eps", 1e-6),
        tied=f.get("tie_word_embeddings", False),
        rope=turns,
    )


def check_experts(f: Fields, experts: Experts) -> Experts:
    """As they are. Raises ConfigError when a token cannot have so many of them."""
    if experts.count % experts.groups or experts.top_groups > experts.groups:
        raise ConfigError(
            f"{f.where}: {experts.count} experts in {experts.groups} groups of which"
            f" {experts.top_groups} are used cannot be"
        )
    allowed = experts.count // experts.groups * experts.top_groups
    if experts.per_token > allowed:
        raise f.refuse("num_experts_per_tok", f"must be at most {allowed}")
    return experts


def dtype(f: Fields) -> Dtype:
    """As the weights were saved (`dtype`, or `torch_dtype` in older files); float32 when unsaid."""
    key = "torch_dtype" if f.raw("dtype") is None else "dtype"
    name = f.get(key, "float32")
    match name:
        case "float32" | "bfloat16" | "float16":
            return name
        case _:
            raise f.refuse(key, "not supported; supported are float32, bfloat16, float16")


def rope(f: Fields) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before)."""
    r = f.table("rope_parameters", "rope_scaling")
    kind = r.get("rope_type", r.get("type", "default"))
    partial = r.get("partial_rotary_factor", f.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise f.refuse("partial_rotary_factor", f"{partial} is not supported; supported is 1.0")
    if kind != "default" and r.raw("factor") is None:
        raise ConfigError(f"{f.where}: {kind} rope needs a factor")
    rope = Rope(
        kind=_rope_kind(f, kind),
        theta=r.get("rope_theta", f.get("rope_theta", 10000.0)),
        factor=r.get("factor", 1.0),
        original_max_len=r.get("original_max_position_embeddings", 0),
        low_freq_factor=r.get("low_freq_factor", 1.0),
        high_freq_factor=r.get("high_freq_factor", 4.0),
        beta_fast=r.get("beta_fast", 0.0) or 32.0,
        beta_slow=r.get("beta_slow", 0.0) or 1.0,
        attention_factor=r.get("attention_factor", 0.0),
        mscale=r.get("mscale", 0.0),
        mscale_all_dim=r.get("mscale_all_dim", 0.0),
        truncate=r.get("truncate", True),
    )
    _check_rope(f, rope)
    return rope


def _rope_kind(f: Fields, kind: str) -> RopeKind:
    match kind:
        case "default" | "linear" | "dynamic" | "llama3" | "yarn":
            return kind
        case _:
            raise ConfigError(
                f"{f.where}: rope_type = {kind!r}: not supported;"
                f" supported are {', '.join(get_args(RopeKind))}"
            )


def _check_rope(f: Fields, rope: Rope) -> None:
    if rope.factor <= 0 or rope.theta <= 1:
        raise ConfigError(
            f"{f.where}: rope factor = {rope.factor}, theta = {rope.theta}: must be above 0 and 1"
        )
    if rope.kind in ("llama3", "yarn") and rope.original_max_len < 1:
        raise ConfigError(f"{f.where}: {rope.kind} rope needs original_max_position_embeddings")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError(f"{f.where}: high_freq_factor must be above low_freq_factor")


def max_len(f: Fields, rope: Rope) -> int:
    """Yarn stretches the first length by its factor; others say how far they go.

    A dynamic rope is the plain one up to `max_position_embeddings`; beyond, keys already
    cached would have another base than new ones, so it ends there.
    """
    stated = f.size("max_position_embeddings")
    if rope.kind == "yarn":
        return max(stated, int(rope.original_max_len * rope.factor))
    return stated


def eos_token_ids(config: Fields) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json, else of config.json; may be none."""
    path = config.where.parent / "generation_config.json"
    generation = Fields(path, read_json(path) if path.exists() else {})
    for fields in (generation, config):
        value = fields.raw("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(type(i) is int for i in ids):
            return frozenset(ids)
        if value is not None:
            raise fields.refuse("eos_token_id", "must be an integer or a list of them")
    return frozenset()
