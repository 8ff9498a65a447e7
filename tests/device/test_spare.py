"""Copies of KV blocks in host memory: whole, in order, bounded, and no worse than a failure."""

from __future__ import annotations

import numpy as np
import pytest

from pdrt.config import NodeConfig, SchedulerSection
from pdrt.device.backends import retraction_of
from pdrt.device.moves import Move, Moves
from pdrt.device.poolsize import most_blocks
from pdrt.device.spare import Blocks, Spare, spare_blocks
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout

BYTES = 64
LAYOUT = KvLayout(kv_heads=1, layers=2, block_size=4, head_dim=4, dtype="uint8")


def pool(blocks: int) -> bytearray:
    return bytearray(b"".join(bytes([i + 1]) * BYTES for i in range(blocks)))


def test_what_was_saved_comes_back_to_other_blocks() -> None:
    memory = pool(6)
    spare = Spare(memoryview(memory), BYTES, 4)
    assert spare.do(Moves(saves=(Move(1, (0, 2, 5), (3, 0, 1)),))) == ()
    memory[:] = bytes(len(memory))
    assert spare.do(Moves(loads=(Move(1, (3, 0, 1), (4, 1, 3)),))) == ()
    assert memory == b"".join(bytes([v]) * BYTES for v in (0, 3, 0, 6, 1, 0))


def test_saves_come_before_loads() -> None:
    """What one plan decides first is done first."""
    memory = pool(3)
    spare = Spare(memoryview(memory), BYTES, 1)
    spare.do(Moves(saves=(Move(1, (0,), (0,)),), loads=(Move(2, (0,), (2,)),)))
    assert memory[2 * BYTES :] == bytes([1]) * BYTES


@pytest.mark.parametrize("error", [OSError("bus"), MemoryError(), RuntimeError("device")])
def test_a_copy_that_fails_is_told_and_the_others_are_made(error: Exception) -> None:
    """CASES 70: no memory, or an error of the device."""

    def copy(target: Blocks, source: Blocks) -> None:
        if source[0] == 2:
            raise error
        np.copyto(target, source)

    memory = pool(4)
    spare = Spare(memoryview(memory), BYTES, 4, copy)
    moves = Moves(saves=(Move(7, (0, 1), (0, 1)), Move(8, (2, 3), (2, 3))))
    assert spare.do(moves) == (7,)
    memory[:] = bytes(len(memory))
    assert spare.do(Moves(loads=(Move(8, (2, 3), (0, 1)),))) == ()
    assert memory[: 2 * BYTES] == bytes([3]) * BYTES + bytes([4]) * BYTES


def test_no_memory_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="host_kv_memory"):
        Spare(memoryview(pool(1)), BYTES, 1 << 60)


@pytest.mark.parametrize(
    ("given", "blocks"),
    [(0, 0), (LAYOUT.block_bytes * 3.5, 3), (0.5, 8), (1, 16), (1e9, 64)],
    ids=["none", "bytes", "half of it", "all of it", "no more than can be used"],
)
def test_host_memory_is_a_number_of_bytes_or_a_part_of_the_machine(
    given: float, blocks: int
) -> None:
    config = SchedulerSection(host_kv_memory=given, max_batch_size=8, block_size=4)
    assert most_blocks(config, LAYOUT, 16) == 64
    assert spare_blocks(config, LAYOUT, 16, LAYOUT.block_bytes * 16) == blocks


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cpu", "auto", "reprefill"),
        ("null", "auto", "reprefill"),
        ("cuda", "auto", "copy"),
        ("cpu", "copy", "copy"),
        ("cuda", "local", "local"),
    ],
)
def test_auto_copies_where_the_device_has_memory_of_its_own(
    device: str, asked: str, expected: str
) -> None:
    config = NodeConfig.model_validate(
        {
            "device": {"kind": device},
            "model": {"path": "null" if device == "null" else "/models/one"},
            "scheduler": {"retraction": asked},
        }
    )
    assert retraction_of(config) == expected
