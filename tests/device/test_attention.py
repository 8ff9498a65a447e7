"""How a batch is laid out: who is padded with whom, and where its KV lies in a block."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdrt.device.attention import SMALL_GROUP, grouped
from pdrt.device.kv import KvPool
from pdrt.messages import KvLayout

LAYOUT = KvLayout(block_size=4, dtype="float32", layers=3, kv_heads=2, head_dim=5)


@given(st.lists(st.integers(1, 300), max_size=40))
def test_everybody_is_in_one_group_and_padding_at_most_doubles_it(blocks: list[int]) -> None:
    groups = grouped(blocks)
    assert sorted(i for group in groups for i in group) == list(range(len(blocks)))
    for group in groups:
        longest = max(blocks[i] for i in group)
        assert longest <= SMALL_GROUP or all(2 * blocks[i] >= longest for i in group)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=64))
def test_groups_are_few(blocks: list[int]) -> None:
    assert len(grouped(blocks)) <= 6  # 256, 127, 63, 31, 15, and what is small


def pool() -> tuple[KvPool, torch.Tensor]:
    """A pool of six blocks, and its memory in the layout's own shape."""
    memory = memoryview(bytearray(6 * LAYOUT.block_bytes))
    whole = torch.frombuffer(memory, dtype=torch.float32).view(6, 2, 3, 2, 4, 5)
    return KvPool(memory, 6, LAYOUT, "cpu", mirrored=False), whole


def test_kv_lies_in_a_block_as_the_layout_says() -> None:
    """[kv_heads, layers, 2 (k, v), block_size, head_dim]: what a peer of any kind relies on."""
    kv_pool, whole = pool()
    blocks, offsets = np.array([5, 2, 2]), np.array([3, 0, 1])
    kv = torch.randn(3, 2 * 2, 5)
    kv_pool.write(1, kv_pool.cells_of(blocks, offsets), kv)
    for token, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        for head in range(2):
            assert torch.equal(whole[block, head, 1, 0, offset], kv[token, head])
            assert torch.equal(whole[block, head, 1, 1, offset], kv[token, 2 + head])
    assert int((whole != 0).sum()) == kv.numel()


def test_reading_gives_whole_blocks_in_the_tables_order() -> None:
    kv_pool, whole = pool()
    whole.copy_(torch.randn(whole.shape))
    tables = np.array([[3, 0], [5, 5]])
    keys, values = kv_pool.read(2, kv_pool.strips_of(tables))
    assert keys.shape == values.shape == (2, 2, 8, 5)
    for sequence, table in enumerate(tables):
        for head in range(2):
            for found, kind in ((keys, 0), (values, 1)):
                want = torch.cat([whole[block, head, 2, kind] for block in table])
                assert torch.equal(found[sequence, head], want)


def test_clearing_touches_the_named_blocks_alone() -> None:
    kv_pool, whole = pool()
    whole.fill_(float("nan"))
    kv_pool.clear([1, 4])
    cleared = [block for block in range(6) if bool((whole[block] == 0).all())]
    assert cleared == [1, 4]
    assert int(whole.isnan().sum()) == 4 * whole[0].numel()


def test_every_read_uses_the_same_memory_which_grows_when_it_must() -> None:
    kv_pool, whole = pool()
    whole.copy_(torch.randn(whole.shape))
    small, large = kv_pool.strips_of(np.array([[3]])), kv_pool.strips_of(np.array([[4, 1, 0]]))
    kv_pool.read(0, small)
    grown = kv_pool.read(2, large)
    assert torch.equal(grown[1, 0, 1, 4:8], whole[1, 1, 2, 1])
    again = kv_pool.read(1, small)
    assert again.data_ptr() == grown.data_ptr()
    assert torch.equal(again[0, 0, 1], whole[3, 1, 1, 0])
