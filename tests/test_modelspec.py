"""A model directory is understood from its config.json alone, or refused for a named reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdrt.errors import ConfigError
from pdrt.modelspec import NULL_SPEC, Experts, ModelSpec, Rope

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


def directory(where: Path, changes: dict[str, object], **files: object) -> Path:
    """A model directory with this config.json; a change to None leaves the key out."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (where / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (where / f"{name}.json").write_text(json.dumps(content))
    return where


def test_a_llama_is_read(tmp_path: Path) -> None:
    assert ModelSpec.read(directory(tmp_path, {})) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=1000,
        max_model_len=2048,
        eos_token_ids=frozenset({2}),
        dtype="bfloat16",
        layers=2,
        hidden=64,
        intermediate=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
    )


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_key_value_heads": None}, "kv_heads", 4),
        ({"head_dim": 24}, "head_dim", 24),
        (QWEN3, "head_dim", 128),
        (QWEN3, "qk_norm", True),
        (QWEN3 | {"attention_bias": True}, "o_bias", True),
        (QWEN2, "qkv_bias", True),
        (QWEN2, "o_bias", False),
        ({"attention_bias": True}, "qkv_bias", True),
        ({"attention_bias": True}, "o_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"tie_word_embeddings": True}, "tied", True),
        ({"dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": None}, "dtype", "float32"),
        ({"rms_norm_eps": 1}, "rms_norm_eps", 1.0),
        ({"eos_token_id": [4, 5]}, "eos_token_ids", {4, 5}),
        ({"eos_token_id": None}, "eos_token_ids", set()),
        ({"rope_theta": 500000}, "rope", Rope(theta=500000.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope",
            Rope(kind="linear", factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0},
            "rope",
            Rope(theta=7.0),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            "max_model_len",
            4096,
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "max_model_len", 2048),
        (MISTRAL | {"sliding_window": 2048}, "max_model_len", 2048),
        (MISTRAL | {"sliding_window": None}, "max_model_len", 2048),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": False}, "max_model_len", 2048),
        ({"sliding_window": 16}, "max_model_len", 2048),  # Llama knows no window
    ],
)
def test_what_a_config_says(
    tmp_path: Path, changes: dict[str, object], field: str, value: object
) -> None:
    assert getattr(ModelSpec.read(directory(tmp_path, changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures = .*Mamba.*supported are Llama"),
        ({"architectures": None}, "architectures = None"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"vocab_size": None}, "vocab_size = None: must be a positive integer"),
        ({"vocab_size": "1000"}, "vocab_size = '1000': must be int"),
        ({"vocab_size": True}, "vocab_size = True: must be int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads = 4"),
        (QWEN2 | {"num_key_value_heads": None}, "num_key_value_heads"),
        ({"torch_dtype": "float8"}, "torch_dtype = 'float8': not supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be bool"),
        ({"eos_token_id": "2"}, "eos_token_id = '2'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear rope needs a factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs original_max"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear': must be an object"),
        ({"partial_rotary_factor": 0.5}, "0.5 is not supported"),
        (MISTRAL | {"sliding_window": 1024}, "max_model_len to at most 1024"),
        (QWEN2 | {"sliding_window": 1024, "use_sliding_window": True}, "at most 1024"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSpec.read(directory(tmp_path, changes), backend="native")


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        (
            MIXTRAL,
            Experts(count=4, per_token=2, intermediate=128, layers=frozenset({0, 1}), normed=True),
        ),
        (
            QWEN3_MOE,
            Experts(count=16, per_token=4, intermediate=32, layers=frozenset({0, 1})),
        ),
        (
            QWEN3_MOE
            | {
                "num_experts": None,
                "num_local_experts": 8,  # as transformers 5 writes it
                "num_hidden_layers": 6,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3, 4],
                "norm_topk_prob": True,
            },
            Experts(count=8, per_token=4, intermediate=32, layers=frozenset({1, 5}), normed=True),
        ),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1]}, None),
        (QWEN3, None),
    ],
)
def test_which_layers_have_which_experts(
    tmp_path: Path, changes: dict[str, object], want: Experts | None
) -> None:
    assert ModelSpec.read(directory(tmp_path, changes)).experts == want


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok = 5: must be at most 4"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (MIXTRAL | {"sliding_window": 1024}, "max_model_len to at most 1024"),
        (MIXTRAL | {"quantization_config": {"bits": 4}}, "quantised weights"),
        (QWEN3_MOE | {"num_experts": None}, "num_experts = None: must be a positive integer"),
        (QWEN3_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers = 3: must be a list of integers"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        (QWEN3_MOE | {"sliding_window": 16, "use_sliding_window": True}, "at most 16"),
    ],
)
def test_experts_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSpec.read(directory(tmp_path, changes), backend="native")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (QWEN3_MOE | {"moe_intermediate_size": 33}, "the model's expert intermediate size 33"),
        (
            QWEN3_MOE | {"intermediate_size": 33, "mlp_only_layers": [0]},
            "the model's intermediate size 33",
        ),
        (MIXTRAL | {"intermediate_size": 33}, "the model's expert intermediate size 33"),
    ],
)
def test_ranks_share_the_columns_of_each_expert_evenly(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    spec = ModelSpec.read(directory(tmp_path, changes))
    with pytest.raises(ConfigError, match=f"tp = 2: must divide {says}.*; possible: 1"):
        spec.check_tp(2)


def test_a_dense_width_that_no_layer_has_need_not_be_shared(tmp_path: Path) -> None:
    changes = QWEN3_MOE | {"intermediate_size": 33}
    ModelSpec.read(directory(tmp_path, changes)).check_tp(2)


def test_the_generation_config_says_what_ends_an_answer(tmp_path: Path) -> None:
    where = directory(tmp_path, {}, generation_config={"eos_token_id": [11, 12]})
    assert ModelSpec.read(where).eos_token_ids == {11, 12}


def test_a_configured_limit_lowers_the_models_own(tmp_path: Path) -> None:
    where = directory(tmp_path, MISTRAL | {"sliding_window": 1024})
    assert ModelSpec.read(where, 1000).max_model_len == 1000
    with pytest.raises(ConfigError, match="max_model_len = 4096: this model goes to 2048"):
        ModelSpec.read(where, 4096, "native")


def test_the_null_model_needs_no_directory() -> None:
    assert ModelSpec.read("null") == NULL_SPEC
    assert ModelSpec.read("null", 100).max_model_len == 100


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no Hugging Face model"), ("{", "not JSON"), ("[]", "JSON object")],
)
def test_a_directory_that_is_no_model_is_refused(
    tmp_path: Path, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        ModelSpec.read(tmp_path)
