"""From logits to tokens, each row for itself: the same request draws the same token in any batch.

Penalties, then biases (which count as they were given), then what a grammar forbids, then
temperature, top_k, top_p and min_p in that order (as transformers applies them), then three uniform
numbers named by (seed, position).
Cuts are by value: tokens as likely as the last one kept are kept too, so that ties do not depend
on a sort's mood.

Logits come rounded differently from a batch of another size, or another instance. The draw goes
through three levels, so that this seldom changes a token (`at_chances`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from pdrt.device.batch import Draw, Drawn, SeqStep
from pdrt.device.chance import uniforms
from pdrt.device.grammars import Grammars
from pdrt.device.odds import MOST_LOGITS, spans, tops
from pdrt.messages import Sampling, Top

Floats: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.intp]
_Told: TypeAlias = tuple[int, float, Top, str]

FIRST_LOOK = 256  # the likeliest tokens that top_p looks at before it sorts the vocabulary


def answer(
    logits: Tensor,
    steps: Sequence[SeqStep],
    most: int = MOST_LOGITS,
    grammars: Grammars | None = None,
) -> list[Drawn]:
    """What each step draws from its row of logits: its own token, and those of its group."""
    draws = [[d for d in (step.draw, *step.further) if d is not None] for step in steps]
    if all(len(own) == 1 for own in draws):
        told = iter(_told(logits, [own[0] for own in draws], grammars))
    else:
        told = iter(_told_apart(logits, draws, most, grammars))
    return [
        _drawn(step.key, list(islice(told, len(own))))
        for step, own in zip(steps, draws, strict=True)
    ]


def _told_apart(
    logits: Tensor, draws: Sequence[Sequence[Draw]], most: int, grammars: Grammars | None
) -> list[_Told]:
    """Several draws from a row, each with a copy of it for itself, not too many at once."""
    rows = [row for row, own in enumerate(draws) for _ in own]
    flat = [d for own in draws for d in own]
    found: list[_Told] = []
    for part in spans(len(rows), logits.shape[1], most):
        found += _told(logits[rows[part]], flat[part], grammars)
    return found


def _told(logits: Tensor, draws: Sequence[Draw], grammars: Grammars | None) -> list[_Told]:
    best = tops(logits, [d.sampling.top_logprobs for d in draws])
    drawn = draw(logits, draws, grammars)
    return [(*said, top, d.fault) for said, top, d in zip(drawn, best, draws, strict=True)]


def _drawn(key: int, told: Sequence[_Told]) -> Drawn:
    first, *others = (Drawn(key, token, odds, top, fault=fault) for token, odds, top, fault in told)
    return replace(first, further=tuple(others)) if others else first


def draw(
    logits: Tensor, draws: Sequence[Draw], grammars: Grammars | None = None
) -> list[tuple[int, float]]:
    """(token, log-probability) for each row of float32 logits [rows, vocab] on the CPU.

    The log-probability is that of the logits as they came, whatever was done to them since. It
    is NaN exactly where they were not numbers (broken KV), or where the draw has a `fault`: that
    token means nothing.
    """
    raw = logits
    changed = [i for i, d in enumerate(draws) if not d.is_plain]
    if changed:
        logits = logits.clone()
        for i in changed:
            penalise_(logits[i], draws[i])
        bias_(logits, draws)
        forbid_(logits, draws, grammars)
    tokens = _tokens(logits, draws)
    said = raw.gather(1, tokens.unsqueeze(1)).squeeze(1) - raw.logsumexp(dim=-1)
    # Of an infinite sum a token that is a number has -inf; what was drawn never has it otherwise.
    odds = [one if one > -math.inf else math.nan for one in said.tolist()]
    for i in changed:
        if draws[i].fault:
            odds[i] = math.nan
    return list(zip(tokens.tolist(), odds, strict=True))


def _tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    sampled = [i for i, d in enumerate(draws) if d.sampling.temperature > 0]
    if sampled and len(sampled) == len(draws):
        return _sample(logits, draws)
    tokens = logits.argmax(dim=-1)
    if sampled:
        tokens[sampled] = _sample(logits[sampled], [draws[i] for i in sampled])
    return tokens


def penalise_(row: Tensor, draw: Draw) -> None:
    """Repetition as in transformers (prompt and output), then presence and frequency as in
    OpenAI's API (output only)."""
    s = draw.sampling
    if s.repetition_penalty == 1.0 and s.presence_penalty == s.frequency_penalty == 0.0:
        return
    history = np.asarray(draw.history, np.int64)
    if s.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(history))
        found = row[seen]
        less = torch.where(found < 0, found * s.repetition_penalty, found / s.repetition_penalty)
        row[seen] = less
    if s.presence_penalty != 0.0 or s.frequency_penalty != 0.0:
        said, counts = np.unique(history[draw.prompt_tokens :], return_counts=True)
        less = s.presence_penalty + s.frequency_penalty * torch.from_numpy(counts)
        row[torch.from_numpy(said)] -= less


