"""An instance as the router sees it: its life, what it says of itself, what it carries.

The promise: whatever runs on an instance is told of its death in the same breath in which the
router learns of it, so nobody waits for a peer that is known to be gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from typing import Final, Protocol, TypeAlias

import structlog
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from pdrt.config import PolicyName, Role, Target
from pdrt.control.breaker import Breaker, Circuit, Renewed
from pdrt.control.breaker import feed as feed_breaker
from pdrt.control.http import at_stage
from pdrt.control.patience import patience
from pdrt.control.policy import Ask, Load, choose, mark_of, note_given
from pdrt.control.prefixes import Prefixes
from pdrt.control.told import LoadTold, TotalsTold, WorkerTold
from pdrt.data.peer import Beat, Died, Event, Health, Miss, feed
from pdrt.errors import BadMessage, ConfigError, PdrtError, PeerLost

log = structlog.get_logger(__name__)


@checked(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
class Status:
    """What a leader says of itself (GET /internal/status)."""

    role: Role
    state: str
    model: str = ""
    instance_epoch: int = 0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    ready_ranks: tuple[int, ...] = (0,)
    last_fault_at: float | None = None
    max_model_len: int = 0
    local_prefill: bool = False  # decode: it may compute a prompt itself
    # What follows differs from word to word, and makes nobody look again.
    load: LoadTold = field(default_factory=LoadTold, compare=False)
    totals: TotalsTold = field(default_factory=TotalsTold, compare=False)
    workers: tuple[WorkerTold, ...] = field(default=(), compare=False)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and bool(self.ready_ranks)


_STATUS: Final = TypeAdapter(Status)
FULL_LOOK_S: Final = 0.1  # a full instance has room again at any moment
ANY: Final = Ask()
NOTHING: Final = Prefixes(0)
_WHERE: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]"
    r"|(?P<name>(?!.{254})[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?)):(?P<port>[0-9]{1,5})",
    re.ASCII,
)


def read_status(body: object) -> Status:
    """Raises BadMessage."""
    try:
        return _STATUS.validate_python(body)
    except ValidationError as error:
        raise BadMessage(f"no status: {str(error)[:300]}") from error


class Listener(Protocol):
    """Who wants to know what becomes of an instance."""

    def renewed(self, instance: Instance) -> None:
        """It died or was restarted: what was true of it need not be any more."""
        ...

    def faulted(self, instance: Instance) -> None:
        """It lives, and something in it failed."""
        ...

    def changed(self) -> None:
        """Health or status differ from before."""
        ...

    def serves(self, instance: Instance) -> None:
        """It serves another model than it said before."""
        ...

    def rested(self, instance: Instance) -> None:
        """Its last request has ended."""
        ...


def _nobody(_error: PdrtError) -> None:
    """Wants to know."""


class Hold:
    """One leg's claim on an instance: counted from dispatch, released once.

    `on_lost` is called if the instance dies under it, and by nobody once it is released.
    """

    __slots__ = ("_instance", "on_lost", "rank", "tokens")

    def __init__(
        self, instance: Instance, rank: Load, tokens: int, on_lost: Callable[[PdrtError], None]
    ) -> None:
        self._instance: Instance | None = instance
        self.rank, self.tokens = rank, tokens
        self.on_lost = on_lost

    def release(self) -> None:
        instance = self._instance
        if instance is not None:
            self._instance, self.on_lost = None, _nobody
            instance.forget(self)


class Instance:
    """One leader that the router may send to."""

    def __init__(self, role: Role, target: Target, listener: Listener) -> None:
        self.role: Role = role
        self._listener = listener
        self.url, self.where = base_url(target.http)
        where = self.where
        self.name = f"{role} {where}"
        self.health = Health.UNKNOWN
        self.status: Status | None = None
        self.reason = "not heard of yet"
        self.is_known = False  # it has answered once
        self.model = target.model  # what it said last that it serves
        self.load = Load(mark=mark_of(where))
        self.breaker = Breaker()
        self.is_drained = False  # an operator wants nothing new there
        self._is_leaving = False  # it said so, and has not been heard since
        self.is_full = False  # it said so, or refused for it, since its last beat
        self.nudged = asyncio.Event()  # look again now
        self._bootstrap = bootstrap_of(target)
        self._ranks: dict[int, Load] = {}
        self._holds: set[Hold] = set()

    def __repr__(self) -> str:
        return f"<{self.name} {self.health}>"

    @property
    def is_routable(self) -> bool:
        alive = self.health in (Health.ALIVE, Health.SUSPECT)
        wanted = not (self.is_drained or self._is_leaving or self.breaker.state is Circuit.OPEN)
        return alive and wanted and self.status is not None and self.status.is_ready

    @property
    def why_not(self) -> str:
        """What keeps it from taking requests, or nothing."""
        if self.is_routable:
            return ""
        if self.is_drained or self._is_leaving:
            return f"{self.name} is {'drained' if self.is_drained else 'leaving'}"
        if self.breaker.state is Circuit.OPEN:
            return f"{self.name} is left alone for a while: {self.breaker.faults} faults in a row"
        if self.health is Health.ALIVE and self.status is not None:
            return f"{self.name} is {self.status.state}"
        return f"{self.name} is {self.health}: {self.reason}"

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Where its bootstrap server is: what it says itself, else what the config says."""
        said = self.status
        if said is not None and said.bootstrap_host and said.bootstrap_port:
            return said.bootstrap_host, said.bootstrap_port
        return self._bootstrap

    def choose_rank(self, policy: PolicyName, ask: Ask = ANY, held: Prefixes = NOTHING) -> int:
        ready = self.status.ready_ranks if self.status else (0,)
        if len(ready) == 1:
            return ready[0]
        return ready[choose(policy, [self._rank(rank) for rank in ready], ask, held).at]

    def note_prompt(self, ask: Ask, held: Prefixes, rank: int = 0) -> None:
        """It is sent there. A bit stands for a rank of its present life in the index."""
        load = self._rank(rank)
        if not load.seats:
            load.seats = held.take_seat()
            self.load.seats |= load.seats
        held.note(ask.keys, load.seats)
        note_given([*self._ranks.values()], list(self._ranks).index(rank), ask.weight)

    def leave_seats(self, held: Prefixes) -> None:
        """What its caches held is gone."""
        self.load.seats = 0
        for load in self._ranks.values():
            if load.seats:
                held.give_seat(load.seats)
                load.seats = 0

    def hold(
        self,
        tokens: int,
        dp_rank: int,
        turn: int,
        on_lost: Callable[[PdrtError], None] = _nobody,
    ) -> Hold:
        """Count a leg here from now on."""
        load, rank = self.load, self._ranks.get(dp_rank) or self._rank(dp_rank)
        hold = Hold(self, rank, tokens, on_lost)
        load.take(tokens)
        rank.take(tokens)
        load.last = rank.last = turn
        self._holds.add(hold)
        return hold

    def forget(self, hold: Hold) -> None:
        self._holds.discard(hold)
        self.load.give(hold.tokens)
        hold.rank.give(hold.tokens)
        if not self._holds:
            self._listener.rested(self)

    def heard(self, status: Status) -> None:
        """It answered. A new epoch is a new peer: what the old one carried is lost."""
        before, self.status, self.is_known = self.status, status, True
        if status.model and status.model != self.model:
            self.model = status.model
            self._listener.serves(self)
        said, was_full = status.load, self.is_full
        self.load.elsewhere = max(0, max(said.tokens, said.kv_tokens) - self.load.tokens)
        self.is_full, was_leaving, self._is_leaving = said.is_full, self._is_leaving, False
        if before is not None and before.instance_epoch != status.instance_epoch:
            self._lose(f"{self.name} was restarted")
        elif before is not None and before.last_fault_at != status.last_fault_at:
            self._listener.faulted(self)
        self._step(Beat(), "")
        is_news = was_leaving or was_full is not self.is_full
        if is_news or before != status or _pool(before) != said.pool_tokens:
            self._listener.changed()

    def set_drained(self, is_drained: bool) -> None:
        """Nothing new for it from now on, or again something."""
        self.is_drained = is_drained
        self._listener.changed()

    def leaves(self) -> None:
        """It is about to end, and will say so itself at its next beat."""
        self._is_leaving = True
        self.nudged.set()
        self._listener.changed()

    def overflowed(self) -> None:
        """It refused a request because it is full: until its next beat others are asked first."""
        if not self.is_full:
            self.is_full = True
            self.nudged.set()
            self._listener.changed()

    def answers(self) -> None:
        """It gives no beat, but sends answers: whether it is still full is not known."""
        if self.is_full:
            self.is_full = False
            self._listener.changed()

    def missed(self, reason: str) -> None:
        self._step(Miss(), reason)

    def died(self, reason: str) -> None:
        """A refused connection is as good as two misses."""
        self._step(Died(), reason)

    def _step(self, event: Event, reason: str) -> None:
        before = self.health
        self.reason = reason or self.reason
        news = feed(self, event)
        if self.health is not before:
            tell = log.warning if self.health is Health.DEAD else log.info
            tell("instance", name=self.name, health=self.health, reason=reason)
            self._listener.changed()
        if news is Health.DEAD:
            self.status = None
            self._lose(f"{self.name} is gone: {reason}")

    def _lose(self, reason: str) -> None:
        feed_breaker(self.breaker, Renewed())
        self._listener.renewed(self)
        for hold in tuple(self._holds):
            hold.on_lost(at_stage(PeerLost(reason), self.role))

    def _rank(self, dp_rank: int) -> Load:
        load = self._ranks.get(dp_rank)
        if load is None:
            load = self._ranks[dp_rank] = Load(mark=mark_of(f"{self.url} {dp_rank}"))
        return load


