"""The door of a process that clients talk to: its keys from settings and file, held and counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from pdrt.config import SecuritySection
from pdrt.control.apikeys import KeyRecord, plain_records, records_in
from pdrt.control.gate import Gate, unknown_key
from pdrt.control.keyfile import read_keys
from pdrt.control.quota import KeyRing, Quota
from pdrt.control.reload import AnyReload, Reload
from pdrt.errors import PdrtError, RateLimited

_OUTCOMES: Final = ("admitted", "limited")


@dataclass(slots=True)
class Entry:
    """One request that was let in, and whose key it came with."""

    name: str = ""
    quota: Quota | None = None

    def leave(self) -> None:
        """It has ended; again is once."""
        quota, self.quota = self.quota, None
        if quota is not None:
            quota.give()


class KeyDoor:
    """`reloads` are to be watched for as long as it is in use."""

    def __init__(
        self,
        security: SecuritySection,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        open_paths: Collection[str],
        counted_paths: Collection[str],
    ) -> None:
        """Raises ConfigError when the keys cannot be read."""
        self._security, self._clock = security, clock
        self._ring = KeyRing(clock)
        self._counts: dict[tuple[str, str], Counter] = {}  # bound: each request has one
        self.is_closed = bool(security.api_keys or security.api_keys_file)
        self._gate = Gate(self._ring, clock, open_paths, counted_paths)
        self._requests = Counter(
            "pdrt_key_requests", "Requests by API key", ("key", "outcome"), registry=registry
        )
        file = security.api_keys_file
        self.reloads: list[AnyReload] = []
        if file:
            path = Path(file).expanduser()
            self.reloads = [Reload("API keys", [path], partial(self._read, path), self._use)]
            self.reloads[0].start()
        else:
            self._use(plain_records(security.api_keys))

    def _read(self, path: Path) -> Sequence[KeyRecord]:
        """Those of the file, beside those of the settings."""
        records = (*plain_records(self._security.api_keys), *read_keys(path))
        return records_in({"key": [record.model_dump() for record in records]}, str(path))

    def _use(self, records: Sequence[KeyRecord]) -> None:
        for name in self._ring.replace(records):
            for outcome in _OUTCOMES:
                self._requests.remove(name, outcome)
        self._counts = {
            (record.name, outcome): self._requests.labels(record.name, outcome)
            for record in records
            for outcome in _OUTCOMES
        }

    def refusal(self, method: str, path: str, authorization: str) -> PdrtError | None:
        """Why a request with this head is not let in."""
        if not self.is_closed:
            return None
        error = self._gate.refusal(method, path, authorization)
        if isinstance(error, RateLimited) and (quota := self._ring.find(authorization)):
            self._count(quota, "limited")
        return error

    def enter(self, authorization: str, tokens: int) -> Entry:
        """A request is let in, under its key's limits, until it `leave`s.

        Raises RateLimited, BadRequest for more tokens than the key ever has, or Unauthorized where
        it was removed after the request's head had come.
        """
        if not self.is_closed:
            return Entry()
        quota = self._ring.find(authorization)
        if quota is None:
            raise unknown_key()
        try:
            quota.take(tokens, self._clock())
        except RateLimited:
            self._count(quota, "limited")
            raise
        self._count(quota, "admitted")
        return Entry(quota.name, quota)

    @contextmanager
    def held(self, authorization: str, tokens: int) -> Iterator[str]:
        """The same for as long as the block runs; the key's name, for the log."""
        entry = self.enter(authorization, tokens)
        try:
            yield entry.name
        finally:
            entry.leave()

    def _count(self, quota: Quota, outcome: str) -> None:
        self._counts[quota.name, outcome].inc()
