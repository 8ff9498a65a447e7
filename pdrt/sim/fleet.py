"""The router's choice: the real fleet and policies, over instances that are simulated.

All have passed their canaries and live; each tells its load in a beat a second, a full one more
often, as `pdrt.control.instances.watch` would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdrt.config import PolicySection, RouterConfig, Target, TimeoutsSection
from pdrt.control.choice import Choice
from pdrt.control.fleet import Fleet
from pdrt.control.instances import FULL_LOOK_S, Hold, Instance, Status
from pdrt.control.pairs import Trust
from pdrt.control.policy import Ask
from pdrt.data.peer import Health
from pdrt.errors import PdrtError
from pdrt.messages import Source
from pdrt.sim.clock import Clock
from pdrt.sim.cluster import Leader

MODEL: Final = "sim"
_PORT: Final = 8000


class Chosen:
    """Who serves what; `is_over` says whether beats are needed no more."""

    def __init__(
        self,
        clock: Clock,
        leaders: Sequence[Leader],
        policy: PolicySection,
        is_over: Callable[[], bool],
    ) -> None:
        self._clock, self._is_over = clock, is_over
        self._until = 0.0
        self.timeouts = TimeoutsSection()
        self._fleet = Fleet.of(_config(leaders, policy))
        pairs = zip(self._fleet.instances, leaders, strict=True)
        self.leaders: Mapping[Instance, Leader] = dict(pairs)
        for instance, leader in self.leaders.items():
            instance.health, instance.status = Health.ALIVE, _status(leader)
            instance.model, instance.is_known = MODEL, True
        for pair in self._fleet.pairs:
            pair.trust = Trust.PASSED
        self._fleet.changed()

    def pick(self, room: int, weight: int, without: set[Instance]) -> Choice:
        """Raises Unavailable or Overloaded."""
        return self._fleet.pick(Ask(MODEL, room, weight=weight), None, without)

    def pick_prefill(
        self, decode: Instance, room: int, weight: int, without: set[Instance]
    ) -> Choice:
        """Another one for a decode instance that waits. Raises Unavailable."""
        return self._fleet.pick_prefill(decode, without, Ask(MODEL, room, weight=weight))

    def hold(self, instance: Instance, tokens: int, dp_rank: int = 0) -> Hold:
        return instance.hold(tokens, dp_rank, self._fleet.turn, lambda _error: None)

    def begin(self, until: float) -> None:
        """Beats, until it is over. Raises PdrtError when it should long have been, by `until`."""
        self._until = until
        for instance in self.leaders:
            self._beat_later(instance)

    def _beat_later(self, instance: Instance) -> None:
        every = self.timeouts.heartbeat_s
        wait = min(every, FULL_LOOK_S) if instance.is_full else every
        self._clock.after(wait, lambda: self._beat(instance))

    def _beat(self, instance: Instance) -> None:
        if self._clock.now > self._until:
            raise PdrtError("a simulated request has no end: please report it with its command")
        if not self._is_over():
            instance.heard(_status(self.leaders[instance]))
            self._beat_later(instance)


def source_of(choice: Choice) -> Source | None:
    """What decode is told of the prefill side."""
    if choice.prefill is None:
        return None
    host, port = choice.prefill.bootstrap
    return Source(host=host, port=port, dp_rank=choice.dp_rank)


def _config(leaders: Sequence[Leader], policy: PolicySection) -> RouterConfig:
    def targets(role: str) -> tuple[Target, ...]:
        return tuple(Target(http=f"{one.name}:{_PORT}") for one in leaders if one.role == role)

    return RouterConfig(
        prefill=targets("prefill"),
        decode=targets("decode"),
        hybrid=targets("hybrid"),
        policy=policy,
    )


def _status(leader: Leader) -> Status:
    ranks = tuple(range(len(leader.workers)))
    return Status(
        role=leader.role,
        state="ready",
        model=MODEL,
        instance_epoch=1,
        ready_ranks=ranks,
        load=leader.load(),
    )
