"""Who comes and goes while the router runs: by registration, by an operator, by a lapsed lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

import structlog

from pdrt.config import Role, Target
from pdrt.control.fleet import Fleet
from pdrt.control.http import Json
from pdrt.control.instances import Instance, base_url, bootstrap_of
from pdrt.control.leases import Change, Joined, Leases, Left, Registration, Restarted
from pdrt.errors import BadRequest, ConfigError, Conflict, NotFound

LOOK_S: Final = 0.25

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Roster:
    """The fleet's members, and who changes them. `run` is its only task."""

    fleet: Fleet
    leases: Leases
    clock: Callable[[], float]
    is_open: bool  # whether instances may register themselves
    _leased: dict[str, Instance] = field(default_factory=dict)  # by the address they registered

    async def run(self) -> NoReturn:
        """Let go of those whose lease has lapsed. Cancel the task to stop."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        for change in self.leases.lapsed(self.clock()):
            self._carry_out(change)

    # What instances say.

    def register(self, said: Registration) -> float:
        """The lease in seconds. Raises NotFound, BadRequest, Conflict or Overloaded."""
        if not self.is_open:
            raise NotFound("this router takes no registrations: [policy] registration is off")
        where = _where(said.target)
        listed = self._find(where)
        if listed is not None and said.http not in self._leased:
            return self._of_listed(listed, said)
        for change in self.leases.take(said, self.clock()):
            self._carry_out(change)
        return self.leases.lease_s

    def _of_listed(self, listed: Instance, said: Registration) -> float:
        """One that is in the file, or was joined by hand, stays whatever it says."""
        if listed.role != said.role:
            raise Conflict(f"{listed.name} is listed here, and it says that it is {said.role}")
        if said.state == "leaving":
            listed.leaves()
        else:
            listed.nudged.set()
        return self.leases.lease_s

    def _carry_out(self, change: Change) -> None:
        said = change.registration
        match change:
            case Joined():
                instance = self.fleet.join(said.role, said.target)
                self._leased[said.http] = instance
                log.info("joined", name=instance.name, epoch=said.instance_epoch)
            case Restarted():
                self._leased[said.http].nudged.set()
            case Left(reason=reason):
                instance = self._leased.pop(said.http)
                instance.leaves()
                self.fleet.leave(instance)
                log.info("left", name=instance.name, reason=reason, legs=instance.load.requests)

    # What operators say.

    def join(self, role: Role, target: Target) -> Json:
        """Raises BadRequest or Conflict."""
        if known := self._find(_where(target)):
            raise Conflict(f"{known.name} is a member already")
        new = self.fleet.join(role, target)
        log.info("joined", name=new.name, by="an operator")
        return self._told(new)

    def leave(self, name: str) -> Json:
        """Raises NotFound. One that registers itself may come back with its next renewal."""
        instance = self._member(name)
        for http, leased in tuple(self._leased.items()):
            if leased is instance:
                self.leases.drop(http, "an operator said so")
                del self._leased[http]
        self.fleet.leave(instance)
        log.info("left", name=instance.name, reason="an operator said so")
        return self._told(instance)

    def set_drained(self, name: str, is_drained: bool) -> Json:
        """Nothing new for it, what runs there goes on. Raises NotFound."""
        instance = self._member(name)
        instance.set_drained(is_drained)
        log.info("drained" if is_drained else "undrained", name=instance.name)
        return self._told(instance)

    def members(self) -> list[Json]:
        return [self._told(each) for each in self.fleet.instances]

    def _told(self, instance: Instance) -> Json:
        leased = (http for http, each in self._leased.items() if each is instance)
        http, status = next(leased, None), instance.status
        lease = None if http is None else self.leases.left_s(http, self.clock())
        return {
            "name": instance.name,
            "role": instance.role,
            "url": instance.url,
            "model": instance.model or None,
            "health": str(instance.health),
            "state": status.state if status else None,
            "epoch": status.instance_epoch if status else None,
            "drained": instance.is_drained,
            "drained_and_idle": instance.is_drained and not instance.load.requests,
            "is_full": instance.is_full,
            "circuit": str(instance.breaker.state),
            "reason": instance.why_not,
            "lease_left_s": None if lease is None else round(lease, 1),
            "requests": instance.load.requests,
            "tokens": instance.load.tokens,
            "tokens_of_others": instance.load.elsewhere,
        }

    def _member(self, name: str) -> Instance:
        """By `role host:port` or `host:port`. Raises NotFound."""
        found = self._find(name.rpartition(" ")[2])
        if found is None:
            raise NotFound(f"{name[:200]!r} is no member; see GET /admin/members")
        return found

    def _find(self, where: str) -> Instance | None:
        return next((each for each in self.fleet.instances if each.where == where), None)


def _where(target: Target) -> str:
    """Raises BadRequest for an address that is none: before anything is kept of it."""
    try:
        bootstrap_of(target)
        return base_url(target.http)[1]
    except ConfigError as error:
        raise BadRequest(str(error)) from None
