"""Blocks are known by all that they hold, found as long as they last, and lost from their end."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.messages import pack_ids
from pdrt.sched.blocks import BlockPool
from pdrt.sched.prefix import Chain

B = 4
prompts = st.lists(st.integers(0, 1), min_size=0, max_size=12)


def keys(tokens: list[int], salt: str = "") -> list[bytes]:
    return Chain(salt).keys(tokens, len(tokens) // B, B)


def warm(pool: BlockPool, tokens: list[int], salt: str = "") -> tuple[int, ...]:
    """Blocks that hold these tokens and have no owner; the same ones where they are known."""
    known = pool.cache.find(keys(tokens, salt))
    pool.share(known)
    fresh = pool.take(len(tokens) // B - len(known))
    assert fresh is not None
    blocks = (*known, *fresh)
    for key, block in zip(keys(tokens, salt), blocks, strict=True):
        pool.cache.register(key, block)
    pool.give(blocks)
    return blocks


# Keys.


@given(prompts, prompts, st.sampled_from(["", "a"]), st.sampled_from(["", "a"]))
def test_keys_are_equal_just_when_salt_and_all_tokens_so_far_are(
    one: list[int], other: list[int], salt: str, other_salt: str
) -> None:
    for i, (a, b) in enumerate(zip(keys(one, salt), keys(other, other_salt), strict=False), 1):
        assert (a == b) == (one[: i * B] == other[: i * B] and salt == other_salt)


def test_a_key_is_the_hash_of_the_one_before_and_the_tokens() -> None:
    root = hashlib.sha256(b"tenant").digest()
    first = hashlib.sha256(root + pack_ids([1, 2, 3, 4])).digest()
    second = hashlib.sha256(first + pack_ids([5, 6, 7, 8])).digest()
    assert keys([1, 2, 3, 4, 5, 6, 7, 8, 9], "tenant") == [first, second]


class Watched(list[int]):
    """Tokens that note which of them were looked at."""

    seen: list[slice]

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        assert isinstance(index, slice)
        self.seen.append(index)
        return list(self)[index]


def test_tokens_are_hashed_once_as_they_come() -> None:
    tokens, chain = Watched(range(9)), Chain()
    tokens.seen = []
    assert [chain.keys(tokens, 1, B), chain.keys(tokens, 1, B)] == [keys([*range(4)])] * 2
    tokens.extend(range(9, 12))
    assert chain.keys(tokens, 3, B) == keys([*range(12)])
    assert chain.keys(tokens, 2, B) == keys([*range(8)])
    assert tokens.seen == [slice(0, 4), slice(4, 12)]


def test_a_fork_goes_its_own_way() -> None:
    chain = Chain("a")
    chain.keys([1] * 4, 1, B)
    fork = chain.fork()
    assert fork.keys([1] * 4 + [2] * 4, 2, B) == keys([1] * 4 + [2] * 4, "a")
    assert chain.keys([1] * 8, 2, B) == keys([1] * 8, "a")


# Blocks.


def test_a_known_block_is_found_while_it_has_an_owner_and_after() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    assert blocks is not None
    for key, block in zip(keys([1] * 8), blocks, strict=True):
        pool.cache.register(key, block)
    assert pool.cache.find(keys([1] * 12)) == blocks
    pool.give(blocks)
    assert pool.cache.find(keys([1] * 12)) == blocks
    assert (pool.free, pool.used) == (4, 0)


def test_a_prefix_is_found_up_to_its_first_unknown_block() -> None:
    pool = BlockPool(8)
    blocks = warm(pool, [1] * 12)
    assert pool.cache.find(keys([1] * 4 + [2] * 8)) == blocks[:1]
    assert pool.cache.find(keys([2] * 4 + [1] * 8)) == ()
    assert pool.cache.find(keys([1] * 12, "another tenant's")) == ()


def test_a_cached_block_that_is_shared_is_not_free() -> None:
    pool = BlockPool(3)
    blocks = warm(pool, [1] * 8)
    pool.share(blocks)
    assert (pool.free, pool.owners(blocks[0])) == (1, 1)
    assert pool.take(2) is None
    pool.give(blocks)
    assert pool.free == 3


def test_blocks_that_nobody_can_find_are_taken_first() -> None:
    pool = BlockPool(4)
    known = warm(pool, [1] * 8)
    assert set(pool.take(2) or ()).isdisjoint(known)
    assert pool.cache.find(keys([1] * 8)) == known


def test_the_longest_unused_prefix_is_lost_first() -> None:
    pool = BlockPool(4)
    warm(pool, [1] * 8)
    warm(pool, [2] * 8)
    warm(pool, [1] * 8)  # used again
    assert pool.take(2) is not None
    assert len(pool.cache.find(keys([1] * 8))) == 2
    assert pool.cache.find(keys([2] * 8)) == ()
    assert pool.cache.evicted == 2


def test_a_prefix_is_lost_from_its_end() -> None:
    pool = BlockPool(3)
    blocks = warm(pool, [1] * 12)
    for left in (2, 1, 0):
        assert pool.take(1) is not None
        assert pool.cache.find(keys([1] * 12)) == blocks[:left]


def test_of_two_blocks_with_one_content_the_first_stays_known() -> None:
    pool = BlockPool(3)
    first, second = pool.take(1), pool.take(1)
    assert first is not None
    assert second is not None
    for block in (*first, *second):
        pool.cache.register(keys([1] * 4)[0], block)
    pool.give(second)
    assert pool.cache.find(keys([1] * 4)) == first
    assert (pool.cache.idle, pool.free) == (0, 2)


def test_what_is_forgotten_is_not_found_and_not_cached() -> None:
    pool = BlockPool(2)
    blocks = warm(pool, [1] * 8)
    pool.share(blocks)
    pool.forget(blocks)
    assert pool.cache.find(keys([1] * 8)) == ()
    pool.give(blocks)
    assert (pool.cache.idle, pool.free) == (0, 2)


def test_a_block_has_one_content() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1) or ()
    pool.cache.register(keys([1] * 4)[0], block)
    with pytest.raises(AssertionError, match="another content"):
        pool.cache.register(keys([2] * 4)[0], block)


@given(st.lists(st.tuples(prompts, st.integers(0, 6), st.booleans()), max_size=30))
def test_counts_agree_and_what_is_found_is_right_whatever_comes_and_goes(
    visits: list[tuple[list[int], int, bool]],
) -> None:
    """Each place is free, cached or owned; a found block holds what its key says."""
    pool, content = BlockPool(6), dict[int, list[int]]()
    held: list[tuple[int, ...]] = []
    for tokens, letting_go, registers in visits:
        if held and letting_go < len(held):
            pool.give(held.pop(letting_go))
        found = pool.cache.find(keys(tokens))
        assert [content[block] for block in found] == [
            tokens[: (i + 1) * B] for i in range(len(found))
        ]
        pool.share(found)
        fresh = pool.take(len(tokens) // B - len(found))
        if fresh is None:
            pool.give(found)
            continue
        blocks = (*found, *fresh)
        held.append(blocks)
        for i, block in enumerate(blocks):
            content[block] = tokens[: (i + 1) * B]
            if registers:
                pool.cache.register(keys(tokens)[i], block)
        owners = [sum(block in blocks for blocks in held) for block in range(6)]
        assert [pool.owners(block) for block in range(6)] == owners
        assert pool.free == owners.count(0)
    for blocks in held:
        pool.give(blocks)
    assert pool.free == 6
    assert len(set(pool.take(6) or ())) == 6
