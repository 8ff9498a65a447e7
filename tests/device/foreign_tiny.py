"""Tiny random models that no family here computes, for the transformers back end."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    SiglipVisionConfig,
)

from tests.device.tiny import SHAPE

WINDOW: Final = 24
_SHAPE: Final[dict[str, Any]] = SHAPE | {"bos_token_id": 1, "pad_token_id": 0}
_MIXED: Final[dict[str, Any]] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA: Final[dict[str, Any]] = {"head_dim": 24, "query_pre_attn_scalar": 20, **_MIXED}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

CONFIGS: Final[dict[str, Any]] = {
    "gemma2": Gemma2Config(**_SHAPE, **_GEMMA),  # scores and logits are capped
    "gemma3": Gemma3TextConfig(**_SHAPE, **_GEMMA),  # two ropes
    "gemma3_with_images": Gemma3Config(
        text_config={**_SHAPE, **_GEMMA},
        vision_config=SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=300,
        eos_token_id=[7, 9],
    ),
    "gpt_oss": GptOssConfig(**_SHAPE, **_MIXED, **_EXPERTS, head_dim=16),  # sinks
    "phi3": Phi3Config(**_SHAPE, sliding_window=WINDOW),
    "olmo2": Olmo2Config(**_SHAPE),
    "granite": GraniteConfig(
        **_SHAPE, logits_scaling=2.0, embedding_multiplier=3.0, attention_multiplier=0.2
    ),
    "cohere2": Cohere2Config(**_SHAPE, **_MIXED),  # no positions in full layers
    "mistral_window": MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "llama4": Llama4TextConfig(  # attends within chunks
        **_SHAPE | {"num_hidden_layers": 4},
        **_EXPERTS,
        head_dim=16,
        intermediate_size_mlp=96,
        attention_chunk_size=WINDOW,
    ),
    "llama": LlamaConfig(**_SHAPE),
    "llama_gelu": LlamaConfig(**_SHAPE, hidden_act="gelu"),
}
