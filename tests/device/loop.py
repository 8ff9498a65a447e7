"""A scheduler of a few lines: drives a Runner with chunks and decode steps mixed in each batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdrt.device.batch import Draw, Drawn, Runner, SeqStep
from pdrt.messages import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class Sequence_:
    """One request: what it has, how far its KV goes, and where that lies."""

    key: int
    prompt: Sequence[int]
    blocks: list[int]
    sampling: Sampling = GREEDY
    computed: int = 0
    history: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = self.history or list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.history[len(self.prompt) :]

    def step(self, chunk: int) -> SeqStep:
        tokens = self.history[self.computed : self.computed + chunk]
        is_last = self.computed + len(tokens) == len(self.history)
        draw = Draw(self.sampling, self.history, len(self.prompt)) if is_last else None
        return SeqStep(self.key, tokens, self.computed, self.blocks, draw)


class Loop:
    """`runner` bound to a pool of garbage, with blocks handed out in random order."""

    def __init__(self, runner: Runner, blocks: int = 128, seed: int = 1) -> None:
        self.runner = runner
        self.memory = bytearray(b"\xff" * (blocks * runner.layout.block_bytes))
        runner.bind(memoryview(self.memory), blocks)
        self._free = list(range(blocks))
        random.Random(seed).shuffle(self._free)
        self._keys = 0

    def sequence(
        self, prompt: Sequence[int], tokens: int, sampling: Sampling = GREEDY
    ) -> Sequence_:
        count = -(-(len(prompt) + tokens) // self.runner.layout.block_size)
        blocks = [self._free.pop() for _ in range(count)]
        self._keys += 1
        return Sequence_(self._keys, prompt, blocks, sampling)

    def give_back(self, sequence: Sequence_) -> None:
        self._free.extend(sequence.blocks)

    def copy_blocks(self, src: Sequence_, other: Loop, dst: Sequence_) -> None:
        """What a transfer does: the bytes of the prompt's blocks, and nothing else."""
        layout = self.runner.layout
        count = -(-len(src.prompt) // layout.block_size)
        mine, theirs = memoryview(self.memory), memoryview(other.memory)
        for here, there in zip(src.blocks[:count], dst.blocks[:count], strict=True):
            a, b = here * layout.block_bytes, there * layout.block_bytes
            theirs[b : b + layout.block_bytes] = mine[a : a + layout.block_bytes]

    def hand_over(
        self, here: Sequence_, other: Loop, tokens: int, *, instead: Sequence_ | None = None
    ) -> Sequence_:
        """Decode what was prefilled here in another loop, from the bytes of the prompt's blocks.

        Of those of `instead`, where that is given.
        """
        there = other.sequence(here.prompt, tokens, here.sampling)
        self.copy_blocks(instead or here, other, there)
        there.computed, there.history = len(here.prompt), list(here.history)
        other.run([there], tokens)
        return there

    def step(self, sequences: Iterable[Sequence_], chunk: int) -> list[Drawn]:
        """One batch with a step of each: what a prompt still lacks, or its next token."""
        by_key = {s.key: s for s in sequences}
        batch = [s.step(chunk) for s in by_key.values()]
        drawn = self.runner.execute(batch)
        for step in batch:
            by_key[step.key].computed += len(step.tokens)
        for token in drawn:
            by_key[token.key].history.append(token.token)
            by_key[token.key].logprobs.append(token.logprob)
        return drawn

    def run(self, sequences: Sequence[Sequence_], tokens: int, chunk: int = 512) -> None:
        """Until each has `tokens` of output; those that have are left out."""
        while lacking := [s for s in sequences if len(s.output) < tokens]:
            self.step(lacking, chunk)

    def answer(
        self, prompt: Sequence[int], tokens: int, chunk: int = 512, sampling: Sampling = GREEDY
    ) -> list[int]:
        """One request alone."""
        sequence = self.sequence(prompt, tokens, sampling)
        self.run([sequence], tokens, chunk)
        self.give_back(sequence)
        return sequence.output
