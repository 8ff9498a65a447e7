"""The null device in place of the fake one: its answers depend on every byte of the KV it reads."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.device.batch import Draw, Drawn, SeqStep
from pdrt.device.null import NullRunner
from pdrt.messages import Sampling
from tests.sched.fakes import FakeDevice


class NullDevice(FakeDevice):
    """Its memory begins as garbage."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(0, block_size)
        self._runner = NullRunner(block_size)
        self._size = self._runner.layout.block_bytes
        self.memory = bytearray(b"\xa5" * (blocks * self._size))
        self._runner.bind(memoryview(self.memory), blocks)

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.batches.append(tuple(batch))
        return self._runner.execute(batch)

    def copy_from(self, other: FakeDevice, theirs: int, mine: int) -> None:
        assert isinstance(other, NullDevice)
        source = other.memory[theirs * self._size : (theirs + 1) * self._size]
        self.memory[mine * self._size : (mine + 1) * self._size] = source


def null_answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the null device says with all memory to itself, its KV computed anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        device = NullDevice(1, len(tokens))
        draw = Draw(Sampling(), tokens, len(prompt))
        (drawn,) = device.execute([SeqStep(1, tokens, 0, [0], draw)])
        tokens.append(drawn.token)
    return tokens[len(prompt) :]
