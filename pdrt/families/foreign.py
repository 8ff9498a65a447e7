"""A config of an architecture that has no family here: transformers computes it.

Only what every instance must know is read, under the names that models have for it; transformers
reads the rest. What can be seen here not to be served is refused here, by name; the worker looks
again, at the model's code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from pdrt.errors import ConfigError
from pdrt.families.common import dtype, eos_token_ids
from pdrt.families.fields import Fields
from pdrt.modelspec import ModelSpec

ENDINGS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
ATTENTIONS: Final = ("full_attention", "sliding_attention", "chunked_attention")
STATES: Final = ("mamba", "ssm_", "rwkv", "linear_attn", "linear_conv", "conv_L_cache", "lru_")
"""How keys begin that only models with a state beside keys and values have."""

SAVED_WITHOUT: Final[Mapping[str, Mapping[str, object]]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}
"""Defaults of transformers that checkpoints in use leave to it, by model_type."""


def foreign(config: Fields, architecture: str) -> ModelSpec:
    """Raises ConfigError when transformers is not there, or for what is not served."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{config.where}: {architecture} is served through transformers, which is not"
            " installed: pip install 'transformers>=5,<6'"
        )
    if not architecture.endswith(ENDINGS):
        raise config.refuse("architectures", "not supported: no causal language model")
    f = _text(config)
    _refuse_by_name(f, architecture)
    hidden = f.size(_key(f, "hidden_size", "n_embd", "d_model"))
    heads = f.size(_key(f, "num_attention_heads", "n_head", "n_heads"))
    kv_heads = f.size(_key(f, "num_key_value_heads", "num_kv_heads"), heads)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"must divide the {heads} attention heads")
    return ModelSpec(
        architecture=architecture,
        vocab=f.size("vocab_size"),
        max_model_len=_max_len(f),
        eos_token_ids=eos_token_ids(config) or eos_token_ids(f),
        dtype=dtype(f),
        layers=f.size(_key(f, "num_hidden_layers", "n_layer", "n_layers")),
        hidden=hidden,
        intermediate=4 * hidden,  # some have one a layer; nothing is cut by it
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.size("head_dim", hidden // heads),
        backend="transformers",
    )


def _text(config: Fields) -> Fields:
    """The text model's keys before those around it, and before defaults."""
    text = config.table("text_config")
    kind = text.get("model_type", config.get("model_type", ""))
    return text.over(config).over(Fields(config.where, SAVED_WITHOUT.get(kind, {})))


def _refuse_by_name(f: Fields, architecture: str) -> None:
    def refusal(key: str, why: str) -> ConfigError:
        return f.refuse(key, f"{architecture} is not supported: {why}")

    if f.raw("quantization_config") is not None:
        raise f.refuse("quantization_config", "quantised weights are not supported")
    if f.get("is_encoder_decoder", False):
        raise refusal("is_encoder_decoder", "it has an encoder")
    if f.get("alibi", False):
        raise refusal("alibi", "its attention adds a bias by distance (ALiBi)")
    if f.raw("kv_lora_rank") is not None:
        raise refusal("kv_lora_rank", "latent attention is only served in families of our own")
    for key in f.keys():  # noqa: SIM118 - fields are no mapping
        if key.startswith(STATES):
            raise refusal(key, "it has state-space, linear-attention or recurrent layers")
    kinds = f.raw("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in ATTENTIONS:
            raise refusal("layer_types", f"{kind} layers are not attention")


def _key(f: Fields, *names: str) -> str:
    """The first of these names of one thing that is there; else the first."""
    return next((name for name in names if f.raw(name) is not None), names[0])


def _max_len(f: Fields) -> int:
    """A yarn rope stretches the length that it names; one that changes with length ends before.

    Keys in the cache were turned for shorter sequences: a longrope would want others beyond its
    first length. A dynamic one would beyond `max_position_embeddings`, where all end.
    """
    stated = f.size(_key(f, "max_position_embeddings", "n_positions", "max_sequence_length"))
    for rope in _ropes(f):
        first = rope.get("original_max_position_embeddings", 0)
        first = first or f.get("original_max_position_embeddings", 0)
        match rope.get("rope_type", rope.get("type", "default")):
            case "longrope" | "su":
                stated = min(stated, first or stated)
            case "yarn":
                stated = max(stated, int(first * rope.get("factor", 1.0)))
            case _:
                pass
    return stated


def _ropes(f: Fields) -> list[Fields]:
    """One for all layers, or one for each kind of them."""
    rope = f.table("rope_parameters", "rope_scaling")
    each = [rope.table(kind) for kind in ATTENTIONS if isinstance(rope.raw(kind), dict)]
    return each or [rope]
