"""Who has which heads, and which models a group cannot share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdrt.config import NodeConfig
from pdrt.device.backends import open_runner
from pdrt.device.shard import Run, Shard
from pdrt.errors import ConfigError
from pdrt.modelspec import NULL_SPEC, ModelSpec

SPEC = replace(NULL_SPEC, heads=12, kv_heads=4, head_dim=8, intermediate=48)


def spec(heads: int, kv_heads: int, intermediate: int = 48) -> ModelSpec:
    return replace(SPEC, heads=heads, kv_heads=kv_heads, intermediate=intermediate)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "whose"),
    [
        (4, 4, 1, ["0-4 with 0-4"]),
        (4, 4, 2, ["0-2 with 0-2", "2-4 with 2-4"]),
        (4, 2, 2, ["0-2 with 0-1", "2-4 with 1-2"]),
        (4, 2, 4, ["0-1 with 0-1", "1-2 with 0-1", "2-3 with 1-2", "3-4 with 1-2"]),
        (6, 1, 3, ["0-2 with 0-1", "2-4 with 0-1", "4-6 with 0-1"]),
    ],
)
def test_query_heads_are_where_their_kv_head_is(
    heads: int, kv_heads: int, size: int, whose: list[str]
) -> None:
    shards = [Shard(spec(heads, kv_heads), rank, size) for rank in range(size)]
    assert [
        f"{s.heads.first}-{s.heads.end} with {s.kv_heads.first}-{s.kv_heads.end}" for s in shards
    ] == whose
    for shard in shards:
        for head in range(shard.heads.first, shard.heads.end):
            assert shard.kv_heads.first <= head * kv_heads // heads < shard.kv_heads.end


def test_the_mlp_is_split_in_order() -> None:
    parts = [Shard(SPEC, rank, 4).intermediate for rank in range(4)]
    assert parts == [Run(0, 12, 48), Run(12, 24, 48), Run(24, 36, 48), Run(36, 48, 48)]


def test_a_layout_says_what_the_rank_has_and_what_the_model_has() -> None:
    """So that ranks of unequal groups find out what they have in common."""
    whole, half = Shard(SPEC).layout(16, "float32"), Shard(SPEC, 1, 2).layout(16, "float32")
    assert (half.kv_heads, half.total_kv_heads) == (2, 4)
    assert whole.block_bytes == 2 * half.block_bytes
    assert whole.differences(half) == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "size", "says"),
    [
        (6, 2, 48, 4, "tp = 4: must divide the model's 6 attention heads; possible: 1, 2, 6"),
        (12, 4, 48, 6, "tp = 6: must divide the model's 4 kv heads or be a multiple"),
        (12, 4, 50, 4, "tp = 4: must divide the model's intermediate size 50"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_both_values(
    heads: int, kv_heads: int, intermediate: int, size: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        spec(heads, kv_heads, intermediate).check_tp(size)


def test_the_null_model_can_be_split_by_two_and_four() -> None:
    for size in (1, 2, 4):
        NULL_SPEC.check_tp(size)


def test_a_split_is_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    model = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = NodeConfig.model_validate({"model": {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match="tp = 3: must divide the model's 4 attention heads"):
        open_runner(config, lambda *_: None, 0, 3)
    with pytest.raises(ConfigError, match="safetensors"):
        open_runner(config, lambda *_: None, 0, 2)


def test_a_rank_outside_of_its_group_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="rank 2 is outside of 2 ranks"):
        Shard(SPEC, 2, 2)
