"""Who may place bytes where in our memory, and the end of that leave.

The promise: when `revoke` returns, no byte of that attempt is being placed and none will be.
Bytes are placed in portions, each one call that takes what has arrived and never waits. A
portion begins and ends under the lock that also revokes; so revoking waits for portions that
are being placed at that moment, each a copy of what a socket's buffer holds, and for no peer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from pdrt.data.transport.promise import Areas, Key


@dataclass(slots=True, eq=False)
class Permit:
    """Leave to fill some areas, until it is revoked."""

    begins: Areas  # rising
    ends: Areas  # of the area before the first (nothing), then of each
    is_revoked: bool = False

    def covers(self, runs: Areas) -> bool:
        """Whether each run (offset, length) lies inside one area."""
        if not len(runs):
            return True
        # First the limits: nothing wraps around then.
        if int(runs.min()) < 0 or int(runs.max()) > int(self.ends[-1]):
            return False
        offsets = runs[:, 0]
        ends = self.ends[self.begins.searchsorted(offsets, side="right")]
        return bool((offsets + runs[:, 1] <= ends).all())


class Grants:
    """The permits of one memory, shared by all threads that place bytes in it."""

    def __init__(self, size: int, probe_at: int, probe_bytes: int) -> None:
        self._size = size
        self._probe = self._permit(np.array([[probe_at, probe_bytes]], dtype=np.int64))
        self._permits: dict[Key, Permit] = {}
        self._placing: dict[int, Permit] = {}  # by thread: each places one portion at a time
        self._changed = threading.Condition()

    def admit(self, key: Key, areas: Areas) -> None:
        """Asked again, the areas are replaced."""
        permit = self._permit(areas)
        self.revoke(key)
        with self._changed:
            self._permits[key] = permit

    def revoke(self, key: Key) -> None:
        """What the module promises; unknown attempts are no error."""
        with self._changed:
            if permit := self._permits.pop(key, None):
                permit.is_revoked = True
                self._changed.wait_for(lambda: permit not in self._placing.values())

    def find(self, key: Key | None) -> Permit | None:
        """None for an attempt that was never admitted, or is over."""
        if key is None:
            return self._probe
        with self._changed:
            return self._permits.get(key)

    def begin(self, permit: Permit) -> bool:
        """Before a portion: whether it may be placed. Then `end` must follow, and soon."""
        with self._changed:
            if not permit.is_revoked:
                self._placing[threading.get_ident()] = permit
            return not permit.is_revoked

    def end(self, permit: Permit) -> None:
        """After a portion."""
        with self._changed:
            del self._placing[threading.get_ident()]
            if permit.is_revoked:
                self._changed.notify_all()

    def _permit(self, areas: Areas) -> Permit:
        """Neighbouring areas are one; what lies outside of the memory is left out."""
        begins = np.clip(areas[:, 0], 0, self._size)
        ends = np.clip(areas.sum(axis=1), 0, self._size)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        is_first = np.ones(len(begins), dtype=bool)
        is_first[1:] = begins[1:] > ends[:-1]
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(begins)) - 1 if len(firsts) else firsts
        return Permit(begins[firsts], np.concatenate(([-1], ends[lasts])))
