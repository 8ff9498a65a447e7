"""The steps that a cost file is fitted to: which they are, and how long a device needs for each.

A step has sequences that decode, prompts' chunks, or both, as schedulers plan them. What KV says
takes no longer or shorter to read, so nothing is computed before it is looked at.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

from pdrt.device.batch import Draw, Runner, SeqStep
from pdrt.messages import Sampling
from pdrt.sim.cost import chunk_pairs

Clock = Callable[[], float]
_GREEDY: Final = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
_SMALL: Final = 0x3C  # of these bytes a bfloat16 or a float32 is a small number
_SHORT: Final = 64  # tokens of context
_FEWEST: Final = 16  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class Shape:
    """One step: `decoding` sequences of `context` tokens, `prompts` chunks of `tokens` each."""

    decoding: int = 0
    context: int = 0  # tokens that each of them looks at, its own last one too
    prompts: int = 0
    tokens: int = 0
    start: int = 0  # tokens of a prompt that were computed before

    def __str__(self) -> str:
        decode = f"decode {self.decoding} x {self.context}" if self.decoding else ""
        after = f" after {self.start}" if self.start else ""
        prompt = f"prompt {self.prompts} x {self.tokens}{after}" if self.prompts else ""
        return " + ".join(filter(None, (decode, prompt)))

    @property
    def prompt_tokens(self) -> int:
        return self.prompts * self.tokens

    @property
    def pairs(self) -> float:
        """For each prompt token the tokens before it and itself."""
        return self.prompts * chunk_pairs(self.start, self.tokens)

    @property
    def context_tokens(self) -> int:
        return self.decoding * self.context

    def blocks(self, size: int) -> int:
        each, chunk = -(-self.context // size), -(-(self.start + self.tokens) // size)
        return self.decoding * each + self.prompts * chunk

    def told(self) -> dict[str, int]:
        """For a process and for `--json`."""
        return asdict(self)


def grid(chunk: int, most: int, longest: int) -> list[Shape]:
    """For chunks of up to `chunk` tokens, up to `most` sequences, none beyond `longest` tokens."""
    contexts = sorted({min(_SHORT, longest), longest // 2})
    decode = [Shape(decoding=n, context=c) for n in doubled(1, most) for c in contexts]
    sizes, starts = doubled(_FEWEST, chunk), sorted({chunk, longest - chunk} - {0})
    prompts = [Shape(prompts=1, tokens=n) for n in sizes]
    later = [Shape(prompts=1, tokens=chunk, start=at) for at in starts if at + chunk <= longest]
    several = [Shape(prompts=n, tokens=chunk // n) for n in (2, 8) if chunk // n >= _FEWEST]
    some = max(1, most // 4)
    mixed = [Shape(some, contexts[0], 1, tokens) for tokens in sizes[1::2]]
    return [*decode, *prompts, *later, *several, *mixed]


def doubled(first: int, last: int) -> list[int]:
    """Powers of two times the first, and the last."""
    sizes = [first << power for power in range(32) if first << power < last]
    return [*sizes, last]


class Steps:
    """A runner over a pool of its own, in which the blocks of a sequence are scattered."""

    def __init__(self, runner: Runner, most_blocks: int, clock: Clock) -> None:
        self._runner, self._clock = runner, clock
        self._size = runner.layout.block_size
        self._memory = bytearray([_SMALL]) * (most_blocks * runner.layout.block_bytes)
        runner.bind(memoryview(self._memory), most_blocks)
        random = Random(3)
        self._blocks = random.sample(range(most_blocks), most_blocks)
        self._tokens = [random.randrange(3, min(256, runner.vocab)) for _ in range(65536)]

    def seconds(self, shape: Shape, times: int) -> float:
        """As is usual among so many times."""
        batch = list(self.batch(shape))
        return statistics.median(self._timed(batch) for _ in range(times))

    def _timed(self, batch: list[SeqStep]) -> float:
        began = self._clock()
        self._runner.execute(batch)
        return self._clock() - began

    def batch(self, shape: Shape) -> Iterator[SeqStep]:
        blocks = iter(self._blocks)
        sizes = [(shape.context - 1, 1)] * shape.decoding
        sizes += [(shape.start, shape.tokens)] * shape.prompts
        for key, (start, count) in enumerate(sizes):
            end = start + count
            table = list(itertools.islice(blocks, -(-end // self._size)))
            tokens = self._tokens[:count]
            yield SeqStep(key, tokens, start, table, Draw(_GREEDY, (), end))
