"""Tiny random models of each family, made with transformers, which is also the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pdrt.device import torchrunner
from pdrt.device.collective import Solo
from pdrt.device.kv import KvPool
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.modelspec import Kernels, ModelSpec, Quantize
from tests.device.loop import Loop

VOCAB: Final = 320
Tiny: TypeAlias = tuple[Path, Any]  # a model's directory, and transformers' own
SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def _rope(kind: str, **fields: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


def _yarn(**fields: float) -> dict[str, Any]:
    return _rope("yarn", factor=8.0, original_max_position_embeddings=64, **fields)


_MLA: Final[dict[str, Any]] = SHAPE | {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-2,  # which the norms between down and up do not have
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LORA: Final = {"q_lora_rank": 48}
_GROUPS: Final = {"n_group": 4, "topk_group": 2}

CONFIGS: Final[dict[str, Any]] = {
    "llama": LlamaConfig(**SHAPE),
    "llama_wide_heads": LlamaConfig(**SHAPE | {"head_dim": 32}),
    "llama_mha_biased": LlamaConfig(
        **SHAPE | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    ),
    "llama_uneven_vocab": LlamaConfig(**SHAPE | {"vocab_size": VOCAB + 1}),
    "llama3_rope": LlamaConfig(
        **SHAPE,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "linear_rope": LlamaConfig(**SHAPE, **_rope("linear", factor=4.0)),
    "dynamic_rope": LlamaConfig(**SHAPE, **_rope("dynamic", factor=4.0)),
    "yarn_rope": LlamaConfig(
        **SHAPE, **_rope("yarn", factor=8.0, original_max_position_embeddings=64)
    ),
    "smollm2": LlamaConfig(
        **SHAPE | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
        tie_word_embeddings=True,
    ),
    "mistral": MistralConfig(**SHAPE, head_dim=24, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3_moe_sparse": Qwen3MoeConfig(
        **SHAPE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    ),
    "deepseek_v2": DeepseekV2Config(**_MLA),  # as V2-Lite is
    "deepseek_v2_grouped": DeepseekV2Config(
        **_MLA | _LORA | _GROUPS,
        **_yarn(mscale=0.707, mscale_all_dim=0.8),
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
    ),
    "deepseek_v3": DeepseekV3Config(
        **_MLA | _LORA | _GROUPS, **_yarn(mscale=1.0, mscale_all_dim=1.0)
    ),
    "deepseek_v3_plain": DeepseekV3Config(
        **_MLA, n_group=1, topk_group=1, norm_topk_prob=False, tie_word_embeddings=True
    ),
}


def make(name: str, directory: Path, **saving: Any) -> Any:
    """Save the model to `directory` and return transformers' own, in float32."""
    return save(CONFIGS[name], 20 + len(name), directory, **saving)


def save(config: Any, seed: int, directory: Path, **saving: Any) -> Any:
    """As `make`, of any config."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(_random(key, weight, tied=config.tie_word_embeddings))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    model.save_pretrained(directory, **saving)
    model.generation_config.eos_token_id = None  # the tests want all tokens
    model.generation_config.pad_token_id = 0
    return model.eval()


def _random(key: str, weight: torch.Tensor, *, tied: bool) -> torch.Tensor:
    """Spread so that greedy answers neither tie nor repeat one token."""
    noise: torch.Tensor = torch.randn(weight.shape)
    if key == "model.norm.weight":
        return (1 + 0.1 * noise) * (10 if tied else 1)
    if "norm" in key:
        return 1 + 0.1 * noise
    if "embed_tokens" in key:
        return noise * (0.1 if tied else 1.0)
    if weight.ndim == 1:
        return 0.1 * noise
    return noise * 1.2 / math.sqrt(weight.shape[-1])


def answer(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What transformers' `generate` says greedily."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    said: list[int] = out[0, len(prompt) :].tolist()
    return said


def judged(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Transformers' logits [tokens, vocab] of all rows in one forward."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return logits


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    tokens: list[int] = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return tokens


def runner(
    directory: Path,
    dtype: str = "float32",
    block_size: int = 16,
    kernels: Kernels = "auto",
    quantize: Quantize = "none",
) -> TorchRunner:
    """Ours, of the model that was saved there."""
    return torchrunner.load(
        directory,
        Shard(ModelSpec.read(directory)),
        device="cpu",
        dtype=dtype,
        block_size=block_size,
        progress=lambda _stage, _done, _total: None,
        kernels=kernels,
        quantize=quantize,
    )


@torch.inference_mode()
def decode_logits(loop: Loop, lengths: Sequence[int]) -> torch.Tensor:
    """[lengths, vocab] of one decode step of new sequences, with the same tokens for any runner."""
    sequences = [loop.sequence(prompt(n, seed=n), 4) for n in lengths]
    loop.memory[:] = bytes(len(loop.memory))  # a runner clears the blocks that a step begins
    loop.step(sequences, chunk=64)
    for sequence in sequences:
        sequence.history[-1] = 5  # whatever was drawn
    runner, batch = loop.runner, [sequence.step(64) for sequence in sequences]
    assert isinstance(runner, TorchRunner)
    blocks = len(loop.memory) // runner.layout.block_bytes
    pool = KvPool(memoryview(loop.memory), blocks, runner.layout, "cpu", mirrored=False)
    wave = runner.model.lay_out(batch, pool)
    found = runner.model.logits(runner.model.forward(wave, pool, Solo())[wave.drawn], Solo())
    assert found is not None, "a rank alone is the first"
    return found


def count_agreeing(loop: Loop, oracle: Any, *, gap: float, chunk: int) -> int:
    """Prompts whose best next token leads by `gap`: it is said after each, or this fails."""
    compared = 0
    for length in range(1, 60):
        asked = prompt(length)
        with torch.no_grad():
            best = oracle(torch.tensor([asked])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] > gap:
            assert loop.answer(asked, 1, chunk) == [int(best.indices[0])]
            compared += 1
    return compared
