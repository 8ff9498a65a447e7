"""A tiny random model with a tokenizer, whose end is a token of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.device import tiny

WORDS = ['{"', '":', ', "', "Ġthe", "ing", "00", "},", "]}"]
END = 256 + len(WORDS)


def write_model(directory: Path, family: str = "smollm2") -> None:
    """One token a byte, some of several, the end, and then logits that stand for no token."""
    tiny.make(family, directory)
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert END + 1 < tiny.VOCAB
    for name in ("config.json", "generation_config.json"):
        file = directory / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": END}))
