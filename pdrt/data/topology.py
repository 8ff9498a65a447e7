"""Which prefill ranks write to this decode rank, from what their bootstrap server said."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrt.data.mapping import TargetRankMapping
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout, Rank, Route


@dataclass(slots=True)
class Topology:
    layout: KvLayout
    rank: Rank
    decode_tp: int
    target_rank_map_table: dict[int, TargetRankMapping] = field(
        default_factory=dict
    )  # by prefill tp

    def writers(self, route: Route, room: int, dp_rank: int) -> list[str]:
        """All ranks that will write a room, as the route names them. Raises ConfigError."""
        if differences := self.layout.differences(route.fingerprint):
            raise ConfigError(f"KV layouts differ: {'; '.join(differences)}")
        if route.attn_cp_size != 1:
            raise ConfigError(f"prefill cp = {route.attn_cp_size}: this version serves cp = 1")
        dp_rank = dp_rank if route.dp_size > 1 else 0
        if not 0 <= dp_rank < route.dp_size:
            raise ConfigError(f"prefill dp rank {dp_rank} of {route.dp_size} was named")
        mapping = self._mapping(route.attn_tp_size)
        if mapping.slots != 1:
            raise ConfigError(
                f"prefill tp = {route.attn_tp_size}, decode tp = {self.decode_tp}:"
                " this version serves equal tp"
            )
        ranks = [str(Rank(dp=dp_rank, tp=tp)) for tp in mapping.writers(room)]
        if missing := [rank for rank in ranks if rank not in route.ranks]:
            raise ConfigError(f"the route does not name prefill ranks {missing}")
        return ranks

    def _mapping(self, prefill_tp: int) -> TargetRankMapping:
        if prefill_tp not in self.target_rank_map_table:
            is_latent = self.layout.kind == "latent"
            mapping = TargetRankMapping(prefill_tp, self.decode_tp, self.rank.tp, is_latent)
            self.target_rank_map_table[prefill_tp] = mapping
        return self.target_rank_map_table[prefill_tp]
