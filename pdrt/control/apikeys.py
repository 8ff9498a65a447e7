"""Clients' API keys as a file has them: a name, the key's hash and its limits. Pure.

The promise: a key itself is nowhere at rest, and it is looked up by its hash, so that no
comparison's time tells anything of it. Keys that we make have 256 random bits, which no
number of guesses finds: a slow hash would only slow down each request.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from pdrt.errors import ConfigError
from pdrt.settings import Section, check

MAX_KEYS: Final = 10_000  # each is a metric's label
PREFIX: Final = "pdrt-"
_SCHEME: Final = "bearer "
_HEAD: Final = "# API keys of clients. Written by `pdrt keys`, which keeps no comments.\n"

Limit = Annotated[int, Field(ge=0, le=1_000_000_000)]


class KeyRecord(Section):
    """One client. A limit of 0 is none."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    rpm: Limit = 0
    concurrent: Limit = 0
    tokens_per_minute: Limit = 0


class KeyTable(Section):
    """All of a file."""

    key: Annotated[tuple[KeyRecord, ...], Field(strict=False, max_length=MAX_KEYS)] = ()

    @model_validator(mode="after")
    def _each_stands_once(self) -> Self:
        for what in ("name", "sha256"):
            seen = set[str]()
            for record in self.key:
                value = getattr(record, what)
                if value in seen:
                    raise ValueError(f"[[key]] {record.name!r}: its {what} stands twice")
                seen.add(value)
        return self


def new_key() -> str:
    """A key that nobody can guess. It is shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def sent_key(authorization: str) -> str | None:
    """The key in an Authorization header's value."""
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return authorization[len(_SCHEME) :].strip()


def records_in(tables: Mapping[str, Any], where: str) -> Sequence[KeyRecord]:
    """Those of a file. Raises ConfigError that names it, the key and what is allowed."""
    return check(KeyTable, tables, where).key


def plain_records(keys: Iterable[str]) -> Sequence[KeyRecord]:
    """For `[security] api_keys`, whose keys have no names and no limits."""
    return [
        KeyRecord(name=f"api_keys-{number}", sha256=hash_of(key))
        for number, key in enumerate(dict.fromkeys(keys), 1)
    ]


def with_key(records: Sequence[KeyRecord], added: KeyRecord) -> Sequence[KeyRecord]:
    """Raises ConfigError when the name is taken."""
    if any(record.name == added.name for record in records):
        raise ConfigError(f"there is a key named {added.name!r}: remove it first, or take another")
    return [*records, added]


def without_key(records: Sequence[KeyRecord], name: str) -> Sequence[KeyRecord]:
    """Raises ConfigError when there is none of that name."""
    kept = [record for record in records if record.name != name]
    if len(kept) == len(records):
        known = ", ".join(record.name for record in records[:20]) or "none at all"
        raise ConfigError(f"there is no key named {name!r}; there are: {known}")
    return kept


def text_of(records: Iterable[KeyRecord]) -> str:
    """The file: TOML, with what is not the default."""
    blocks = []
    for record in records:
        said = record.model_dump(exclude_defaults=True)
        lines = [f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in said.items()]
        blocks.append("\n[[key]]\n" + "\n".join(lines) + "\n")
    return _HEAD + "".join(blocks)
