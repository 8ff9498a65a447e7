"""Questions of all kinds, and transformers as the judge of what was answered to them.

The judge reads prompt and answer in one plain forward of the same weights in float32: row for row
it says what `generate` would have said there. A greedy answer must be the likeliest token of each
row; a sampled one is what the sampler draws from transformers' logits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import torch
from torch import Tensor

from pdrt.device.batch import Draw
from pdrt.device.chance import of_sequence
from pdrt.device.sampler import draw
from pdrt.messages import Sampling
from tests.e2e.cluster import Cluster

BLOCK: Final = 8
DIVIDES, DIVIDES_NOT = 32, 20  # chunk sizes: whole blocks, and two and a half of them
TOKENS: Final = 8
CLOSE: Final = 1e-3  # of log-probabilities
TIE: Final = 2e-5  # logits that differ by less in float32 are no reason to prefer one
ROUNDINGS: Final = 64  # of a row, that a sampled answer may come from
# How many sampled answers may. Transformers' own logits of 49,152 tokens differ by 1.2e-5 (one
# standard deviation) between a prompt and a cache, which changes one of 80,000 draws of three
# levels. A verdict is on some 400 draws by six paths at most: 0.03 are expected, and two come once
# in 2,000 verdicts. With fewer tokens it is less.
NEAR: Final = 1
_SHARED: Final = 3 * BLOCK + 5
_KINDS: Final[list[dict[str, Any]]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "seed": 1, "logprobs": 0},
    {"temperature": 0, "n": 2, "logprobs": 1},
    {"temperature": 1.1, "top_p": 0.9, "seed": 2},
    {"temperature": 0.9, "n": 3, "seed": 3, "logprobs": 2},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 4, "logprobs": 5},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0},
]


@dataclass(frozen=True, slots=True)
class Question:
    prompt: list[int]
    params: dict[str, Any]
    hit: int | None = None  # tokens of the prompt that are in the cache; None: who knows

    @property
    def body(self) -> dict[str, Any]:
        params = {"max_tokens": TOKENS, "ignore_eos": True, **self.params}
        return {"prompt": self.prompt, "sampling_params": params}

    @property
    def samplings(self) -> list[Sampling]:
        """How each of its sequences draws."""
        known = {k: v for k, v in self.params.items() if k != "logprobs"}
        sampling = Sampling(max_tokens=TOKENS, **known)
        return [of_sequence(sampling, index) for index in range(sampling.n)]


def mixed(vocab: int, seed: int, count: int = 64) -> tuple[list[int], list[Question]]:
    """A prompt to be asked first, and questions: many begin as it does, for 0 to 3 whole blocks."""
    rng = random.Random(seed)
    kinds = cycle(_KINDS)
    shared = _tokens(rng, vocab, _SHARED)
    questions = [_beginning(shared[:k], shared[k], vocab, rng, next(kinds)) for k in _starts()]
    lengths = cycle([*_edges(BLOCK), *_edges(DIVIDES), *_edges(DIVIDES_NOT), 87])
    while len(questions) < count:
        questions.append(Question(_tokens(rng, vocab, next(lengths)), next(kinds)))
    rng.shuffle(questions)
    return shared, questions[:count]


def _starts() -> range:
    return range(3 * BLOCK + 1)


def _edges(size: int) -> list[int]:
    return [size - 1, size, size + 1, 2 * size, 2 * size + 3]


def _tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def _beginning(
    start: list[int], after: int, vocab: int, rng: random.Random, params: dict[str, Any]
) -> Question:
    """A prompt that begins so, and then goes on differently."""
    other = (after + rng.randrange(1, vocab)) % vocab
    tail = _tokens(rng, vocab, rng.randrange(12))
    return Question([*start, other, *tail], params, hit=len(start) // BLOCK * BLOCK)


@dataclass(frozen=True, slots=True)
class Said:
    """One sequence of an answer."""

    prompt: list[int]
    sampling: Sampling
    ids: list[int]
    odds: list[dict[str, Any]] | None  # told where they were asked for

    @property
    def read(self) -> list[int]:
        return [*self.prompt, *self.ids[:-1]]


async def ask(cluster: Cluster, url: str, path: str, questions: Sequence[Question]) -> list[Said]:
    """All at once. What is told of the cache must be true where it is known."""
    answers = await asyncio.gather(*(cluster.post("/generate", q.body, url) for q in questions))
    found = list[Said]()
    for question, answer in zip(questions, answers, strict=True):
        assert (answer.status, answer.headers.get("x-pd-path")) == (200, path), answer.body
        if question.hit is not None:
            assert answer.body["usage"]["cached_tokens"] == question.hit, question
        found += _said(question, answer.body)
    return found


def _said(question: Question, body: dict[str, Any]) -> Iterator[Said]:
    outputs = body.get("outputs", [body])
    for output, sampling in zip(outputs, question.samplings, strict=True):
        assert len(output["output_ids"]) == TOKENS
        assert ("logprobs" in output) == ("logprobs" in question.params)
        yield Said(question.prompt, sampling, output["output_ids"], output.get("logprobs"))


class Judge:
    """Collects what differs; near ties are told apart from errors."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.wrong: list[str] = []
        self.ties: dict[tuple[int, ...], str] = {}  # of greedy answers, by what was read before
        self.near: dict[tuple[int, ...], str] = {}  # of sampled ones

    def hear(self, said: Iterable[Said], at_once: int = 16) -> None:
        """What several paths said alike is read once."""
        alike: dict[tuple[int, ...], list[Said]] = {}
        for one in said:
            alike.setdefault((len(one.prompt), *one.prompt, *one.ids), []).append(one)
        groups = sorted(alike.values(), key=lambda group: len(group[0].read))
        for first in range(0, len(groups), at_once):
            part = groups[first : first + at_once]
            for group, rows in zip(part, self._logits([g[0] for g in part]), strict=True):
                for one in group:
                    self._weigh(one, rows)

    def _logits(self, part: Sequence[Said]) -> Iterator[Tensor]:
        """Of each one's answer; zeros behind a sequence are seen by nothing that comes before."""
        longest = max(len(one.read) for one in part)
        ids = torch.tensor([one.read + [0] * (longest - len(one.read)) for one in part])
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits.float()
        for one, rows in zip(part, logits, strict=True):
            yield rows[len(one.prompt) - 1 : len(one.read)]

    def _weigh(self, one: Said, rows: Tensor) -> None:
        history = [*one.prompt, *one.ids]
        ends = range(len(one.prompt), len(history))
        draws = [Draw(one.sampling, history[:end], len(one.prompt)) for end in ends]
        for at, (wanted, _) in enumerate(draw(rows, draws)):
            if wanted != one.ids[at]:
                self._differs(one, draws[at], wanted, rows[at])
        if one.odds is not None:
            self._weigh_odds(one, rows.log_softmax(-1))

    def _differs(self, one: Said, due: Draw, wanted: int, row: Tensor) -> None:
        at = due.position - len(one.prompt)
        said, read = one.ids[at], (one.sampling.seed, *due.history)
        gap = float(row[wanted] - row[said])
        what = f"{said} for {wanted}, gap {gap:.2g}, at {at} of {one}"
        if one.sampling.temperature == 0 and 0 <= gap < TIE:
            self.ties[read[1:]] = what
        elif one.sampling.temperature > 0 and _is_near(row, due, said):
            self.near[read] = what
        else:
            self.wrong.append(what)

    def _weigh_odds(self, one: Said, rows: Tensor) -> None:
        assert one.odds is not None
        told = [odds["id"] for odds in one.odds]
        if told != one.ids:
            self.wrong.append(f"odds of {told} for {one.ids}")
        for at, odds in enumerate(one.odds):
            worst = _error(odds, rows[at])
            if not worst < CLOSE:
                self.wrong.append(f"log-probability off by {worst:.2g} at {at} of {one}")

    def verdict(self) -> None:
        assert not self.wrong, f"{len(self.wrong)} wrong:\n" + "\n".join(self.wrong[:8])
        assert len(self.ties) <= 1, "\n".join(self.ties.values())
        assert len(self.near) <= NEAR, "\n".join(self.near.values())


def _is_near(row: Tensor, due: Draw, said: int) -> bool:
    """Whether that is drawn from logits that are rounded differently."""
    generator = torch.Generator().manual_seed(1)
    noise = TIE * torch.randn(ROUNDINGS, len(row), generator=generator)
    return said in {token for token, _ in draw(row + noise, [due] * ROUNDINGS)}


def _error(odds: dict[str, Any], row: Tensor) -> float:
    """The largest error in what is told of one token and of the likeliest ones."""
    top = odds["top_logprobs"]
    errors = [abs(float(row[one["id"]]) - float(one["logprob"])) for one in (odds, *top)]
    best: list[float] = row.topk(len(top)).values.tolist()
    errors += [abs(b - float(t["logprob"])) for b, t in zip(best, top, strict=True)]
    return max(errors)
