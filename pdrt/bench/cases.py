"""What `pdrt bench transfer` is asked to measure: block sizes, batches, transports, rounds.

Pure: text from the command line in, a plan out, or a ConfigError that says what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from pdrt.config import TransportName
from pdrt.errors import ConfigError

TRANSPORTS: Final[tuple[TransportName, ...]] = ("shm", "tcp", "nixl", "mooncake", "memfabric")
PICTURES: Final = (".png", ".svg", ".pdf")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST: Final = 1 << 10
_PAGE: Final = 4096
_MOST_BATCH: Final = 4096
_MOST_ROUNDS: Final = 1000
_MOST_SECONDS: Final = 3600.0
_WANT_SIZES: Final = "want sizes such as 64K, 1M or 4K..64M (by powers of two), comma-separated"


@dataclass(frozen=True, slots=True)
class Case:
    """So many blocks of such a size go in one write."""

    block_bytes: int
    batch: int

    def __str__(self) -> str:
        return f"{self.batch} x {size_text(self.block_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A whole run. `turn_s` is how long one way is measured in one round, at least one batch."""

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    transports: tuple[TransportName, ...]
    rounds: int
    seconds: float
    pool_bytes: int

    def cases(self) -> Iterator[Case]:
        """Where a batch is more than the pool holds, it is all of the pool."""
        seen = set[Case]()
        for batch in self.batches:
            for size in self.sizes:
                case = Case(size, min(batch, self.pool_bytes // size))
                if case not in seen:
                    seen.add(case)
                    yield case

    def turn_s(self, ways: int) -> float:
        return self.seconds / (sum(1 for _ in self.cases()) * self.rounds * max(1, ways))


def wanted(
    sizes: str, batch: str, transport: str, rounds: int, seconds: float, pool: str
) -> Wanted:
    """Raises ConfigError that names the option and what is allowed."""
    pool_bytes = _size(pool, "--pool")
    if pool_bytes < 16 * _PAGE or pool_bytes % _PAGE:
        raise ConfigError(f"--pool {pool}: want whole pages of 4K, at least 64K")
    if not 1 <= rounds <= _MOST_ROUNDS:
        raise ConfigError(f"--rounds {rounds}: want 1 to {_MOST_ROUNDS}")
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigError(f"--seconds {seconds:g}: want more than 0, at most {_MOST_SECONDS:g}")
    return Wanted(
        sizes=_sizes(sizes, pool_bytes),
        batches=_batches(batch),
        transports=_transports(transport),
        rounds=rounds,
        seconds=seconds,
        pool_bytes=pool_bytes,
    )


def check_files(json_file: str, plot: str) -> None:
    """That they can be written when all is measured. Raises ConfigError."""
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file and not Path(file).resolve().parent.is_dir():
            raise ConfigError(f"{option} {file}: there is no directory {Path(file).parent}")
        if file and Path(file).is_dir():
            raise ConfigError(f"{option} {file} is a directory")
    if plot and Path(plot).suffix not in PICTURES:
        raise ConfigError(f"--plot {plot}: want a name that ends in {', '.join(PICTURES)}")


def size_text(size: int) -> str:
    """4096 as 4 KiB."""
    for unit, name in (((1 << 30), "GiB"), ((1 << 20), "MiB"), ((1 << 10), "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _sizes(text: str, pool_bytes: int) -> tuple[int, ...]:
    found = set[int]()
    for part in _parts(text):
        first, dots, last = part.partition("..")
        size, end = _size(first, "--sizes"), _size(last if dots else first, "--sizes")
        if end < size:
            raise ConfigError(f"--sizes {part}: {_WANT_SIZES}")
        while size <= end:
            found.add(size)
            size *= 2
    if not found:
        raise ConfigError(f"--sizes {text!r}: {_WANT_SIZES}")
    for size in found:
        if size < _LEAST or size > pool_bytes // 2 or size % 64:
            raise ConfigError(
                f"--sizes: {size_text(size)}: want 1K to half the pool ({size_text(pool_bytes)},"
                " see --pool)"
            )
    return tuple(sorted(found))


def _size(text: str, option: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"{option} {text!r}: {_WANT_SIZES}")
    return int(match[1]) * _UNITS[match[2].upper()]


def _batches(text: str) -> tuple[int, ...]:
    parts = _parts(text)
    if not parts or not all(p.isdecimal() and 1 <= int(p) <= _MOST_BATCH for p in parts):
        raise ConfigError(f"--batch {text!r}: want numbers from 1 to {_MOST_BATCH}, such as 1,64")
    return tuple(sorted({int(part) for part in parts}))


def _transports(text: str) -> tuple[TransportName, ...]:
    asked = _parts(text)
    names = [name for name in TRANSPORTS if name in asked or asked == ["all"]]
    if not names or (asked != ["all"] and len(names) < len(set(asked))):
        raise ConfigError(f"--transport {text!r}: want all, or some of {', '.join(TRANSPORTS)}")
    return tuple(names)


def _parts(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


assert set(TRANSPORTS) == set(get_args(TransportName))
