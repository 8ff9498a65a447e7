"""Which prefill ranks write to which decode rank, from the two tensor-parallel sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TargetRankMapping:
    """What one decode rank r derives from (P, D): who writes, and how often it must be told.

    `latent`: the KV is the same on every prefill rank (MLA), so one rank of the span is enough.
    """

    prefill_tp: int
    decode_tp: int
    decode_rank: int
    latent: bool = False

    def __post_init__(self) -> None:
        small, large = sorted((self.prefill_tp, self.decode_tp))
        if large % small:
            raise ConfigError(
                f"prefill tp = {self.prefill_tp} and decode tp = {self.decode_tp}: "
                "one must be a multiple of the other"
            )
        if not 0 <= self.decode_rank < self.decode_tp:
            raise ConfigError(f"decode rank {self.decode_rank} is outside tp = {self.decode_tp}")

    @property
    def span(self) -> range:
        """Prefill ranks that hold what this decode rank needs."""
        if self.decode_tp >= self.prefill_tp:
            rank = self.decode_rank // (self.decode_tp // self.prefill_tp)
            return range(rank, rank + 1)
        width = self.prefill_tp // self.decode_tp
        return range(self.decode_rank * width, (self.decode_rank + 1) * width)

    def writers(self, room: int) -> tuple[int, ...]:
        """Prefill ranks that write to this decode rank for a room; latent KV: one, by room."""
        if self.latent:
            return (self.span[room % len(self.span)],)
        return tuple(self.span)

    @property
    def handshakes(self) -> int:
        """Decode ranks for which one of the span's prefill ranks must wait."""
        return max(1, self.decode_tp // self.prefill_tp)

    @property
    def slots(self) -> int:
        """Metadata slots that this decode rank waits for."""
        return 1 if self.latent else len(self.span)
