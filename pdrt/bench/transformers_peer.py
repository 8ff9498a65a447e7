"""transformers' own `generate` on the same weights, as a peer of `pdrt bench engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pdrt.bench.engine import PROMPT, Case
from pdrt.bench.limits import Clock


class Transformers:
    """Implements Engine."""

    name = "transformers"

    def __init__(self, path: str | Path, dtype: torch.dtype, clock: Clock) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self._model, self._clock = model.eval(), clock

    def seconds(self, case: Case, steps: int) -> float:
        """A step is what a longer answer takes more than a short one, a token."""
        if case.kind == "prefill":
            return self._generate(1, case.rows, 1)
        short = self._generate(case.rows, PROMPT, 1)
        return (self._generate(case.rows, PROMPT, 1 + steps) - short) / steps

    @torch.inference_mode()
    def _generate(self, sequences: int, prompt: int, tokens: int) -> float:
        vocab: int = self._model.config.vocab_size
        ids = torch.randint(0, vocab, (sequences, prompt))
        began = self._clock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return self._clock() - began