def _pool(status: Status | None) -> int:
    return status.load.pool_tokens if status else 0


Probe: TypeAlias = Callable[[Instance], Awaitable[Status]]
Signs: TypeAlias = Callable[[Instance], int]  # of life: rises with every piece of an answer


async def watch(
    instance: Instance, probe: Probe, signs: Signs, every: float, within: float
) -> None:
    """Probe forever, at once after a first miss. Cancel the task to stop."""
    while True:
        before, seen = instance.health, signs(instance)
        try:
            async with patience(within):
                status = await probe(instance)
        except TimeoutError:
            if signs(instance) == seen:  # a busy instance that sends answers is not dead
                instance.missed(f"no answer within {within:g} s")
            else:
                instance.answers()
        except PdrtError as error:
            instance.missed(str(error))
        else:
            instance.heard(status)
        if instance.health is Health.SUSPECT and before is not Health.SUSPECT:
            continue  # the second look decides, and nobody should wait for it
        await _pause(instance, min(every, FULL_LOOK_S) if instance.is_full else every)


async def _pause(instance: Instance, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await instance.nudged.wait()
    except TimeoutError:
        pass
    instance.nudged.clear()


def base_url(text: str) -> tuple[str, str]:
    """(URL without a path, host:port) of a target as configured. Raises ConfigError."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        scheme, rest = "http", text
    where = rest.rstrip("/")
    scheme = scheme.lower()
    if scheme not in ("http", "https") or _split(where) is None:
        raise ConfigError(f"target http = {text!r}: want host:port or http://host:port")
    return f"{scheme}://{where}", where


def bootstrap_of(target: Target) -> tuple[str, int]:
    """Where its decode peers meet it. Raises ConfigError."""
    found = _split(target.bootstrap or base_url(target.http)[1])
    if found is None:
        raise ConfigError(f"target bootstrap = {target.bootstrap!r}: want host:port")
    return found


def _split(text: str) -> tuple[str, int] | None:
    """A host, which a resolver can be asked for, and a port."""
    found = _WHERE.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        return None
    return (found["v6"] or found["name"]).lower(), int(found["port"])


def reasons(instances: Sequence[Instance]) -> str:
    """Why none of these can serve."""
    return (
        "; ".join(filter(None, (each.why_not for each in instances)))
        or "none is listed or registered"
    )
