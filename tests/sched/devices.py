"""Real runners in place of the fake device: their answers depend on the KV that they read."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.device.batch import Draw, Drawn, Runner, SeqStep
from pdrt.device.moves import Moves
from pdrt.device.null import NullRunner
from pdrt.device.spare import Spare
from pdrt.messages import Sampling
from tests.sched.fakes import FakeDevice


class RunnerDevice(FakeDevice):
    """A runner with a memory of its own, which begins as garbage."""

    def __init__(self, runner: Runner, blocks: int, host_blocks: int = 0) -> None:
        super().__init__(0, runner.layout.block_size)
        self._runner, self._size = runner, runner.layout.block_bytes
        self.memory = bytearray(b"\xff" * (blocks * self._size))
        runner.bind(memoryview(self.memory), blocks)
        self.spare = Spare(memoryview(self.memory), self._size, host_blocks)

    def move(self, moves: Moves) -> set[int]:
        return set(self.spare.do(moves))

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.batches.append(tuple(batch))
        return self._runner.execute(batch)

    def copy_from(self, other: FakeDevice, theirs: int, mine: int) -> None:
        assert isinstance(other, RunnerDevice)
        source = other.memory[theirs * self._size : (theirs + 1) * self._size]
        self.memory[mine * self._size : (mine + 1) * self._size] = source


def null_device(blocks: int, block_size: int, host_blocks: int = 0) -> RunnerDevice:
    return RunnerDevice(NullRunner(block_size), blocks, host_blocks)


def null_answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the null device says with all memory to itself, its KV computed anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        device = null_device(1, len(tokens))
        draw = Draw(Sampling(temperature=0), tokens, len(prompt))
        (drawn,) = device.execute([SeqStep(1, tokens, 0, [0], draw)])
        tokens.append(drawn.token)
    return tokens[len(prompt) :]