def bias_(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Add what the draws say of single tokens to their rows, all at once."""
    said = [(row, *one) for row, d in enumerate(draws) for one in d.sampling.logit_bias]
    if said:
        rows, tokens, biases = zip(*said, strict=True)
        logits[torch.tensor(rows), torch.tensor(tokens)] += torch.tensor(biases)


def forbid_(logits: Tensor, draws: Sequence[Draw], grammars: Grammars | None) -> None:
    """Leave to the rows of draws with a grammar only the tokens that go on with it."""
    rows = [row for row, d in enumerate(draws) if d.sampling.grammar is not None]
    if not rows:
        return
    assert grammars is not None, "who admits a grammar has prepared it"
    forbidden = torch.from_numpy(grammars.forbidden([draws[row] for row in rows]))
    for row, its in zip(rows, forbidden, strict=True):
        logits[row].masked_fill_(its, -math.inf)


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token a row. The vocabulary's order, unlike one by likelihood, does not change when
    logits differ by rounding."""
    temperature = torch.tensor([[d.sampling.temperature] for d in draws])
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    for row, d in zip(weights, draws, strict=True):
        cut_(row, d.sampling)
    return at_chances(weights, np.array([uniforms(d.sampling.seed, d.position) for d in draws]))


def at_chances(weights: Tensor, chances: Floats) -> Tensor:
    """For each row of float32 weights a token, by three chances [rows, 3] from `uniforms`.

    The first one draws a large group of tokens, the second a small one in it, the third a token.
    Rounding moves the bounds between them, and changes what is drawn by the chances that lie in
    between: one level would have a bound for each token, three have some hundred in all.

    A row has some weight. What has none is never drawn: neither a sum nor a share of it by a
    chance below 1 lets it count. Rows that are not numbers give token 0.
    """
    rows, vocab = weights.shape
    fan = 1 << round(math.log2(vocab) / 3)
    short = -vocab % fan**2
    tree = (pad(weights, (0, short)) if short else weights).reshape(rows, -1, fan, fan)
    small, tokens = tree.sum(dim=-1).double().numpy(), tree.numpy()
    each = np.arange(rows)
    first = _places(small.sum(axis=-1), chances[:, :1])
    second = _places(small[each, first], chances[:, 1:2])
    third = _places(tokens[each, first, second], chances[:, 2:])
    return torch.from_numpy((first * fan + second) * fan + third)


def _places(weights: npt.NDArray[np.floating], chances: Floats) -> Places:
    """Where in each row the share `chance` of its sum is passed."""
    heaps = weights.cumsum(axis=-1, dtype=np.float64)
    found: Places = (heaps <= chances * heaps[:, -1:]).sum(axis=-1)
    return found


def cut_(weights: Tensor, s: Sampling) -> None:
    """Zero what top_k, top_p and min_p leave out of one row of probabilities."""
    least = 0.0
    if 0 < s.top_k < weights.shape[0]:
        least = float(weights.topk(s.top_k).values[-1])
    if s.top_p < 1.0:
        left = torch.where(weights >= least, weights, 0.0) if least > 0.0 else weights
        least = max(least, _nucleus(left, s.top_p))
    least = max(least, float(weights.amax()) * s.min_p)
    if least > 0.0:
        weights.masked_fill_(weights < least, 0.0)


def _nucleus(weights: Tensor, top_p: float) -> float:
    """The least probability in the smallest set of likeliest tokens that weighs `top_p`."""
    goal = float(weights.sum(dtype=torch.float64)) * top_p
    for look in (min(FIRST_LOOK, weights.shape[0]), weights.shape[0]):
        best = weights.topk(look).values
        before = best.cumsum(dim=0, dtype=torch.float64) - best
        inside = int((before < goal).sum())
        if inside < look or look == weights.shape[0]:
            return float(best[max(inside, 1) - 1])
    raise AssertionError("the last look sees the whole vocabulary")
