"""What each API key may do now: requests and tokens a minute, and requests at a time. Pure.

The promise: a refusal's Retry-After is when the same request would be let in, if the key is
used for nothing else meanwhile; what is refused has used up nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pdrt.control.apikeys import KeyRecord, hash_of, sent_key
from pdrt.control.bucket import Bucket
from pdrt.errors import BadRequest, RateLimited


class Quota:
    """One key in use."""

    def __init__(self, record: KeyRecord, now: float) -> None:
        self.record = record
        self.running = 0
        self._requests = Bucket(record.rpm, now)
        self._tokens = Bucket(record.tokens_per_minute, now)

    @property
    def name(self) -> str:
        return self.record.name

    def change(self, record: KeyRecord, now: float) -> None:
        """Other limits, or another key of the same name."""
        self.record = record
        self._requests.resize(record.rpm, now)
        self._tokens.resize(record.tokens_per_minute, now)

    def check(self, now: float, tokens: int = 0) -> None:
        """Raises RateLimited; BadRequest for more tokens than the key ever has."""
        record = self.record
        if record.concurrent and self.running >= record.concurrent:
            raise _refused(f"{record.concurrent} requests at a time", record.name, 0.0)
        if wait := self._requests.wait(1, now):
            raise _refused(f"{record.rpm} requests a minute", record.name, wait)
        wait = self._tokens.wait(tokens, now)
        if math.isinf(wait):
            raise BadRequest(
                f"max_tokens: the request asks for up to {tokens} tokens, and the key"
                f" {record.name!r} has {record.tokens_per_minute} a minute"
            )
        if wait:
            raise _refused(f"{record.tokens_per_minute} tokens a minute", record.name, wait)

    def take(self, tokens: int, now: float) -> None:
        """One request begins; `give` it back when it has ended. Raises as `check`."""
        self.check(now, tokens)
        self._requests.take(1, now)
        self._tokens.take(tokens, now)
        self.running += 1

    def give(self) -> None:
        self.running -= 1


class KeyRing:
    """All keys, found by the hash of what was sent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_hash: dict[str, Quota] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def find(self, authorization: str) -> Quota | None:
        """Whose key an Authorization header carries."""
        key = sent_key(authorization)
        return None if key is None else self._by_hash.get(hash_of(key))

    def replace(self, records: Sequence[KeyRecord]) -> Sequence[str]:
        """From now on these; what a name has used stays used. The names that are gone."""
        old = {quota.name: quota for quota in self._by_hash.values()}
        self._by_hash = {record.sha256: self._quota(record, old) for record in records}
        return sorted(old)

    def _quota(self, record: KeyRecord, old: dict[str, Quota]) -> Quota:
        now = self._clock()
        quota = old.pop(record.name, None)
        if quota is None:
            return Quota(record, now)
        quota.change(record, now)
        return quota


def _refused(limit: str, name: str, wait: float) -> RateLimited:
    error = RateLimited(f"the key {name!r} has {limit}, which are used up")
    error.retry_after = max(1, math.ceil(wait))
    return error
