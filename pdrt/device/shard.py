"""What one rank of a tensor-parallel group has of a model: heads, columns of MLPs, vocabulary.

Heads are split in order. With fewer kv heads than ranks each kv head is on several ranks, the
ones whose query heads share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.messages import KvLayout
from pdrt.modelspec import Dtype, ModelSpec


@dataclass(frozen=True, slots=True)
class Run:
    """Numbers first..end of 0..whole: heads of a model, or rows or columns of a matrix."""

    first: int
    end: int
    whole: int

    @staticmethod
    def all_of(whole: int) -> Run:
        return Run(0, whole, whole)

    def __len__(self) -> int:
        return self.end - self.first

    def __mul__(self, width: int) -> Run:
        """The rows, when each of these has `width` of them."""
        return Run(self.first * width, self.end * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Raises ConfigError when the model cannot be split so."""

    spec: ModelSpec
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        self.spec.check_tp(self.size)
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside of {self.size} ranks")

    @property
    def is_first(self) -> bool:
        """Whether this rank draws the tokens and adds what is to be added once."""
        return self.rank == 0

    @property
    def heads(self) -> Run:
        return self.part(self.spec.heads)

    @property
    def kv_heads(self) -> Run:
        if self.copies == 1:
            return self.part(self.spec.kv_heads)
        head = self.rank // self.copies
        return Run(head, head + 1, self.spec.kv_heads)

    @property
    def intermediate(self) -> Run:
        return self.part(self.spec.intermediate)

    @property
    def vocab(self) -> Run:
        """Rows of embedding and head; the last ranks have fewer, or none, where it is uneven."""
        width = -(-self.spec.vocab // self.size)
        first, end = (min(rank * width, self.spec.vocab) for rank in (self.rank, self.rank + 1))
        return Run(first, end, self.spec.vocab)

    @property
    def copies(self) -> int:
        """How many ranks have the same kv heads."""
        return max(1, self.size // self.spec.kv_heads)

    def layout(self, block_size: int, dtype: Dtype) -> KvLayout:
        """Of this rank's KV blocks."""
        latent = self.spec.latent
        return KvLayout(
            block_size=block_size,
            dtype=dtype,
            layers=self.spec.layers,
            kv_heads=1 if latent else len(self.kv_heads),
            head_dim=latent.kv_lora + latent.rope_dim if latent else self.spec.head_dim,
            kind="latent" if latent else "heads",
            total_kv_heads=1 if latent else self.spec.kv_heads,
        )

    def part(self, whole: int) -> Run:
        """This rank's share of what all share evenly."""
        width = whole // self.size
        return Run(self.rank * width, (self.rank + 1) * width, whole)
