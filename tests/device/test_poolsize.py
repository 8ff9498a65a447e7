"""How many KV blocks: what was asked for, what there is, and never more than could be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrt.config import SchedulerSection
from pdrt.device.poolsize import host_bytes, pool_blocks
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout

LAYOUT = KvLayout(block_size=16, dtype="uint8", layers=1, kv_heads=1, head_dim=8)  # 256 bytes
MEMORY = 1 << 30


def blocks(kv_memory: float, batch: int = 4096, max_len: int = 1 << 20) -> int:
    config = SchedulerSection(kv_memory=kv_memory, max_batch_size=batch)
    return pool_blocks(config, LAYOUT, max_len, MEMORY)


@pytest.mark.parametrize(
    ("kv_memory", "expected"),
    [
        (0.5, MEMORY // 512),  # a share
        (1, MEMORY // 256),  # all of it
        (1.5, "hold no block"),  # bytes
        (255, "hold no block"),
        (256, 1),
        (1023, 3),
        (1e-9, "hold no block"),
    ],
)
def test_up_to_one_is_a_share_and_more_is_bytes(kv_memory: float, expected: int | str) -> None:
    if isinstance(expected, int):
        assert blocks(kv_memory) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            blocks(kv_memory)


@pytest.mark.parametrize(("max_len", "each"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_no_more_than_two_full_batches_of_the_longest_sequences(max_len: int, each: int) -> None:
    assert blocks(1, batch=3, max_len=max_len) == 2 * 3 * each


def test_an_error_names_the_setting_and_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory = 100: 100 bytes .* 256 bytes") as caught:
        blocks(100)
    assert "block_size" in str(caught.value)


def test_a_containers_limit_counts_when_it_is_lower(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = host_bytes(limit)  # there is none
    assert whole > 1 << 20
    for text, expected in (("max\n", whole), ("1048576\n", 1 << 20), (f"{whole * 2}\n", whole)):
        limit.write_text(text)
        assert host_bytes(limit) == expected
