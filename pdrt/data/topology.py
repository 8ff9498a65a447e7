"""Which prefill ranks this decode rank shakes hands with, as their bootstrap server named them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrt.data.mapping import TargetRankMapping, check_heads
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout, Rank, Route


@dataclass(slots=True)
class Topology:
    """`writers`: so many slots has a row of this rank's memory."""

    layout: KvLayout
    rank: Rank
    decode_tp: int
    writers: int = 1
    target_rank_map_table: dict[tuple[int, int], TargetRankMapping] = field(
        default_factory=dict
    )  # by prefill (tp, cp)

    def places(self, route: Route, room: int, dp_rank: int) -> dict[str, int]:
        """Each rank that must be told -> its slot in the row, or -1 when it need not write.

        Raises ConfigError with both values for what can never fit.
        """
        if differences := self.layout.differences(route.fingerprint):
            raise ConfigError(f"KV layouts differ: {'; '.join(differences)}")
        dp_rank = dp_rank if route.dp_size > 1 else 0
        if not 0 <= dp_rank < route.dp_size:
            raise ConfigError(f"prefill dp rank {dp_rank} of {route.dp_size} was named")
        mapping = self._mapping(route.attn_tp_size, route.attn_cp_size)
        places = {
            str(Rank(dp=dp_rank, cp=cp, tp=tp)): place
            for (cp, tp), place in mapping.places(room).items()
        }
        if missing := [rank for rank in places if rank not in route.ranks]:
            raise ConfigError(f"the route does not name prefill ranks {missing}")
        return places

    def handshakes(self, route: Route) -> int:
        """Decode ranks that each of these prefill ranks waits for."""
        return self._mapping(route.attn_tp_size, route.attn_cp_size).handshakes

    def _mapping(self, prefill_tp: int, prefill_cp: int) -> TargetRankMapping:
        sizes = prefill_tp, prefill_cp
        if sizes not in self.target_rank_map_table:
            self.target_rank_map_table[sizes] = self._new_mapping(prefill_tp, prefill_cp)
        return self.target_rank_map_table[sizes]

    def _new_mapping(self, prefill_tp: int, prefill_cp: int) -> TargetRankMapping:
        if self.rank.cp:
            raise ConfigError(f"decode cp rank {self.rank.cp}: a decode instance has cp = 1")
        check_heads(self.layout, self.rank.tp, self.decode_tp)
        mapping = TargetRankMapping(
            prefill_tp,
            self.decode_tp,
            self.rank.tp,
            self.layout.model_kv_heads,
            self.layout.kind == "latent",
            prefill_cp,
        )
        if mapping.slots > self.writers:
            raise ConfigError(
                f"{mapping.slots} prefill ranks write to one decode rank (prefill tp ="
                f" {prefill_tp}, cp = {prefill_cp}, decode tp = {self.decode_tp}), but [transfer]"
                f" writers = {self.writers} on the decode side"
            )
        return mapping
