"""A random model of a known size, in the usual directory layout: for measuring speed, not answers.

Weights are drawn with a fixed seed and spread so that logits are spread too. Nothing is
downloaded. The tokenizer is there so that the model can be served: its tokens are one or two
ASCII characters, so that a stream says each one as soon as it is drawn.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

Weights = npt.NDArray[np.float32]
Shape = Mapping[str, int]

LLAMA_100M: Final[Shape] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 15,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}
TINY: Final[Shape] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
_END: Final = "<|end|>"
_SPACE: Final = "\u0120"  # as byte-level tokenizers write it
NAMED: Final[Mapping[str, Shape]] = {"llama-100m": LLAMA_100M, "tiny": TINY}


def prepared(cache: Path, name: str, shape: Shape) -> Path:
    """The model's directory, made when it is not there."""
    directory = cache / name
    if not (directory / "config.json").is_file():
        fresh = cache / f".{name}-{os.getpid()}"
        make(fresh, shape)
        try:
            fresh.rename(directory)
        except OSError:  # another process was first
            shutil.rmtree(fresh, ignore_errors=True)
    if not (directory / "tokenizer.json").is_file():  # made before there was one
        add_tokenizer(directory, shape["vocab_size"])
    return directory


def make(directory: Path, shape: Shape) -> None:
    """Write config.json and the weights, float32."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(_weights(shape)), directory / "model.safetensors")
    add_tokenizer(directory, shape["vocab_size"])
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": shape["vocab_size"] - 1,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(about | dict(shape), indent=1))


def add_tokenizer(directory: Path, vocab_size: int) -> None:
    """Byte-level BPE over ASCII; the last id ends an answer."""
    chars = [*map(chr, range(33, 127)), _SPACE]
    pairs = itertools.islice(itertools.product(chars, chars), vocab_size - len(chars) - 1)
    merges = list(pairs)
    pieces = [*chars, *map("".join, merges)]
    model = BPE({piece: id_ for id_, piece in enumerate(pieces)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([_END])
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    fresh = directory / f".tokenizer-{os.getpid()}"
    tokenizer.save(str(fresh))
    fresh.rename(directory / "tokenizer.json")


def _weights(shape: Shape) -> Iterator[tuple[str, Weights]]:
    random = np.random.default_rng(7)
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> Weights:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(1.2 / math.sqrt(columns))

    def norm() -> Weights:
        return 1 + random.standard_normal(hidden, dtype=np.float32) * np.float32(0.1)

    vocab = shape["vocab_size"]
    yield "model.embed_tokens.weight", random.standard_normal((vocab, hidden), dtype=np.float32)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", norm()
        yield f"{at}post_attention_layernorm.weight", norm()
        yield f"{at}self_attn.q_proj.weight", matrix(queries, hidden)
        yield f"{at}self_attn.k_proj.weight", matrix(keys, hidden)
        yield f"{at}self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{at}self_attn.o_proj.weight", matrix(hidden, queries)
        yield f"{at}mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{at}mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{at}mlp.down_proj.weight", matrix(hidden, inner)
    yield "model.norm.weight", norm()
    yield "lm_head.weight", matrix(vocab, hidden)
