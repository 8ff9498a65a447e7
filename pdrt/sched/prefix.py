"""Full KV blocks by the tokens that they and all blocks before them hold.

A block's key is `sha256(the key before it, its tokens as int32)`, the first one's before it
`sha256(salt)`: equal keys mean equal KV, and requests with different salts share nothing. The
promise: a key names one block; a block that nobody owns can be found until its place is needed,
the longest unused first, and of those the end of a prefix before its beginning.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from pdrt.messages import pack_ids

_TOKEN_BYTES: Final = 4


class Chain:
    """The keys of one request's blocks. Its tokens only grow, so each is hashed once."""

    __slots__ = ("_keys", "_root")

    def __init__(self, salt: str = "") -> None:
        self._root = hashlib.sha256(salt.encode()).digest()
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], blocks: int, block_size: int) -> list[bytes]:
        """Those of the first `blocks` blocks, which must be full."""
        known = len(self._keys)
        if known < blocks:
            packed = pack_ids(tokens[known * block_size : blocks * block_size])
            self._extend(packed, block_size * _TOKEN_BYTES)
        return self._keys[:blocks]

    def key(self, block: int) -> bytes | None:
        """One of those that were asked for before."""
        return self._keys[block] if block < len(self._keys) else None

    def fork(self) -> Chain:
        """The same so far, for tokens that may go on differently."""
        other = Chain()
        other._root, other._keys = self._root, list(self._keys)
        return other

    def _extend(self, packed: bytes, width: int) -> None:
        key = self._keys[-1] if self._keys else self._root
        for at in range(0, len(packed), width):
            key = hashlib.sha256(key + packed[at : at + width]).digest()
            self._keys.append(key)


class PrefixCache:
    """Which block holds what is known by a key, and which of these have no owner."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # as they became so
        self.evicted = 0

    @property
    def idle(self) -> int:
        """Blocks without an owner."""
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def knows(self, block: int) -> bool:
        return block in self._keys

    def has(self, key: bytes | None) -> bool:
        return key in self._blocks

    def find(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks of the leading keys, up to the first that is not known."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def register(self, key: bytes, block: int) -> None:
        """`block` is full and computed. Of two blocks with one key the first is the known one."""
        if key in self._blocks:
            return
        assert block not in self._keys, f"block {block} has another content already"
        self._blocks[key] = block
        self._keys[block] = key

    def forget(self, block: int) -> None:
        """It is not found any more; its owner keeps it."""
        assert block not in self._idle, f"block {block} has no owner"
        if key := self._keys.pop(block, None):
            del self._blocks[key]

    def rest(self, block: int) -> None:
        """Its last owner has left."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """It has an owner again."""
        del self._idle[block]

    def evict(self) -> int:
        """The one that was unused longest, now unknown and no longer ours."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        self.evicted += 1
        return block
