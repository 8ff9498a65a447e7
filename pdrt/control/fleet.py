"""All instances and pairs that a router knows, and the choice among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pdrt.config import PolicyName, RouterConfig
from pdrt.control.instances import Instance, Probe, reasons, watch
from pdrt.control.order import Pin
from pdrt.control.pairs import Faulted, Pair, Renewed, Trust, feed
from pdrt.control.policy import Load, choose
from pdrt.data.peer import Health
from pdrt.errors import BadRequest, NoDecode, NoPrefill, PdrtError, Unavailable

_GRADES: Final = {Trust.PASSED: 0, Trust.DOUBTFUL: 1, Trust.RETRYING: 1}
Excluded = Collection[Instance]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a request; `prefill` is None when a hybrid instance serves it alone."""

    prefill: Instance | None
    decode: Instance
    dp_rank: int = 0
    fallback: str = ""  # why a hybrid serves although there are prefill instances
    local: str = ""  # why decode computes the prompt itself


@dataclass(slots=True)
class Fleet:
    """Plain data with its questions; `run` is its only task."""

    config: RouterConfig
    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    hybrid: tuple[Instance, ...] = ()
    pairs: tuple[Pair, ...] = ()
    news: asyncio.Event = field(default_factory=asyncio.Event)  # something differs from before
    told: Callable[[], None] = lambda: None
    turn: int = 0

    @staticmethod
    def of(config: RouterConfig) -> Fleet:
        fleet = Fleet(config)
        fleet.prefill = tuple(Instance("prefill", each, fleet) for each in config.prefill)
        fleet.decode = tuple(Instance("decode", each, fleet) for each in config.decode)
        fleet.hybrid = tuple(Instance("hybrid", each, fleet) for each in config.hybrid)
        fleet.pairs = (
            *(Pair(prefill, decode) for prefill in fleet.prefill for decode in fleet.decode),
            *(Pair(None, hybrid) for hybrid in fleet.hybrid),
        )
        return fleet

    @property
    def instances(self) -> Sequence[Instance]:
        return (*self.prefill, *self.decode, *self.hybrid)

    async def run(self, probe: Probe) -> None:
        """Watch every instance. Cancel the task to stop."""
        timeouts = self.config.timeouts
        async with asyncio.TaskGroup() as tasks:
            for each in self.instances:
                tasks.create_task(
                    watch(each, probe, timeouts.heartbeat_s, timeouts.heartbeat_timeout_s)
                )

    # What instances tell.

    def renewed(self, instance: Instance) -> None:
        for pair in self._pairs_of(instance):
            if instance.is_known:
                pair.reason = f"{instance.name} was lost or restarted"
            else:
                pair.reason = f"{instance.name} had not been reached yet"
            feed(pair, Renewed())
        self.changed()

    def faulted(self, instance: Instance) -> None:
        for pair in self._pairs_of(instance):
            pair.reason = f"a fault in {instance.name}"
            feed(pair, Faulted())
        self.changed()

    def changed(self) -> None:
        self.news.set()
        self.told()

    def _pairs_of(self, instance: Instance) -> Iterable[Pair]:
        return (pair for pair in self.pairs if instance in pair.members)

    # Questions.

    @property
    def is_ready(self) -> bool:
        """Whether a request would succeed: a pair lives that has served since its last fault."""
        return any(pair.is_routable and self._grade(pair) == 0 for pair in self.pairs)

    def why_not_ready(self) -> str:
        return "" if self.is_ready else str(self._nobody(()))

    def pinned(self, pin: Pin) -> Instance:
        """The prefill instance that a client names. Raises BadRequest for any other address."""
        for each in self.prefill:
            if each.bootstrap == pin:
                return each
        raise BadRequest(
            f"bootstrap_host, bootstrap_port: {pin.host}:{pin.port} is no registered prefill"
        )

    def pick(self, pinned: Instance | None = None, without: Excluded = ()) -> Choice:
        """Who serves the next request. Raises NoPrefill, NoDecode or Unavailable."""
        usable = self._usable(without)
        split = [p for p in usable if p.prefill is not None and pinned in (None, p.prefill)]
        if split:
            split = self._best(split)
            prefill = self._least(self._prefill_policy, (p.prefill for p in split if p.prefill))
            decode = self._least(
                self._decode_policy, (p.decode for p in split if p.prefill is prefill)
            )
            return self._choice(prefill, decode)
        alone = [p for p in usable if p.prefill is None]
        if alone and pinned is None and not (self.prefill and self.config.policy.strict):
            hybrid = self._least(self._decode_policy, (p.decode for p in self._best(alone)))
            return self._choice(None, hybrid)
        raise self._nobody(without, pinned)

    def pick_prefill(self, decode: Instance, without: Excluded) -> Choice:
        """Another prefill instance for this decode instance. Raises NoPrefill."""
        usable = [p for p in self._usable(without) if p.prefill and p.decode is decode]
        if not usable:
            raise NoPrefill(f"no other healthy prefill instance: {reasons(self.prefill)}")
        found = (p.prefill for p in self._best(usable) if p.prefill)
        return self._choice(self._least(self._prefill_policy, found), decode)

    def _choice(self, prefill: Instance | None, decode: Instance) -> Choice:
        self.turn += 1
        if prefill is not None:
            return Choice(prefill, decode, prefill.choose_rank(self._prefill_policy))
        why = self._nobody(()).code if self.prefill else ""
        return Choice(None, decode, fallback=why)

    def _usable(self, without: Excluded) -> list[Pair]:
        return [
            pair
            for pair in self.pairs
            if self._grade(pair) is not None
            and pair.is_routable
            and not any(each in without for each in pair.members)
        ]

    def _grade(self, pair: Pair) -> int | None:
        """0 = has served since its last fault, 1 = may serve, None = must not be used."""
        return _GRADES.get(pair.trust) if self.config.policy.canary else 0

    def _best(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Those of the best grade; a suspect instance is only for want of others."""

        def order(pair: Pair) -> tuple[bool, int]:
            suspect = any(each.health is not Health.ALIVE for each in pair.members)
            return suspect, self._grade(pair) or 0

        best = min(map(order, pairs))
        return [pair for pair in pairs if order(pair) == best]

    @property
    def _prefill_policy(self) -> PolicyName:
        return self.config.policy.prefill

    @property
    def _decode_policy(self) -> PolicyName:
        return self.config.policy.decode

    def _least(self, policy: PolicyName, candidates: Iterable[Instance]) -> Instance:
        loads: dict[Instance, Load] = {each: each.load for each in candidates}
        return choose(policy, loads)

    def _nobody(self, without: Excluded, pinned: Instance | None = None) -> PdrtError:
        """The error that says what is missing."""
        prefill = self.prefill if pinned is None else (pinned,)
        if self.prefill and not any(e.is_routable and e not in without for e in prefill):
            return NoPrefill(f"no healthy prefill instance: {reasons(prefill)}")
        sides = self.decode or self.hybrid
        if not any(e.is_routable and e not in without for e in sides):
            return NoDecode(f"no healthy decode instance: {reasons(sides)}")
        untried = (f"{p.name}: {p.reason}" for p in self.pairs if p.is_routable)
        return Unavailable(f"no pair has passed its canary yet: {'; '.join(untried)}"[:1000])
