"""What a model is, read from its Hugging Face directory without torch and without its weights.

A model that pdrt would compute wrongly is refused here, by the name of what is not supported,
before any weight is read: an unknown architecture or rope variant, a sliding window that would
cut, quantised weights. `NULL_SPEC` describes the null device's stand-in for a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from pdrt.errors import ConfigError

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "uint8"]
RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Attention: TypeAlias = Literal["plain", "qkv_bias", "qk_norm"]

NULL_PATH: Final = "null"
ARCHITECTURES: Final[Mapping[str, Attention]] = {
    "LlamaForCausalLM": "plain",
    "MistralForCausalLM": "plain",
    "Qwen2ForCausalLM": "qkv_bias",
    "Qwen3ForCausalLM": "qk_norm",
}
_T = TypeVar("_T", int, float, str, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; fields that a kind does not use keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0  # llama3, yarn: the length the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 0.0  # yarn; 0: from factor, mscale and mscale_all_dim
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP; on `layers` only, the others are dense."""

    count: int
    per_token: int
    intermediate: int  # of one expert
    layers: frozenset[int]
    shared_intermediate: int = 0  # of the expert that every token uses; 0: there is none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = False  # the chosen experts' weights add up to one
    scale: float = 1.0  # of the routed part
    groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False  # added to scores for choosing alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA): one compressed key and value for all heads."""

    kv_lora: int  # width of the latent; the cache holds it and the rotated part
    rope_dim: int  # of each head's query, and of the one key that all heads share
    nope_dim: int  # of each head's query and key, not rotated
    v_dim: int
    q_lora: int = 0  # 0: queries are not compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and limits of a model; `max_model_len` is already limited by the config."""

    architecture: str
    vocab: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: Dtype
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope = Rope()
    experts: Experts | None = None
    latent: Latent | None = None
    backend: Literal["native", "transformers"] = "native"

    @staticmethod
    def read(path: str | Path, max_model_len: int = 0) -> ModelSpec:
        """The model in a directory (or NULL_SPEC for `null`), limited to `max_model_len` tokens.

        Raises ConfigError: no such model, not supported, or a limit above the model's own.
        """
        if str(path) == NULL_PATH:
            return _limited(NULL_SPEC, max_model_len)
        directory = Path(path)
        fields = _Fields(directory / "config.json", _json(directory / "config.json"))
        spec = _spec(fields, _eos(directory, fields))
        spec = _limited(spec, max_model_len)
        _refuse_windows(fields, spec)
        return spec

    def check_tp(self, size: int, path: str = "") -> None:
        """Raises ConfigError when `size` tensor-parallel ranks cannot share this model evenly."""
        if why := self._why_not_tp(size):
            fitting = (n for n in range(1, self.heads + 1) if not self._why_not_tp(n))
            raise ConfigError(
                f"[parallel] tp = {size}: must divide {why}"
                f"{f' ({path})' if path else ''}; possible: {', '.join(map(str, fitting))}"
            )

    def _why_not_tp(self, size: int) -> str:
        """What `size` ranks must divide and do not; empty when they may share this model."""
        if self.heads % size:
            return f"the model's {self.heads} attention heads"
        if self.kv_heads % size and size % self.kv_heads:
            return f"the model's {self.kv_heads} kv heads or be a multiple"
        if self.intermediate % size:
            return f"the model's intermediate size {self.intermediate}"
        return ""


NULL_SPEC: Final = ModelSpec(
    architecture="null",
    vocab=257,  # bytes and EOS
    max_model_len=32768,
    eos_token_ids=frozenset({256}),
    dtype="uint8",
    layers=2,
    hidden=16,
    intermediate=16,
    heads=8,  # so that tp goes up to 8, with copies of kv heads
    kv_heads=2,
    head_dim=8,
)


class _Fields:
    """A JSON object whose values are checked where they are read, with file and key in errors."""

    def __init__(self, where: Path, data: Mapping[str, object]) -> None:
        self.where, self._data = where, data

    def refuse(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} = {self._data.get(key)!r}: {why}")

    def raw(self, key: str) -> object:
        return self._data.get(key)

    def get(self, key: str, default: _T) -> _T:
        """The value, or `default` where it is absent or null. Raises ConfigError: wrong type."""
        value = self._data.get(key)
        if value is None:
            return default
        kind = type(default)
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            return kind(value)
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
            raise self.refuse(key, f"must be {kind.__name__}")
        return value

    def size(self, key: str, default: int = 0) -> int:
        """A positive integer that must be there unless a default is."""
        value = self.get(key, default)
        if value < 1:
            raise self.refuse(key, "must be a positive integer")
        return value

    def table(self, *keys: str) -> _Fields:
        """The first of these sub-objects that is there; an empty one when none is."""
        for key in keys:
            value = self._data.get(key)
            if isinstance(value, dict):
                return _Fields(self.where, value)
            if value is not None:
                raise self.refuse(key, "must be an object")
        return _Fields(self.where, {})


