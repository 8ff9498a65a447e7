"""Two tiny tokenizers with the decoders that real models have, made here and written to files."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

WORDS = ["hello", "world", "how", "are", "you", "fine", "thanks", "été", "你好", "😀", "the", "end"]


def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM2: each token is a run of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        chars = [pair[0] for pair in pre_tokenizers.ByteLevel().pre_tokenize_str(word)]
        left = chars[0][0]
        for right in chars[0][1:]:
            merges.append((left, right))
            left += right
            vocab.setdefault(left, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2 and Mistral: words with a mark for spaces, single bytes for what is unknown."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ["▁", "▁▁", *(f"▁{w}" for w in WORDS[:7]), *WORDS[:7], *"abcdefgh!."]:
        vocab.setdefault(word, len(vocab))
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def model_directory(
    path: Path, tokenizer: Tokenizer, template: str | None = None, **config: object
) -> Path:
    """What `open_text` reads of a model; the template in tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    if template is not None:
        fields["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return path
