"""All instances and pairs that a router knows, and the choice among them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from pdrt.config import Role, RouterConfig, Target
from pdrt.control.breaker import Circuit, FaultedTooOften, PauseOver, Served
from pdrt.control.breaker import Faulted as InstanceFaulted
from pdrt.control.breaker import feed as feed_breaker
from pdrt.control.choice import Because, Choice
from pdrt.control.instances import ANY, Instance, Probe, Signs, reasons, watch
from pdrt.control.legs import Failure
from pdrt.control.order import Pin
from pdrt.control.pairs import Faulted, Pair, Renewed, feed
from pdrt.control.policy import Ask, choose, note_given
from pdrt.control.prefixes import Prefixes
from pdrt.control.views import Excluded, View, any_grade, grade, set_scales, view_of
from pdrt.errors import (
    BadRequest,
    Draining,
    NoDecode,
    NoPrefill,
    NotFound,
    Overloaded,
    PdrtError,
    Unavailable,
)

_MODELS: Final = 1024  # remembered of those that have gone

_MOST_NAMES: Final = 64  # of models that clients have asked for
_LONGEST_NAME: Final = 300

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Fleet:
    """Plain data with its questions; `run` is its only task."""

    config: RouterConfig
    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    hybrid: tuple[Instance, ...] = ()
    pairs: tuple[Pair, ...] = ()
    news: asyncio.Event = field(default_factory=asyncio.Event)  # something differs from before
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # somebody came or left
    told: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    turn: int = 0
    leaving: set[Instance] = field(default_factory=set)  # no members, and with requests still
    views: dict[str, View] = field(default_factory=dict)  # empty: to be made anew
    _gone: dict[str, None] = field(default_factory=dict)  # models that were served once
    _prompted: Prefixes = field(default_factory=Prefixes)  # what prefill instances were sent
    _decoded: Prefixes = field(default_factory=Prefixes)

    @staticmethod
    def of(config: RouterConfig) -> Fleet:
        fleet = Fleet(config)
        listed: tuple[tuple[Role, Sequence[Target]], ...] = (
            ("prefill", config.prefill),
            ("decode", config.decode),
            ("hybrid", config.hybrid),
        )
        for role, targets in listed:  # at once: pairs are made anew for whoever joins
            fleet._set(role, tuple(Instance(role, target, fleet) for target in targets))
        return fleet

    @property
    def instances(self) -> Sequence[Instance]:
        return (*self.prefill, *self.decode, *self.hybrid)

    # Members.

    def join(self, role: Role, target: Target) -> Instance:
        """A new member, not heard of yet. Raises ConfigError for a bad address."""
        new = Instance(role, target, self)
        new.load.given = max((e.load.given for e in self._side(role)), default=0)  # no flood for it
        self._set(role, (*self._side(role), new))
        return new

    def leave(self, instance: Instance) -> None:
        """It gets nothing new; what it carries goes on, and it is watched until that has ended."""
        self._set(instance.role, tuple(e for e in self._side(instance.role) if e is not instance))
        self._forget_prefixes(instance)
        if instance.load.requests:
            self.leaving.add(instance)
        if instance.model:
            self._gone[instance.model] = None
        while len(self._gone) > _MODELS:
            del self._gone[next(iter(self._gone))]
        self.changed()

    def _side(self, role: Role) -> tuple[Instance, ...]:
        return {"prefill": self.prefill, "decode": self.decode, "hybrid": self.hybrid}[role]

    def _set(self, role: Role, members: tuple[Instance, ...]) -> None:
        match role:
            case "prefill":
                self.prefill = members
            case "decode":
                self.decode = members
            case "hybrid":
                self.hybrid = members
        self._pair_up()
        self.moved.set()

    def _pair_up(self) -> None:
        """A pair for each two that may serve the same model; known ones stay what they are."""
        known = {(pair.prefill, pair.decode): pair for pair in self.pairs}
        wanted: list[tuple[Instance | None, Instance]] = [
            (prefill, decode)
            for prefill in self.prefill
            for decode in self.decode
            if prefill.model == decode.model or not (prefill.model and decode.model)
        ]
        wanted += [(None, hybrid) for hybrid in self.hybrid]
        self.pairs = tuple(known.get(two) or Pair(*two, self._stale) for two in wanted)
        self._stale()

    async def run(self, probe: Probe, signs: Signs) -> None:
        """Watch every instance, also those that come later. Cancel the task to stop."""
        watched: dict[Instance, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self.moved.clear()
                self.leaving = {each for each in self.leaving if each.load.requests}
                wanted = {*self.instances, *self.leaving}
                for each in watched.keys() - wanted:
                    watched.pop(each).cancel()
                for each in self.instances:
                    if each not in watched:
                        watched[each] = tasks.create_task(self._watch(each, probe, signs))
                await self._until_next()

    async def _until_next(self) -> None:
        """Somebody has come or left, or a circuit's pause is over."""
        pauses = [e.breaker.until for e in self.instances if e.breaker.state is Circuit.OPEN]
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(pauses) - self.clock()) if pauses else None):
                await self.moved.wait()
        self.end_pauses()

    async def _watch(self, instance: Instance, probe: Probe, signs: Signs) -> None:
        timeouts = self.config.timeouts
        await watch(instance, probe, signs, timeouts.heartbeat_s, timeouts.heartbeat_timeout_s)

    # What instances tell.

    def renewed(self, instance: Instance) -> None:
        self._forget_prefixes(instance)
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
        self._stale()
        self.news.set()
        self.told()

    def serves(self, _instance: Instance) -> None:
        """It said that it serves another model than before: it belongs to other pairs."""
        self._pair_up()

    def rested(self, instance: Instance) -> None:
        """Its last request has ended."""
        if instance in self.leaving:
            self.moved.set()

    # What requests tell.

    def blame(self, instance: Instance, failure: Failure) -> None:
        """It failed a request. Whether that is held against it, its circuit breaker decides."""
        if not is_fault(failure):
            return
        too_often = instance.breaker.fills and self._has_others(instance)
        kind = FaultedTooOften if too_often else InstanceFaulted
        if feed_breaker(instance.breaker, kind(self.clock())):
            self._circuit_moved(instance, str(failure.error))

    def praise(self, choice: Choice) -> None:
        """These have served a request."""
        if choice.prefill is not None and choice.prefill.breaker.faults:
            self._forgive(choice.prefill)
        if choice.decode.breaker.faults:
            self._forgive(choice.decode)

    def _forgive(self, instance: Instance) -> None:
        if feed_breaker(instance.breaker, Served()):
            self._circuit_moved(instance, "a request has gone well")

    def end_pauses(self) -> None:
        """Canaries for those whose pause is over, or who are the last ones left."""
        now = self.clock()
        for each in self.instances:
            is_open = each.breaker.state is Circuit.OPEN
            if is_open and (now >= each.breaker.until or not self._has_others(each)):
                feed_breaker(each.breaker, PauseOver())
                self._circuit_moved(each, "its pause is over")

    def _has_others(self, instance: Instance) -> bool:
        """Whether somebody else could take its work: the last one is not left alone."""
        side = self._side(instance.role)
        return any(e.is_routable and e.model == instance.model for e in side if e is not instance)

    def _circuit_moved(self, instance: Instance, reason: str) -> None:
        state = instance.breaker.state
        tell = log.warning if state is Circuit.OPEN else log.info
        tell("circuit", name=instance.name, state=str(state), reason=reason[:300])
        if state is Circuit.OPEN:
            for pair in self._pairs_of(instance):
                pair.reason = instance.why_not
                feed(pair, Renewed())
            self.moved.set()
        self.changed()

    def _stale(self) -> None:
        self.views.clear()

    def _forget_prefixes(self, instance: Instance) -> None:
        held = self._prompted if instance.role == "prefill" else self._decoded
        instance.leave_seats(held)

    def _pairs_of(self, instance: Instance) -> Iterable[Pair]:
        return (pair for pair in self.pairs if instance in pair.members)

    # Questions.

    @property
    def is_ready(self) -> bool:
        """Whether a request would succeed: a pair lives that has served since its last fault."""
        return any(pair.is_routable and self._grade(pair) == 0 for pair in self.pairs)

    def why_not_ready(self) -> str:
        return "" if self.is_ready else str(self._nobody())

    def pinned(self, pin: Pin) -> Instance:
        """The prefill instance that a client names. Raises BadRequest for any other address."""
        for each in self.prefill:
            if each.bootstrap == pin:
                return each
        raise BadRequest(
            f"bootstrap_host, bootstrap_port: {pin.host}:{pin.port} is no registered prefill"
        )

    @property
    def models(self) -> Sequence[str]:
        return sorted({each.model for each in self.instances if each.model})

    def pick(
        self, ask: Ask = ANY, pinned: Instance | None = None, without: Excluded = ()
    ) -> Choice:
        """Who serves the next request.

        Raises NoPrefill, NoDecode, Unavailable, Overloaded; NotFound or BadRequest for its model.
        """
        view = self.views.get(ask.model) or self._view(ask.model)
        if pinned is not None or without:
            view = view_of(view.model, self._pairs_for(view.model), self._grade, without, pinned)
        if view.prefill.instances:
            return self._split(view, ask)
        if view.alone.instances and pinned is None:
            why = self._why_alone(view)
            if not (why and self.config.policy.strict):
                return self._alone(view, ask, why)
            if why == Overloaded.code:
                raise Overloaded(f"every pair{_of(view.model)} is full, and nobody may step in")
        if view.is_full:
            raise Overloaded(f"every instance{_of(view.model)} is full")
        raise self._nobody(view.model, without, pinned)

    def pick_prefill(self, decode: Instance, without: Excluded, ask: Ask = ANY) -> Choice:
        """Another prefill instance for this decode instance. Raises NoPrefill."""
        pairs = (pair for pair in self.pairs if pair.decode is decode and pair.prefill)
        view = view_of(decode.model, pairs, self._grade, without)
        if not view.prefill.instances:
            raise NoPrefill(f"no other healthy prefill instance: {reasons(self.prefill)}")
        return self._split(view, ask)

    def _split(self, view: View, ask: Ask) -> Choice:
        policy, self.turn = self.config.policy, self.turn + 1
        first = choose(policy.prefill, view.prefill.loads, ask, self._prompted)
        prefill = view.prefill.instances[first.at]
        found = view.decode[prefill]
        second = choose(policy.decode, found.loads, ask, self._decoded)
        decode = found.instances[second.at]
        if prefill.model != decode.model and prefill.model and decode.model:
            log.error("cross_model_pick", prefill=repr(prefill), decode=repr(decode))
            raise PdrtError("two models met in one choice; see the log")
        rank = prefill.choose_rank(policy.prefill, ask, self._prompted)
        if policy.prefill == "prefix_aware":
            prefill.note_prompt(ask, self._prompted, rank)
            note_given(view.prefill.loads, first.at, ask.weight)
        if policy.decode == "prefix_aware":
            decode.note_prompt(ask, self._decoded)
            note_given(found.loads, second.at, ask.weight)
        because = Because(ask, (view.prefill, first), (found, second))
        return Choice(prefill, decode, rank, because=because)

    def _alone(self, view: View, ask: Ask, why: str) -> Choice:
        policy, self.turn = self.config.policy.decode, self.turn + 1
        picked = choose(policy, view.alone.loads, ask, self._decoded)
        hybrid = view.alone.instances[picked.at]
        if policy == "prefix_aware":
            hybrid.note_prompt(ask, self._decoded)
            note_given(view.alone.loads, picked.at, ask.weight)
        return Choice(None, hybrid, fallback=why, because=Because(ask, None, (view.alone, picked)))

    def _has_prefill(self, view: View) -> bool:
        return any(each.model in (view.model, "") for each in self.prefill)

    def _why_alone(self, view: View) -> str:
        """What keeps the prefill instances of this model from serving, if there are any."""
        if view.is_split_full:
            return Overloaded.code
        return self._nobody(view.model).code if self._has_prefill(view) else ""

    # Models.

    def length_of(self, model: str) -> int:
        """How long its prompt and answer may be everywhere; 0: nobody has said."""
        statuses = [each.status for each in self.instances if each.model == model]
        lengths = [status.max_model_len for status in statuses if status and status.max_model_len]
        return min(lengths, default=0)

    def _view(self, model: str) -> View:
        """Those who serve the model. Raises NotFound, BadRequest or Unavailable."""
        name = self._meant(model)
        view = self.views.get(name)
        if view is None:
            set_scales(each for each in (*self.decode, *self.hybrid) if each.model == name)
            view = view_of(name, self._pairs_for(name), self._grade)
            self.views[name] = view
        if model != name and len(model) <= _LONGEST_NAME:  # plain backends are asked by any name
            if len(self.views) >= _MOST_NAMES:
                self.views.clear()
            self.views[model] = view
        return view

    def _meant(self, model: str) -> str:
        """Whose model a client means; "" while nobody has said what is served."""
        served = self.models
        if model in served or (not model and len(served) <= 1):
            return model or "".join(served)
        if not model:
            default = self.config.policy.default_model
            if default in served or default in self._gone:
                return default
            raise BadRequest(f"model: several are served; name one of {', '.join(served)}")
        if not self.instances or any(not each.model for each in self.instances):
            return "" if self.config.policy.is_plain or not served else self._unheard(model)
        if model in self._gone:
            return model
        raise NotFound(f"model {model!r} is not served here; {listed(served)}")

    def _unheard(self, model: str) -> str:
        """Raises Unavailable."""
        silent = [each for each in self.instances if not each.model]
        raise Unavailable(f"nobody serves {model!r} yet, and {reasons(silent)}")

    def _pairs_for(self, model: str) -> Iterable[Pair]:
        return (pair for pair in self.pairs if pair.decode.model == model)

    def _grade(self, pair: Pair) -> int | None:
        return any_grade(pair) if self.config.policy.is_plain else grade(pair)

    def _nobody(
        self, model: str = "", without: Excluded = (), pinned: Instance | None = None
    ) -> PdrtError:
        """The error that says what is missing."""
        is_one_of_several = bool(model) and (len(self.models) > 1 or model in self._gone)
        named = _of(model) if is_one_of_several else ""
        models = (model, "") if is_one_of_several else ("", *self.models)
        prefill, decode, hybrid = (
            [each for each in side if each.model in models]
            for side in (self.prefill, self.decode, self.hybrid)
        )
        prefill = prefill if pinned is None else [pinned]
        if prefill and not any(e.is_routable and e not in without for e in prefill):
            return NoPrefill(f"no healthy prefill instance{named}: {reasons(prefill)}")
        sides = decode or hybrid
        if not any(e.is_routable and e not in without for e in sides):
            kind = "hybrid" if hybrid and not decode else "decode"
            return NoDecode(f"no healthy {kind} instance{named}: {reasons(sides)}")
        untried = (f"{p.name}: {p.reason}" for p in self.pairs if p.is_routable)
        return Unavailable(f"no pair has passed its canary yet: {'; '.join(untried)}"[:1000])


def is_fault(failure: Failure) -> bool:
    """Something went wrong there; to be full, to drain or to run out of time is no fault."""
    error, status = failure.error, failure.status
    return status >= 500 and status != 504 and not isinstance(error, Draining | Overloaded)


def _of(model: str) -> str:
    return f" of model {model!r}" if model else ""


def listed(models: Sequence[str]) -> str:
    return (
        f"{', '.join(map(repr, models))} {'is' if len(models) == 1 else 'are'}"
        if models
        else ("nothing is yet")
    )
