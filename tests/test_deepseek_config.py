"""What is read from the config.json of DeepSeek's models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from pdrt.device.shard import Shard
from pdrt.errors import ConfigError
from pdrt.modelspec import Experts, Latent, ModelSpec, Rope

V2_LITE: Final[dict[str, Any]] = {  # as published, without what nobody reads
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: Final = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.read(folder)


def test_v2_lite_is_read_as_published(tmp_path: Path) -> None:
    spec = read(tmp_path, V2_LITE)
    assert (spec.layers, spec.heads, spec.vocab, spec.dtype) == (27, 16, 102400, "bfloat16")
    assert spec.max_model_len == 163840
    assert spec.latent == Latent(kv_lora=512, rope_dim=64, nope_dim=128, v_dim=128)
    assert spec.experts == Experts(
        count=64,
        per_token=6,
        intermediate=1408,
        layers=frozenset(range(1, 27)),
        shared_intermediate=2816,
    )
    assert spec.rope == Rope(
        kind="yarn", factor=40, original_max_len=4096, mscale=0.707, mscale_all_dim=0.707
    )


def test_v3_is_read_as_published_but_for_its_quantisation(tmp_path: Path) -> None:
    spec = read(tmp_path, V3)
    assert spec.latent == Latent(kv_lora=512, rope_dim=64, nope_dim=128, v_dim=128, q_lora=1536)
    assert spec.experts == Experts(
        count=256,
        per_token=8,
        intermediate=2048,
        layers=frozenset(range(3, 61)),
        shared_intermediate=2048,
        scoring="sigmoid",
        normed=True,
        scale=2.5,
        groups=8,
        top_groups=4,
        group_score="top2",
        has_bias=True,
    )
    with pytest.raises(ConfigError, match="quantization_config"):
        read(tmp_path, V3 | {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_token_of_v2_lite_takes_1152_bytes_a_layer_on_every_rank(tmp_path: Path, tp: int) -> None:
    spec = read(tmp_path, V2_LITE)
    layouts = {Shard(spec, rank, tp).layout(64, "bfloat16") for rank in range(tp)}
    assert len(layouts) == 1
    (layout,) = layouts
    assert (layout.kind, layout.model_kv_heads) == ("latent", 1)
    assert layout.block_bytes == 1152 * 27 * 64


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        (V2_LITE, "topk_method", "noaux_tc"),
        (V2_LITE, "scoring_func", "sigmoid"),
        (V2_LITE, "norm_topk_prob", True),  # the references disagree
        (V2_LITE, "mlp_bias", True),
        (V2_LITE, "attention_bias", True),
        (V2_LITE, "moe_layer_freq", 2),
        (V2_LITE, "num_experts_per_tok", 65),
        (V3, "topk_method", "greedy"),
        (V3, "scoring_func", "softmax"),
        (V3, "rope_interleave", False),
        (V3, "n_group", None),
        (V3, "n_group", 256),  # the score of a group is that of its two best experts
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    tmp_path: Path, model: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, model | {key: value})
