"""What the command line asks for becomes a plan, or an error that says what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdrt.bench.cases import TRANSPORTS, Case, Wanted, check_files, size_text, wanted
from pdrt.errors import ConfigError

USUAL: dict[str, Any] = {
    "sizes": "4K..64M",
    "batch": "1,64",
    "transport": "all",
    "rounds": 7,
    "seconds": 60.0,
    "pool": "512M",
}


def asked(**other: Any) -> Wanted:
    return wanted(**{**USUAL, **other})


def test_the_usual_plan_is_the_one_of_the_manual() -> None:
    plan = asked()
    assert plan.sizes == tuple(4096 << n for n in range(15))
    assert plan.sizes[-1] == 64 << 20
    assert plan.batches == (1, 64)
    assert plan.transports == TRANSPORTS
    assert len(list(plan.cases())) == 30


def test_a_batch_is_never_more_than_the_pool_holds() -> None:
    plan = asked(sizes="64M", batch="1,8,64", pool="512M")
    assert list(plan.cases()) == [Case(64 << 20, 1), Case(64 << 20, 8)]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", (4096,)),
        ("4K,1MiB,8kb", (4096, 8192, 1 << 20)),
        ("4k..16k", (4096, 8192, 16384)),
        ("4K..10K", (4096, 8192)),
        ("1M, 4K..8K", (4096, 8192, 1 << 20)),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, sizes: tuple[int, ...]) -> None:
    assert asked(sizes=text).sizes == sizes


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"sizes": "many"}, "64K, 1M or 4K..64M"),
        ({"sizes": ""}, "64K, 1M or 4K..64M"),
        ({"sizes": "8K..4K"}, "64K, 1M or 4K..64M"),
        ({"sizes": "100"}, "1K to half the pool"),
        ({"sizes": "1G"}, "half the pool (512 MiB"),
        ({"batch": "0"}, "1 to 4096"),
        ({"batch": "one"}, "1 to 4096"),
        ({"batch": ""}, "1 to 4096"),
        ({"transport": "pigeon"}, "shm, tcp, nixl, mooncake, memfabric"),
        ({"transport": "shm,pigeon"}, "shm, tcp, nixl, mooncake, memfabric"),
        ({"transport": ""}, "all, or some of"),
        ({"rounds": 0}, "1 to 1000"),
        ({"seconds": 0.0}, "more than 0"),
        ({"seconds": 1e9}, "at most 3600"),
        ({"pool": "1K"}, "at least 64K"),
        ({"pool": "x"}, "--pool"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_is_allowed(
    other: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as told:
        asked(**other)
    assert says in str(told.value)


def test_files_that_could_not_be_written_are_refused_beforehand(tmp_path: Path) -> None:
    check_files(str(tmp_path / "x.json"), str(tmp_path / "x.svg"))
    check_files("", "")
    with pytest.raises(ConfigError, match="no directory"):
        check_files("/nowhere/x.json", "")
    with pytest.raises(ConfigError, match=r"\.png, \.svg"):
        check_files("", str(tmp_path / "x.txt"))


def test_sizes_are_shown_in_the_largest_whole_unit() -> None:
    assert [size_text(n) for n in (100, 4096, 1 << 20, 3 << 30)] == [
        "100 B",
        "4 KiB",
        "1 MiB",
        "3 GiB",
    ]
