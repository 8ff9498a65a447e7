"""How likely tokens were, under the distribution that the model gave, unscaled and uncut.

The promise: whatever is asked for, only so many rows of logits are held at once. A log-probability
is NaN where logits were not numbers (broken KV): it means nothing, and neither do the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from pdrt.device.batch import Drawn, Odds, SeqStep
from pdrt.messages import Top

MOST_LOGITS: Final = 1 << 24  # at once: 64 MiB of float32


def spans(rows: int, vocab: int, most: int = MOST_LOGITS) -> Iterator[slice]:
    """The rows, so many at a time as may be held."""
    size = max(1, most // vocab)
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def tops(logits: Tensor, counts: Sequence[int]) -> list[Top]:
    """For each row of float32 logits so many of the likeliest tokens, the first of equals first."""
    found: list[Top] = [()] * len(counts)
    asking = [row for row, count in enumerate(counts) if count]
    if not asking:
        return found
    own = logits if len(asking) == len(counts) else logits[asking]
    most = min(max(counts), own.shape[1])
    values, tokens = own.topk(most, dim=-1)
    said = values - own.logsumexp(dim=-1, keepdim=True)
    for row, ids, odds in zip(asking, tokens.tolist(), said.tolist(), strict=True):
        pairs = sorted(zip(ids, odds, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found[row] = tuple(pairs[: counts[row]])
    return found


def odds(logits: Tensor, targets: Sequence[int], counts: Sequence[int]) -> list[Odds]:
    """Of each row its target's log-probability, and so many of the likeliest tokens."""
    wanted = torch.tensor(targets, device=logits.device).unsqueeze(1)
    said = logits.gather(1, wanted).squeeze(1) - logits.logsumexp(dim=-1)
    return [Odds(*one) for one in zip(said.tolist(), tops(logits, counts), strict=True)]


def score(
    batch: Sequence[SeqStep],
    hidden: Tensor,
    vocab: int,
    logits_of: Callable[[Tensor], Tensor | None],
    most: int = MOST_LOGITS,
) -> list[tuple[Odds, ...]]:
    """For each step the odds of its targets, none where it has no `scoring`.

    `hidden` holds the rows that have targets, in the batch's order. `logits_of` gives None on a
    rank that does not draw; all ranks of a group ask it for the same rows.
    """
    asked = [step.scoring for step in batch if step.scoring is not None]
    targets = [target for scoring in asked for target in scoring.targets]
    counts = [scoring.top for scoring in asked for _ in scoring.targets]
    found = list[Odds]()
    for part in spans(len(targets), vocab, most):
        logits = logits_of(hidden[part])
        if logits is not None:
            found += odds(logits.cpu(), targets[part], counts[part])
    told = iter(found)
    return [
        tuple(islice(told, len(step.scoring.targets))) if step.scoring is not None else ()
        for step in batch
    ]


def joined(
    batch: Sequence[SeqStep], drawn: Sequence[Drawn], scored: Sequence[tuple[Odds, ...]]
) -> list[Drawn]:
    """What was drawn for the steps with a draw, with the odds of those that were scored."""
    own = {one.key: one for one in drawn}
    return [
        replace(own.get(step.key, Drawn(step.key, -1, 0.0)), scored=odds)
        for step, odds in zip(batch, scored, strict=True)
        if step.draw is not None or step.scoring is not None
    ]
