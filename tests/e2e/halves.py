"""Prompts for the demo model, and what transformers says to them in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch

_OPENINGS: Final = [
    "The most important thing about {} is",
    "Here is a short explanation of {}:\n",
    "Once upon a time there was a man who knew all about {}.",
    "Q: What should I know about {}?\nA:",
    "In the summer of 1969, {}",
    "My teacher said that {} and",
    "def describe():\n    # prints a sentence about {}\n",
    "# {}\n\n1.",
]
_TOPICS: Final = [
    "the sea",
    "old trains",
    "bread and butter",
    "the French Revolution",
    "photosynthesis",
    "chess",
    "prime numbers",
    "the moon",
    "winter birds",
    "good manners",
    "steam engines",
    "a lost letter",
]
_LENGTHS: Final = (5, 8, 12)


@dataclass(frozen=True, slots=True)
class Continuation:
    prompt: list[int]
    ids: list[int]
    gaps: list[float]  # between the two likeliest tokens of each step

    def difference(self, said: Sequence[int]) -> str:
        """The first one, or nothing."""
        if self.ids == list(said):
            return ""
        at = first_difference(self.ids, said)
        return f"{said[at]} for {self.ids[at]} at {at} of {self.prompt}, gap {self.gaps[at]}"


def first_difference(some: Sequence[int], others: Sequence[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(some, others, strict=True)) if a != b)


def prompts(tokenizer: Any) -> list[list[int]]:
    """The last tokens of each text, so that few lengths occur."""
    texts = [opening.format(topic) for opening in _OPENINGS for topic in _TOPICS]
    whole = [tokenizer(text)["input_ids"] for text in texts]
    return [ids[-max(n for n in _LENGTHS if n <= len(ids)) :] for ids in whole]


def continued(model: Any, asked: Sequence[list[int]], tokens: int) -> list[Continuation]:
    """Greedily. Prompts of one length are a batch, so that nothing is padded."""
    found = list[Continuation]()
    for _, same in groupby(sorted(asked, key=len), key=len):
        found += _batch(model, list(same), tokens)
    return found


@torch.inference_mode()
def _batch(model: Any, asked: list[list[int]], tokens: int) -> list[Continuation]:
    found = [Continuation(prompt, [], []) for prompt in asked]
    rows, cache = torch.tensor(asked), None
    for _ in range(tokens):
        out = model(rows, cache=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[:, -1], out.cache
        best, rows = logits.float().topk(2).values, logits.argmax(-1, keepdim=True)
        for one, token, pair in zip(found, rows[:, 0].tolist(), best.tolist(), strict=True):
            one.ids.append(token)
            one.gaps.append(pair[0] - pair[1])
    return found


@torch.inference_mode()
def reread(model: Any, one: Continuation) -> list[int]:
    """What the model says to the same tokens in one forward, instead of step by step."""
    ids = torch.tensor([[*one.prompt, *one.ids[:-1]]])
    logits = model(ids, use_cache=False, logits_to_keep=len(one.ids)).logits[0]
    said: list[int] = logits.argmax(-1).tolist()
    return said
