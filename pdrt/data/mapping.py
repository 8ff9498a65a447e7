"""Which prefill ranks write which heads to which decode rank, from the sizes alone.

The promise: for each room every kv head that a decode rank holds is written by exactly one
tensor-parallel rank (of each cp rank: the blocks that it holds), and each writing rank fills a
slot of its own. What cannot be mapped is refused when the mapping is made, with both values.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.errors import ConfigError
from pdrt.messages import KvLayout


def heads_of(rank: int, tp: int, total: int) -> range:
    """The kv heads of a tensor-parallel rank; fewer heads than ranks are held several times."""
    if total % tp == 0:
        count = total // tp
        return range(rank * count, (rank + 1) * count)
    if tp % total:
        raise ConfigError(f"kv heads = {total} and tp = {tp}: one must be a multiple of the other")
    head = rank // (tp // total)
    return range(head, head + 1)


def check_heads(layout: KvLayout, rank: int, tp: int) -> None:
    """Raises ConfigError when the layout is not that of this rank of so many."""
    total = layout.model_kv_heads
    wanted = 1 if layout.kind == "latent" else len(heads_of(rank, tp, total))
    if layout.kv_heads != wanted:
        raise ConfigError(
            f"tp rank {rank} of {tp} describes {layout.kv_heads} kv heads, but {wanted} of the"
            f" model's {total} are its own"
        )


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """The heads that one rank gives another, counted within what each of them holds."""

    source: int  # the first one's place at the prefill rank
    target: int  # and at the decode rank
    count: int


@dataclass(frozen=True, slots=True)
class TargetRankMapping:
    """What decode rank r derives from (P, D) and the model's heads: who writes, and what.

    `latent`: the KV is one and the same on every rank (MLA). Each of `prefill_cp` context-
    parallel ranks writes the blocks of the prompt that it holds.
    """

    prefill_tp: int
    decode_tp: int
    decode_rank: int
    total_kv_heads: int
    latent: bool = False
    prefill_cp: int = 1

    def __post_init__(self) -> None:
        small, large = sorted((self.prefill_tp, self.decode_tp))
        if small < 1 or large % small:
            raise ConfigError(
                f"prefill tp = {self.prefill_tp} and decode tp = {self.decode_tp}: "
                "one must be a multiple of the other"
            )
        if not 0 <= self.decode_rank < self.decode_tp:
            raise ConfigError(f"decode rank {self.decode_rank} is outside tp = {self.decode_tp}")
        if self.prefill_cp < 1:
            raise ConfigError(f"prefill cp = {self.prefill_cp}: it must be at least 1")
        for tp in (self.prefill_tp, self.decode_tp):
            self._heads(0, tp)

    def _heads(self, rank: int, tp: int) -> range:
        return range(1) if self.latent else heads_of(rank, tp, self.total_kv_heads)

    @property
    def span(self) -> range:
        """Prefill tp ranks that hold what this decode rank needs; all of them shake hands."""
        if self.decode_tp >= self.prefill_tp:
            rank = self.decode_rank // (self.decode_tp // self.prefill_tp)
            return range(rank, rank + 1)
        width = self.prefill_tp // self.decode_tp
        return range(self.decode_rank * width, (self.decode_rank + 1) * width)

    @property
    def replicas(self) -> int:
        """How many ranks of the span hold the same heads, side by side."""
        first = self._heads(self.span[0], self.prefill_tp)
        return sum(self._heads(rank, self.prefill_tp) == first for rank in self.span)

    def writers(self, room: int) -> tuple[int, ...]:
        """The tp ranks that write a room; of replicas one does, and rooms take turns."""
        width = self.replicas
        return tuple(self.span[room % width :: width])

    def places(self, room: int) -> dict[tuple[int, int], int]:
        """Each (cp, tp) rank that shakes hands -> its slot in the row; -1: it need not write."""
        writers = self.writers(room)
        places = dict.fromkeys(((cp, tp) for cp in range(self.prefill_cp) for tp in self.span), -1)
        writing = [(cp, tp) for cp in range(self.prefill_cp) for tp in writers]
        return places | {rank: place for place, rank in enumerate(writing)}

    @property
    def handshakes(self) -> int:
        """Decode ranks for which one of the span's prefill ranks must wait."""
        return max(1, self.decode_tp // self.prefill_tp)

    @property
    def slots(self) -> int:
        """Metadata slots that this decode rank waits for: one for each writing rank."""
        return len(self.span) // self.replicas * self.prefill_cp

    def heads_from(self, prefill_rank: int) -> HeadSpan:
        """What a rank of the span gives this decode rank."""
        theirs = self._heads(prefill_rank, self.prefill_tp)
        mine = self._heads(self.decode_rank, self.decode_tp)
        first, end = max(theirs.start, mine.start), min(theirs.stop, mine.stop)
        assert first < end, f"{prefill_rank} is outside {self.span}"
        return HeadSpan(first - theirs.start, first - mine.start, end - first)
