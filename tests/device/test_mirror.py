"""What an accelerator's pool has to be told of host memory, and hand back to it."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.device.batch import SeqStep
from pdrt.device.mirror import Mirror


class Copies:
    """A pool that only remembers what was copied."""

    block_size = 4

    def __init__(self) -> None:
        self.loaded, self.stored = list[int](), list[int]()

    def load(self, blocks: Sequence[int]) -> None:
        self.loaded = list(blocks)

    def store(self, blocks: Sequence[int]) -> None:
        self.stored = list(blocks)


def run(mirror: Mirror, copies: Copies, *steps: SeqStep) -> tuple[list[int], list[int]]:
    """(loaded, stored) of one step."""
    mirror.before(steps)
    mirror.after(steps)
    return copies.loaded, copies.stored


def step(start: int, count: int, blocks: Sequence[int], key: int = 1) -> SeqStep:
    return SeqStep(key, [0] * count, start, blocks, None)


def test_a_prompt_computed_here_is_stored_chunk_by_chunk_and_never_loaded() -> None:
    mirror = Mirror(copies := Copies())
    assert run(mirror, copies, step(0, 6, [9, 8, 7])) == ([], [9, 8])
    assert run(mirror, copies, step(6, 6, [9, 8, 7])) == ([], [8, 7])
    assert run(mirror, copies, step(12, 1, [9, 8, 7, 6])) == ([], [6])


def test_a_prompt_that_a_peer_wrote_is_loaded_once() -> None:
    mirror = Mirror(copies := Copies())
    assert run(mirror, copies, step(6, 1, [3, 5])) == ([3, 5], [5])
    assert run(mirror, copies, step(7, 1, [3, 5])) == ([], [5])


def test_a_sequence_that_came_back_otherwise_is_loaded_again() -> None:
    """Retracted and prefilled anew: to other blocks, or longer than it was left."""
    mirror = Mirror(copies := Copies())
    run(mirror, copies, step(6, 1, [3, 5]))
    assert run(mirror, copies, step(7, 1, [3, 6])) == ([3, 6], [6])
    assert run(mirror, copies, step(10, 1, [3, 6, 2])) == ([3, 6, 2], [2])


def test_a_block_that_is_copied_is_loaded_whoever_wrote_it() -> None:
    mirror = Mirror(copies := Copies())
    fork = SeqStep(2, [0], 6, [3, 8], None, copy_from=5)
    assert run(mirror, copies, fork) == ([3, 8, 5], [8])


def test_a_sequence_that_sat_out_is_loaded_again() -> None:
    mirror = Mirror(copies := Copies())
    run(mirror, copies, step(6, 1, [3, 5]))
    run(mirror, copies, step(4, 1, [1, 2], key=2))
    assert run(mirror, copies, step(7, 1, [3, 5])) == ([3, 5], [5])
