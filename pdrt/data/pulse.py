"""When to ping a peer and when its answer is missing; after a miss it is asked again at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pulse:
    """Pings `every` seconds; an answer later than `patience` is a miss."""

    every: float
    patience: float
    due_at: float  # of the next ping; while an answer is waited for, of that answer
    number: int = 0
    is_waiting: bool = False

    def tick(self, now: float) -> tuple[bool, bool]:
        """(an answer is missing, ping now with `number`)."""
        if now < self.due_at:
            return False, False
        missed = self.is_waiting
        self.number += 1
        self.is_waiting = True
        self.due_at = now + self.patience
        return missed, True

    def answered(self, number: int) -> None:
        """The answer to ping `number` is here; late ones change nothing."""
        if self.is_waiting and number == self.number:
            self.is_waiting = False
            self.due_at += self.every - self.patience


@dataclass(slots=True)
class Silence:
    """The other side of a pulse: who is pinged `every` seconds counts what it did not hear."""

    every: float
    patience: float
    due_at: float

    def heard(self, now: float) -> None:
        self.due_at = now + self.every + self.patience

    def is_missed(self, now: float) -> bool:
        """Whether a ping is overdue; the next one is after `patience`."""
        if now < self.due_at:
            return False
        self.due_at = now + self.patience
        return True
