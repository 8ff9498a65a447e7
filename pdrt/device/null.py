"""A device without a model: KV bytes and tokens are deterministic functions of the prefix.

Its use is that nothing can go wrong unseen. Each position's KV holds a rolling hash of the
tokens up to it, and the next token is a weighted sum over all KV bytes of the sequence, read
back from the pool: one wrong byte anywhere always changes the token, several almost surely do.
With a temperature the request's seed and the position shift the token as well. How likely a token
is said to be depends on that sum too, so log-probabilities show damage as tokens do.

In a tensor-parallel group each rank writes and weighs the bytes of its own kv heads, and the sum
over the ranks names the token: the one that a single rank would have drawn.

Context-parallel ranks tell each other the hashes of the rows that each has computed, and all write
all of them; what is drawn the first of them sums up. All sums are over the whole group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.device.batch import Draw, Drawn, Odds, SeqStep
from pdrt.device.chance import uniforms
from pdrt.device.compiler import open_vocabulary
from pdrt.device.grammars import Grammars
from pdrt.device.places import Rendezvous
from pdrt.device.shard import Run, Shard
from pdrt.device.slices import Context, Slice, slices
from pdrt.device.sums import Sums, meet
from pdrt.messages import Grammar, Top
from pdrt.modelspec import NULL_PATH, NULL_SPEC

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]

EOS: Final = 256
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_WHOLE: Final = Shard(NULL_SPEC)
_ALONE: Final = Context()
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64((1 << 32) - 1)
_STRIDE: Final = 0xD1342543DE82EF95
_WIDTH: Final = NULL_SPEC.layers * 2  # words of 8 bytes (a head) a position and kv head


class NullRunner:
    """Implements Runner over byte tokens 0..255 and EOS; `sleep` is what makes a step last."""

    def __init__(
        self,
        block_size: int,
        step_ms: float = 0.0,
        token_ms: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        shard: Shard = _WHOLE,
        context: Context = _ALONE,
    ) -> None:
        self.layout = shard.layout(block_size, "uint8")
        self.eos_token_ids = NULL_SPEC.eos_token_ids
        self.vocab = NULL_SPEC.vocab
        self._step_ms, self._token_ms, self._sleep = step_ms, token_ms, sleep
        self._shard, self._context = shard, context
        self._size = shard.size * context.size
        self._group: Sums | None = None
        self._lanes = _Lanes(shard.kv_heads * _WIDTH, _weight_of(shard))
        self._parts = (len(shard.kv_heads), NULL_SPEC.layers, 2)
        self._pool: Words = np.zeros((0, *self._parts, block_size), np.uint64)
        eos = self.eos_token_ids
        self._grammars = Grammars(partial(open_vocabulary, NULL_PATH, self.vocab, eos), self.vocab)

    def bind(self, pool: memoryview, blocks: int) -> None:
        """Use `pool` as KV memory: 8 bytes, one word, for each head, layer, k or v, position."""
        words = np.frombuffer(pool, "<u8")
        self._pool = words.reshape(blocks, *self._parts, self.layout.block_size)

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        if self._size > 1:
            number = self._context.rank * self._shard.size + self._shard.rank
            self._group = meet(number, self._size, rendezvous, timeout_s)

    def prepare(self, grammar: Grammar | None) -> None:
        self._grammars.prepare(grammar)

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        """Write the steps' KV, then draw from all the KV that each sequence has."""
        whose = slices(batch, self._context.size)
        self._rest(batch, None if whose is None else whose[self._context.rank])
        for step in batch:
            if step.copy_from >= 0:
                block = step.blocks[step.start // self.layout.block_size]
                self._pool[block] = self._pool[step.copy_from]
        words = [_rolled(self._word_before(step), step.tokens) for step in batch]
        if whose is not None:
            words = self._exchanged(words, whose[self._context.rank])
        for step, its in zip(batch, words, strict=True):
            self._write(step, its)
        asked = [step for step in batch if step.draw is not None or step.scoring is not None]
        own = [self._totals(step) for step in asked]
        totals = iter(self._summed([total for each in own for total in each]))
        if not (self._shard.is_first and self._context.is_first):
            return []
        return [
            _drawn(step, [next(totals) for _ in each], self._grammars)
            for step, each in zip(asked, own, strict=True)
        ]

    def _summed(self, totals: list[int]) -> list[int]:
        """The sums over all ranks that have the first share of the rows."""
        return self._added(totals if self._context.is_first else [0] * len(totals))

    def _exchanged(self, words: Sequence[Words], own: Sequence[Slice]) -> list[Words]:
        """All ranks' rows, of each rank its own; a hash is two numbers, for sums have a sign."""
        halves = [np.zeros((2, len(its)), np.uint64) for its in words]
        if self._shard.is_first:
            for part in own:
                its = words[part.step][part.first : part.end]
                halves[part.step][:, part.first : part.end] = its >> _HALF, its & _LOW
        told = self._added([int(n) for each in halves for n in each.ravel()])
        pieces = np.split(np.array(told, np.uint64), np.cumsum([h.size for h in halves])[:-1])
        pairs = (piece.reshape(2, -1) for piece in pieces)
        return [high << _HALF | low for high, low in pairs]

    def _added(self, totals: list[int]) -> list[int]:
        """The sums over all ranks."""
        if self._size == 1 or not totals:
            return totals
        if self._group is None:
            raise RuntimeError("in a group, join comes before execute")
        return self._group.of(totals)

    def _rest(self, batch: Sequence[SeqStep], own: Sequence[Slice] | None) -> None:
        """As long as its rows take."""
        rows = [len(step.tokens) for step in batch] if own is None else [len(s) for s in own]
        prompt_tokens = sum(count for count in rows if count > 1)
        duration = self._step_ms + self._token_ms * prompt_tokens
        if duration > 0 and batch:
            self._sleep(duration / 1000)

    def _write(self, step: SeqStep, words: Words) -> None:
        blocks, offsets = self._places(step, step.start, step.start + len(step.tokens))
        expanded = self._lanes.expand(words)
        self._pool[blocks, :, :, :, offsets] = expanded.reshape(-1, *self._parts)

    def _word_before(self, step: SeqStep) -> int:
        """The hash of the prefix, as the pool remembers it."""
        if step.start == 0:
            return _GOLDEN
        block, offset = divmod(step.start - 1, self.layout.block_size)
        return self._lanes.hash_in(int(self._pool[step.blocks[block], 0, 0, 0, offset]))

    def _places(
        self, step: SeqStep, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(first, end)
        table = np.asarray(step.blocks, np.int64)
        return table[positions // self.layout.block_size], positions % self.layout.block_size

    def _totals(self, step: SeqStep) -> list[int]:
        """What this rank's KV weighs up to each scored row, and up to the last where it draws."""
        length = step.start + len(step.tokens)
        words = self._pool[np.asarray(step.blocks[: -(-length // self.layout.block_size)])]
        bytes_ = np.ascontiguousarray(np.moveaxis(words, -1, 1)).view(np.uint8)
        rows = bytes_.reshape(-1, len(self._lanes.run) * 8)[:length]
        last = [] if step.draw is None else [self._lanes.weighed(rows)]
        if step.scoring is None:
            return last
        end = step.start + len(step.scoring.targets)
        return [*self._lanes.weighed_up_to_each(rows[:end])[step.start :], *last]


def _drawn(step: SeqStep, totals: list[int], grammars: Grammars) -> Drawn:
    scored: list[Odds] = []
    if step.scoring is not None:
        top = step.scoring.top
        for target, total in zip(step.scoring.targets, totals, strict=False):
            scored.append(Odds(_logprob(target, total), _likeliest(total, top)))
    if step.draw is None:
        return Drawn(step.key, -1, 0.0, scored=tuple(scored))
    draws = (step.draw, *step.further)
    first, *others = (_draw(step.key, draw, totals[-1], grammars) for draw in draws)
    return replace(first, further=tuple(others), scored=tuple(scored))


def _draw(key: int, draw: Draw, total: int, grammars: Grammars) -> Drawn:
    shift = 0
    if draw.sampling.temperature > 0:
        shift = int(uniforms(draw.sampling.seed, draw.position)[0] * 256)
    token = _token(total + shift) if draw.is_plain else _likely(draw, total + shift, grammars)
    top = _likeliest(total, draw.sampling.top_logprobs)
    odds = math.nan if draw.fault else _logprob(token, total)
    return Drawn(key, token, odds, top, fault=draw.fault)


def _likely(draw: Draw, total: int, grammars: Grammars) -> int:
    """The likeliest token; biases and grammars count as they do for a model."""
    tokens: Sequence[int] = range(EOS + 1)
    if draw.sampling.grammar is not None:
        tokens = np.flatnonzero(~grammars.forbidden([draw])[0]).tolist() or tokens
    biases = dict(draw.sampling.logit_bias)
    return max(tokens, key=lambda token: _logprob(token, total) + biases.get(token, 0.0))


def _token(total: int) -> int:
    return total % 256 or EOS  # EOS in place of byte 0: every sum has a token of its own


def _logprob(token: int, total: int) -> float:
    """The first token by number from the sum's own on is the likeliest, and so on around."""
    best = _token(total)
    return -math.log(2 + (token - best) % (EOS + 1)) - best / 1024


def _likeliest(total: int, count: int) -> Top:
    tokens = [(_token(total) + further) % (EOS + 1) for further in range(count)]
    return tuple((token, _logprob(token, total)) for token in tokens)


def _rolled(word: int, tokens: Sequence[int]) -> Words:
    """One hash a token, each over all tokens before it."""
    out = []
    for token in tokens:
        word = (word ^ (token + 1)) * _GOLDEN & _MASK
        word ^= word >> 29
        out.append(word)
    return np.array(out, np.uint64)


def _weight_of(shard: Shard) -> int:
    """How much this rank's sum counts. Copies of a head count 1 together, and each counts.

    Of one changed byte in a later copy only a change by exactly 128 stays unseen.
    """
    is_first_copy = shard.rank % shard.copies == 0
    return 3 - 2 * shard.copies if is_first_copy else 2


class _Lanes:
    """The words that a rank has of a position, by their numbers in the whole model."""

    def __init__(self, run: Run, weight: int) -> None:
        self.run = run
        self._seeds = np.arange(run.first, run.end, dtype=np.uint64) * np.uint64(_STRIDE)
        self._weight = weight
        seed = int(self._seeds[0])  # even, as each head has an even number of lanes
        self._seed, self._inverse = seed, pow(seed + 1, -1, _MASK + 1)

    def expand(self, words: Words) -> Words:
        """The KV of each position: variations of its hash. [n, lanes]"""
        mixed: Words = (words[:, None] ^ self._seeds) * (self._seeds + np.uint64(1))
        return mixed  # lane 0 of the model is the hash itself

    def hash_in(self, word: int) -> int:
        """The hash of which `word` is the variation in this rank's first lane."""
        return (word * self._inverse & _MASK) ^ self._seed

    def weighed(self, rows: Bytes) -> int:
        """Sum of bytes times odd weights, modulo 256: any one changed byte changes it.

        The weights differ by position and lane, so exchanged blocks and positions show too.
        """
        return int(np.sum(rows * self._weights(rows), dtype=np.uint8)) * self._weight

    def weighed_up_to_each(self, rows: Bytes) -> list[int]:
        """The same for the first row, the first two, and so on."""
        each = np.sum(rows * self._weights(rows), axis=1, dtype=np.uint8)
        return [int(heap) * self._weight for heap in np.cumsum(each, dtype=np.uint8)]

    def _weights(self, rows: Bytes) -> Bytes:
        positions = np.arange(len(rows), dtype=np.uint64)[:, None]
        lanes = np.arange(self.run.first * 8, self.run.end * 8, dtype=np.uint64)
        mixed = (positions * np.uint64(0x9E3779B1) + lanes * np.uint64(0x85EBCA77)) >> np.uint64(9)
        return mixed.astype(np.uint8) | np.uint8(1)
