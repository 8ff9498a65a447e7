"""What each attached peer is written through, and what is said when there is no way to one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from pdrt.data.probe import CURES, Way
from pdrt.errors import PdrtError, TransferFailed
from pdrt.messages import Attached, Problem, Refused

_MOST: Final = 4096  # peers are forgotten when they die; those on other hosts die unseen

_log = structlog.get_logger()


class Ways:
    """By peer. Whoever learns of a way tells it, and so it is in the log of both sides."""

    def __init__(self) -> None:
        self._ways: dict[str, Way] = {}

    def know(self, peer: str, endpoint: str, way: Way) -> None:
        self._ways[peer] = way
        if len(self._ways) > _MOST:
            del self._ways[next(iter(self._ways))]
        _log.info(
            "peer_attached",
            peer=peer,
            endpoint=endpoint,
            transport=way.transport,
            gb_per_s=way.rounded,
        )

    def forget(self, peer: str) -> None:
        self._ways.pop(peer, None)

    def told(self, peers: Iterable[str]) -> dict[str, str]:
        """Of these, each one's transport and speed, where it is known."""
        return {peer: str(self._ways[peer]) for peer in peers if peer in self._ways}


def no_pair(host: str, port: int, reason: str) -> None:
    """What a prefill instance says of itself does not fit what we are."""
    text = f"the prefill instance of bootstrap server {host}:{port} cannot write to us: {reason}"
    _log.error("peer_refused", reason=text)


def no_way(here: str, there: str, error: PdrtError, transports: Iterable[str]) -> Problem:
    """Both ends, what went wrong and where to look."""
    cures = "; ".join(f"{name}: {CURES[name]}" for name in transports)
    text = f"prefill rank {here} cannot write to decode worker {there}: {error} ({cures})"
    _log.error("peer_refused", reason=text)
    return Problem(code=error.code, message=text, stage="attach")


def nothing_came(said: Attached, there: str, here: str) -> Refused:
    """A prefill rank says that it wrote to us; it did not."""
    text = (
        f"prefill rank {said.rank} at {there} says that it wrote to {here} through"
        f" {said.transport or 'no transport'}, but nothing has arrived"
    )
    _log.error("peer_refused", reason=text)
    problem = Problem(code=TransferFailed.code, message=text, stage="attach")
    return Refused(session=said.session, problem=problem, process=said.process, number=said.number)
