"""How much a peer may make us keep, and for how long we wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.config import TimeoutsSection


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the tables that peers fill."""

    rooms_per_peer: int = 4096  # handshakes that nobody expects yet
    peers: int = 1024
    outcomes: int = 8192  # attempts that are over, remembered for those who ask late


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds of waiting, by what is waited for."""

    every: float = 1.0  # ping
    answer: float = 0.45
    early: float = 30.0  # a handshake may come so long before its request
    again: float = 1.0  # a handshake or abort that nobody answered is said again
    stall: float = 1.5  # no write to a peer ends, though one is open ...
    stall_rate: float = 50e6  # ... and so many bytes a second are allowed for it
    grace: float = 30.0  # quarantine longer than this is reported

    @staticmethod
    def of(timeouts: TimeoutsSection) -> Patience:
        return Patience(
            every=timeouts.heartbeat_s,
            answer=timeouts.heartbeat_timeout_s,
            again=timeouts.heartbeat_s,
            grace=timeouts.quarantine_grace_s,
        )
