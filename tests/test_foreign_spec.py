"""A config without a native family is understood as far as an instance must, or refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pdrt.config import ModelSection
from pdrt.errors import ConfigError
from pdrt.modelspec import Backend, ModelSpec
from tests.test_modelspec import LLAMA, MISTRAL, directory

NOVEL: dict[str, object] = {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
LONGROPE: dict[str, object] = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    "original_max_position_embeddings": 512,
}
BY_LAYER: dict[str, object] = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    }
}
GEMMA3: dict[str, object] = {  # as published: most is left to transformers' defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 128,
}


def read(where: Path, changes: dict[str, object], backend: Backend = "auto") -> ModelSpec:
    return ModelSpec.read(directory(where, changes), backend=backend)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({}, "architecture", "NovelForCausalLM"),
        ({}, "backend", "transformers"),
        ({}, "eos_token_ids", {2}),
        ({}, "dtype", "bfloat16"),
        ({"num_key_value_heads": None}, "kv_heads", 4),
        ({"head_dim": 24}, "head_dim", 24),
        ({"intermediate_size": [96, 128]}, "layers", 2),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "max_model_len", 2048),
        (LONGROPE, "max_model_len", 512),  # beyond, cached keys would be turned otherwise
        (BY_LAYER, "max_model_len", 4096),
    ],
)
def test_what_a_config_says(
    tmp_path: Path, changes: dict[str, object], field: str, value: object
) -> None:
    assert getattr(read(tmp_path, NOVEL | changes), field) == value


def test_a_text_model_within_another_is_read_with_what_files_leave_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    spec = ModelSpec.read(tmp_path)
    assert (spec.layers, spec.hidden, spec.kv_heads, spec.head_dim) == (34, 2560, 4, 256)
    assert (spec.vocab, spec.max_model_len, spec.dtype) == (262208, 131072, "bfloat16")
    assert spec.eos_token_ids == {1, 106}


def test_older_names_are_known(tmp_path: Path) -> None:
    gone = dict.fromkeys(LLAMA.keys() - {"vocab_size", "eos_token_id"})
    spec = read(tmp_path, gone | GPT2)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.max_model_len) == (3, 4, 16, 128)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["NovelForMaskedLM"]}, "no causal language model"),
        ({"architectures": None}, "architectures = None"),
        ({"is_encoder_decoder": True}, "NovelForCausalLM is not supported: it has an encoder"),
        ({"alibi": True}, "NovelForCausalLM is not supported: .*ALiBi"),
        ({"kv_lora_rank": 512}, "NovelForCausalLM is not supported: latent attention"),
        ({"mamba_d_state": 16}, "mamba_d_state = 16: NovelForCausalLM .*: it has state-space"),
        ({"conv_L_cache": 3}, "it has state-space, linear-attention or recurrent layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers are"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights"),
        ({"vocab_size": None}, "vocab_size = None: must be a positive integer"),
        ({"num_key_value_heads": [2, 4]}, "num_key_value_heads = .*must be int"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, NOVEL | changes, "transformers")


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": 1024},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
    ],
)
def test_what_a_native_family_does_not_compute_transformers_does(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    assert read(tmp_path, changes).backend == "transformers"
    with pytest.raises(ConfigError):
        read(tmp_path, changes, "native")


def test_a_native_family_is_taken_where_there_is_one_unless_asked_otherwise(tmp_path: Path) -> None:
    path = str(directory(tmp_path, {}))
    assert ModelSpec.of(ModelSection(path=path)).backend == "native"
    assert ModelSpec.of(ModelSection(path=path, backend="transformers")).backend == "transformers"


def test_what_neither_computes_is_refused_with_both_reasons(tmp_path: Path) -> None:
    changes = {"hidden_act": "gelu", "is_encoder_decoder": True}
    with pytest.raises(ConfigError, match=r"supported is silu; through transformers: .*encoder"):
        read(tmp_path, changes)
    with pytest.raises(ConfigError, match=r"^[^;]*quantised weights are not supported$"):
        read(tmp_path, {"quantization_config": {}})


def test_without_transformers_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="not installed: pip install 'transformers>=5,<6'"):
        read(tmp_path, NOVEL)
    assert read(tmp_path, {}).backend == "native"