def _json(path: Path) -> Mapping[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"[model] path: no Hugging Face model directory: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return data


def _spec(f: _Fields, eos: frozenset[int]) -> ModelSpec:
    architecture = _architecture(f)
    attention = ARCHITECTURES[architecture]
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    kv_heads = f.size("num_key_value_heads", heads if attention == "plain" else 0)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    bias = f.get("attention_bias", False) and architecture != "MistralForCausalLM"
    rope = _rope(f)
    return ModelSpec(
        architecture=architecture,
        vocab=f.size("vocab_size"),
        max_model_len=_max_len(f, rope),
        eos_token_ids=eos,
        dtype=_dtype(f),
        layers=f.size("num_hidden_layers"),
        hidden=hidden,
        intermediate=f.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.size("head_dim", 128 if attention == "qk_norm" else hidden // heads),
        rms_norm_eps=f.get("rms_norm_eps", 1e-6),
        tied=f.get("tie_word_embeddings", False),
        qkv_bias=attention == "qkv_bias" or bias,
        o_bias=attention != "qkv_bias" and bias,
        mlp_bias=architecture == "LlamaForCausalLM" and f.get("mlp_bias", False),
        qk_norm=attention == "qk_norm",
        rope=rope,
    )


def _architecture(f: _Fields) -> str:
    """The one supported architecture it names; also refuses what would change its arithmetic."""
    named = f.raw("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise f.refuse("architectures", f"not supported; supported are {', '.join(ARCHITECTURES)}")
    if f.raw("quantization_config") is not None:
        raise f.refuse("quantization_config", "quantised weights are not supported")
    if f.get("hidden_act", "silu") != "silu":
        raise f.refuse("hidden_act", "not supported; supported is silu")
    return known[0]


def _dtype(f: _Fields) -> Dtype:
    """As the weights were saved (`dtype`, or `torch_dtype` in older files); float32 when unsaid."""
    key = "torch_dtype" if f.raw("dtype") is None else "dtype"
    name = f.get(key, "float32")
    match name:
        case "float32" | "bfloat16" | "float16":
            return name
        case _:
            raise f.refuse(key, "not supported; supported are float32, bfloat16, float16")


def _rope(f: _Fields) -> Rope:
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


def _rope_kind(f: _Fields, kind: str) -> RopeKind:
    match kind:
        case "default" | "linear" | "dynamic" | "llama3" | "yarn":
            return kind
        case _:
            raise ConfigError(
                f"{f.where}: rope_type = {kind!r}: not supported;"
                f" supported are {', '.join(get_args(RopeKind))}"
            )


def _check_rope(f: _Fields, rope: Rope) -> None:
    if rope.factor <= 0 or rope.theta <= 1:
        raise ConfigError(
            f"{f.where}: rope factor = {rope.factor}, theta = {rope.theta}: must be above 0 and 1"
        )
    if rope.kind in ("llama3", "yarn") and rope.original_max_len < 1:
        raise ConfigError(f"{f.where}: {rope.kind} rope needs original_max_position_embeddings")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError(f"{f.where}: high_freq_factor must be above low_freq_factor")


def _max_len(f: _Fields, rope: Rope) -> int:
    """Yarn stretches the first length by its factor; others say how far they go.

    A dynamic rope is the plain one up to `max_position_embeddings`; beyond, keys already
    cached would have another base than new ones, so it ends there.
    """
    stated = f.size("max_position_embeddings")
    if rope.kind == "yarn":
        return max(stated, int(rope.original_max_len * rope.factor))
    return stated


def _limited(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"[model] max_model_len = {max_model_len}: this model goes to {spec.max_model_len}"
        )
    return replace(spec, max_model_len=max_model_len) if max_model_len else spec


def _refuse_windows(f: _Fields, spec: ModelSpec) -> None:
    """A sliding window is served only where no sequence is long enough to feel it."""
    window = f.get("sliding_window", 0)
    if spec.architecture == "LlamaForCausalLM" or not window:
        return
    if spec.architecture != "MistralForCausalLM" and not f.get("use_sliding_window", False):
        return
    if window < spec.max_model_len:
        raise f.refuse(
            "sliding_window",
            f"sliding windows are not supported; set [model] max_model_len to at most {window}",
        )


def _eos(directory: Path, config: _Fields) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json, else of config.json; may be none."""
    path = directory / "generation_config.json"
    generation = _Fields(path, _json(path) if path.exists() else {})
    for fields in (generation, config):
        value = fields.raw("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(type(i) is int for i in ids):
            return frozenset(ids)
        if value is not None:
            raise fields.refuse("eos_token_id", "must be an integer or a list of them")
    return frozenset()
