"""What a node shows of itself: its status, its health, and why a request would not succeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdrt.control.figures import load_of, pressure_of, totals_of, worker_health, worker_status
from pdrt.control.http import Json
from pdrt.control.lives import NodeState
from pdrt.control.parts import Parts
from pdrt.data.peer import Health


@dataclass(frozen=True, slots=True)
class Shown:
    parts: Parts
    model: str
    max_model_len: int
    clock: Callable[[], float]
    takes_prompts: bool = False
    max_waiting: int = 1024

    def pool_tokens(self) -> int:
        """Tokens that the smallest ready pool holds; 0 while none is known."""
        ready = [handle.ready for handle in self.parts.handles if handle.ready is not None]
        return min((r.blocks * r.layout.block_size for r in ready), default=0)

    def _ready_ranks(self) -> list[int]:
        """The dp ranks all of whose workers serve."""
        handles = self.parts.handles
        absent = {h.rank.dp for h in handles if h.ready is None}
        return sorted({h.rank.dp for h in handles} - absent)

    def stalled_s(self) -> float:
        return self.clock() - self.parts.condition.turned_at

    def why_not_ready(self) -> str:
        """What keeps a request from succeeding, or nothing."""
        condition, side = self.parts.condition, self.parts.side
        reasons, peers = list(side.missing()), side.peers()
        if condition.state is not NodeState.READY:
            absent = [f"{h.name} is {h.state}" for h in self.parts.handles if not h.ready]
            reasons = [f"the node is {condition.state}", *absent, *reasons]
        elif peers and all(peer.health is Health.DEAD for peer in peers):
            reasons += [f"peer {peer.name} is dead: {peer.reason}" for peer in peers]
        elif not self._ready_ranks():
            reasons += [f"{h.name} is {h.state}" for h in self.parts.handles if not h.ready]
        elif not reasons and not condition.served_since_fault:
            reasons = ["no request has succeeded since the start or the last fault"]
        return "; ".join(reasons)

    def health(self) -> Json:
        parts = self.parts
        return {
            "role": parts.role,
            "state": str(parts.condition.state),
            "workers": [worker_health(handle) for handle in parts.handles],
            "nodes": list(parts.others.health()),
            "missing": list(parts.side.missing()),
            "peers": {p.name: f"{p.health}: {p.reason}".rstrip(": ") for p in parts.side.peers()},
        }

    def status(self) -> Json:
        parts, now, bootstrap = self.parts, self.clock(), self.parts.side.bootstrap
        return {
            "role": parts.role,
            "state": str(parts.condition.state),
            "model": self.model,
            "instance_epoch": parts.side.epoch,
            "bootstrap_host": bootstrap[0] if bootstrap else None,
            "bootstrap_port": bootstrap[1] if bootstrap else None,
            "dp_size": len({h.rank.dp for h in parts.handles}),
            "ready_ranks": self._ready_ranks(),
            "max_model_len": self.max_model_len,
            "local_prefill": self.takes_prompts,
            "load": self._load(),
            "totals": totals_of(parts.handles),
            "rooms": parts.work.rooms,
            "last_fault_at": parts.condition.fault_at or None,
            "workers": [worker_status(handle, now) for handle in parts.handles],
        }

    def _load(self) -> Json:
        handles, work = self.parts.handles, self.parts.work
        load = load_of(handles) | pressure_of(handles, self.max_waiting)
        return load | {"tokens": work.tokens, "is_full": load["is_full"] or work.is_full}
