"""A device without a model: KV bytes and tokens are deterministic functions of the prefix.

Its use is that nothing can go wrong unseen. Each position's KV holds a rolling hash of the
tokens up to it, and the next token is a weighted sum over all KV bytes of the sequence, read
back from the pool: one wrong byte anywhere always changes the token, several almost surely do.
With a temperature the request's seed and the position shift the token as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.device.batch import Draw, Drawn, SeqStep
from pdrt.device.chance import uniform
from pdrt.messages import KvLayout
from pdrt.modelspec import NULL_SPEC

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]

EOS: Final = 256
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_WIDTH: Final = NULL_SPEC.kv_heads * NULL_SPEC.layers * 2  # words of 8 bytes (a head) a position
_PARTS: Final = (NULL_SPEC.kv_heads, NULL_SPEC.layers, 2)


class NullRunner:
    """Implements Runner over byte tokens 0..255 and EOS; `sleep` is what makes a step last."""

    def __init__(
        self,
        block_size: int,
        step_ms: float = 0.0,
        token_ms: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.layout = KvLayout(
            block_size=block_size,
            dtype="uint8",
            layers=NULL_SPEC.layers,
            kv_heads=NULL_SPEC.kv_heads,
            head_dim=NULL_SPEC.head_dim,
        )
        self.eos_token_ids = NULL_SPEC.eos_token_ids
        self._step_ms, self._token_ms, self._sleep = step_ms, token_ms, sleep
        self._pool: Words = np.zeros((0, *_PARTS, block_size), np.uint64)

    def bind(self, pool: memoryview, blocks: int) -> None:
        """Use `pool` as KV memory: 8 bytes, one word, for each head, layer, k or v, position."""
        words = np.frombuffer(pool, "<u8")
        self._pool = words.reshape(blocks, *_PARTS, self.layout.block_size)

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        """Write the steps' KV, then draw from all the KV that each sequence has."""
        self._rest(batch)
        for step in batch:
            self._write(step)
        return [self._drawn(step, step.draw) for step in batch if step.draw is not None]

    def _rest(self, batch: Sequence[SeqStep]) -> None:
        prompt_tokens = sum(len(step.tokens) for step in batch if len(step.tokens) > 1)
        duration = self._step_ms + self._token_ms * prompt_tokens
        if duration > 0 and batch:
            self._sleep(duration / 1000)

    def _write(self, step: SeqStep) -> None:
        before = self._word_before(step)
        words = _expand(_rolled(before, step.tokens))
        blocks, offsets = self._places(step, step.start, step.start + len(step.tokens))
        self._pool[blocks, :, :, :, offsets] = words.reshape(-1, *_PARTS)

    def _word_before(self, step: SeqStep) -> int:
        """The hash of the prefix, as the pool remembers it."""
        if step.start == 0:
            return _GOLDEN
        block, offset = divmod(step.start - 1, self.layout.block_size)
        return int(self._pool[step.blocks[block], 0, 0, 0, offset])

    def _places(
        self, step: SeqStep, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(first, end)
        table = np.asarray(step.blocks, np.int64)
        return table[positions // self.layout.block_size], positions % self.layout.block_size

    def _drawn(self, step: SeqStep, draw: Draw) -> Drawn:
        length = step.start + len(step.tokens)
        words = self._pool[np.asarray(step.blocks[: -(-length // self.layout.block_size)])]
        bytes_ = np.ascontiguousarray(np.moveaxis(words, -1, 1)).view(np.uint8)
        total = _weighed(bytes_.reshape(-1, _WIDTH * 8)[:length])
        if draw.sampling.temperature > 0:
            total += int(uniform(draw.sampling.seed, draw.position) * 256)
        token = total % 256 or EOS  # EOS in place of byte 0: every sum has a token of its own
        return Drawn(step.key, token, -math.log(2 + token))


def _rolled(word: int, tokens: Sequence[int]) -> Words:
    """One hash a token, each over all tokens before it."""
    out = []
    for token in tokens:
        word = (word ^ (token + 1)) * _GOLDEN & _MASK
        word ^= word >> 29
        out.append(word)
    return np.array(out, np.uint64)


def _expand(words: Words) -> Words:
    """The KV of each position: its hash, then variations of it. [n, _WIDTH]"""
    lanes = np.arange(_WIDTH, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    mixed: Words = (words[:, None] ^ lanes) * (lanes + np.uint64(1))
    return mixed  # lane 0 is the hash itself


def _weighed(rows: Bytes) -> int:
    """Sum of bytes times odd weights, modulo 256: any one changed byte changes it.

    The weights differ by position and lane, so exchanged blocks and positions show too.
    """
    positions = np.arange(len(rows), dtype=np.uint64)[:, None]
    lanes = np.arange(rows.shape[1], dtype=np.uint64)
    mixed = (positions * np.uint64(0x9E3779B1) + lanes * np.uint64(0x85EBCA77)) >> np.uint64(9)
    weights = mixed.astype(np.uint8) | np.uint8(1)
    return int(np.sum(rows * weights, dtype=np.uint8))
