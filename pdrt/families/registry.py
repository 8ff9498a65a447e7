"""Which function reads which architecture's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from pdrt.families import deepseek, foreign, llama, moe
from pdrt.families.fields import Fields
from pdrt.modelspec import ModelSpec

Family: TypeAlias = Callable[[Fields], ModelSpec]  # raises ConfigError

FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
    "MixtralForCausalLM": moe.mixtral,
    "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
}


def parse(f: Fields) -> ModelSpec:
    """By the first architecture it names that is known here; also refuses what none can run."""
    if f.raw("quantization_config") is not None:
        raise f.refuse("quantization_config", "quantised weights are not supported")
    for name in _architectures(f):
        if family := FAMILIES.get(name):
            return family(f)
    raise f.refuse("architectures", f"not supported; supported are {', '.join(FAMILIES)}")


def parse_foreign(f: Fields) -> ModelSpec:
    """For the transformers back end."""
    for name in _architectures(f):
        return foreign.foreign(f, name)
    raise f.refuse("architectures", "names none")


def _architectures(f: Fields) -> list[str]:
    named = f.raw("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []
