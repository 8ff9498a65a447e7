"""What a model is, read from its Hugging Face directory without torch and without its weights.

A model that pdrt would compute wrongly is refused here, by the name of what is not supported,
before any weight is read: state-space layers, an encoder, quantised weights. `families` has a
function for each architecture that is computed natively, and one for all that transformers
computes. `NULL_SPEC` describes the null device's stand-in for a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pdrt.config import ModelSection
from pdrt.errors import ConfigError

if TYPE_CHECKING:
    from pdrt.families.fields import Fields

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "uint8"]
Kernels: TypeAlias = Literal["auto", "compiled", "torch"]
RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Backend: TypeAlias = Literal["auto", "native", "transformers"]
Quantize: TypeAlias = Literal["none", "int8"]
NULL_PATH: Final = "null"


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
    sliding_window: int = 0  # tokens that attention looks back; 0: all
    experts: Experts | None = None
    latent: Latent | None = None
    backend: Literal["native", "transformers"] = "native"

    @staticmethod
    def of(model: ModelSection) -> ModelSpec:
        """The configured one. Raises ConfigError as `read` and `check_quantize` do."""
        spec = ModelSpec.read(model.path, model.max_model_len, model.backend)
        spec.check_quantize(model.quantize)
        return spec

    @staticmethod
    def read(path: str | Path, max_model_len: int = 0, backend: Backend = "auto") -> ModelSpec:
        """The model in a directory (or NULL_SPEC for `null`), limited to `max_model_len` tokens.

        Raises ConfigError: no such model, not supported, or a limit above the model's own.
        """
        if str(path) == NULL_PATH:
            return _limited(NULL_SPEC, max_model_len)
        from pdrt.families.fields import Fields, read_json  # here, since families make specs

        config = Path(path) / "config.json"
        fields = Fields(config, read_json(config))
        match backend:
            case "native":
                return _native(fields, max_model_len)
            case "transformers":
                return _foreign(fields, max_model_len)
            case "auto":
                return _either(fields, max_model_len)

    def check_quantize(self, quantize: Quantize) -> None:
        """Raises ConfigError when this model's matrices cannot be held so."""
        if quantize == "none":
            return
        problem = "is computed through transformers" if self.backend == "transformers" else ""
        if self.dtype == "uint8":
            problem = "has no weights"
        elif self.latent is not None:
            problem = "has latent attention"
        elif self.experts is not None:
            problem = "has experts"
        if problem:
            raise ConfigError(
                f"[model] quantize = {quantize!r}: is for dense models of the Llama family and its"
                f" kin; {self.architecture} {problem}"
            )

    def check_tp(self, size: int, path: str = "") -> None:
        """Raises ConfigError when `size` tensor-parallel ranks cannot share this model evenly."""
        if self.backend == "transformers" and size > 1:
            raise ConfigError(
                f"[parallel] tp = {size}: {self.architecture} is computed through transformers,"
                f" which serves tp = 1 alone{f' ({path})' if path else ''}"
            )
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
        if self.latent is None and self.kv_heads % size and size % self.kv_heads:
            return f"the model's {self.kv_heads} kv heads or be a multiple"
        for what, width in self._split_widths():
            if width % size:
                return f"the model's {what} size {width}"
        return ""

    def _split_widths(self) -> Iterator[tuple[str, int]]:
        """The widths inside MLPs; ranks have equal parts of each."""
        if self.experts is None or len(self.experts.layers) < self.layers:
            yield "intermediate", self.intermediate
        if self.experts is not None:
            yield "expert intermediate", self.experts.intermediate
            yield "shared expert intermediate", self.experts.shared_intermediate


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


def _limited(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"[model] max_model_len = {max_model_len}: this model goes to {spec.max_model_len}"
        )
    return replace(spec, max_model_len=max_model_len) if max_model_len else spec


def _native(fields: Fields, max_model_len: int) -> ModelSpec:
    from pdrt.families.registry import parse

    spec = _limited(parse(fields), max_model_len)
    if 0 < spec.sliding_window < spec.max_model_len:
        raise fields.refuse(
            "sliding_window",
            "sliding windows are not supported;"
            f" set [model] max_model_len to at most {spec.sliding_window}",
        )
    return spec


def _foreign(fields: Fields, max_model_len: int) -> ModelSpec:
    from pdrt.families.registry import parse_foreign

    return _limited(parse_foreign(fields), max_model_len)


def _either(fields: Fields, max_model_len: int) -> ModelSpec:
    """Native where that can be, else through transformers, which is slower."""
    try:
        return _native(fields, max_model_len)
    except ConfigError as native:
        try:
            return _foreign(fields, max_model_len)
        except ConfigError as foreign:
            if str(native) == str(foreign):
                raise native from None
            raise ConfigError(f"{native}; through transformers: {foreign}") from None
