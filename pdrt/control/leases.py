"""Who has registered here, and until when: plain data, which its caller tells the time.

An instance is known by its API's address. It joins with its first registration, stays as long as
it renews its lease, and leaves when it says so or has not been heard of for a lease's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from pdrt.config import Role, Target
from pdrt.errors import Conflict, Overloaded

RENEWALS: Final = 3  # in the time of a lease
Address = Annotated[str, Field(min_length=3, max_length=300)]


class Registration(BaseModel):
    """What an instance says of itself (POST /internal/register). Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    role: Role
    http: Address
    bootstrap: Annotated[str, Field(max_length=300)] = ""
    instance_epoch: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    state: Literal["here", "leaving"] = "here"

    @property
    def target(self) -> Target:
        return Target(http=self.http, bootstrap=self.bootstrap)


@dataclass(frozen=True, slots=True)
class Joined:
    registration: Registration


@dataclass(frozen=True, slots=True)
class Restarted:
    """The same place in a new life: what was known of the old one holds no more."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Left:
    registration: Registration
    reason: str


Change: TypeAlias = Joined | Restarted | Left


@dataclass(slots=True)
class _Lease:
    registration: Registration
    until: float


@dataclass(slots=True)
class Leases:
    lease_s: float
    most: int = 4096
    _by_http: dict[str, _Lease] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_http)

    def left_s(self, http: str, now: float) -> float | None:
        """Of its lease; None when it has none."""
        lease = self._by_http.get(http)
        return None if lease is None else max(0.0, lease.until - now)

    def take(self, said: Registration, now: float) -> Sequence[Change]:
        """Raises Conflict for an older life than the known one, Overloaded for one too many."""
        known = self._by_http.get(said.http)
        if said.state == "leaving":
            return self._leave(said, known)
        if known is None and len(self) >= self.most:
            raise Overloaded(f"{self.most} instances have registered, which is the limit")
        if known is not None and said.instance_epoch < known.registration.instance_epoch:
            raise Conflict(
                f"{said.http} has registered with epoch {known.registration.instance_epoch}, and"
                f" {said.instance_epoch} is older: two processes at one address,"
                " or a clock that was set back"
            )
        self._by_http[said.http] = _Lease(said, now + self.lease_s)
        if known is None:
            return [Joined(said)]
        before = known.registration
        if (before.role, before.bootstrap) != (said.role, said.bootstrap):
            return [Left(before, "it came back as another"), Joined(said)]
        return [Restarted(said)] if before.instance_epoch != said.instance_epoch else []

    def _leave(self, said: Registration, known: _Lease | None) -> Sequence[Change]:
        if known is None or known.registration.instance_epoch > said.instance_epoch:
            return []  # its successor is here already
        return [self.drop(said.http, "it said so")]

    def drop(self, http: str, reason: str) -> Left:
        return Left(self._by_http.pop(http).registration, reason)

    def lapsed(self, now: float) -> Sequence[Left]:
        """Who has not been heard of for too long; they are forgotten."""
        late = [http for http, lease in self._by_http.items() if lease.until <= now]
        return [self.drop(http, f"not heard of for {self.lease_s:g} s") for http in late]
