"""Which pages a worker gives back, and that whatever it gave is there when it is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdrt import footprint

SMAPS = """\
7f0000000000-7f0000400000 r-xp 00000000 fd:00 123                        /usr/lib/libbig.so.1.2
Rss:                4096 kB
Anonymous:             {written} kB
Swap:                  {swapped} kB
VmFlags: rd ex mr mw me
7f0000400000-7f0000500000 rw-p 00400000 fd:00 123                        /usr/lib/libbig.so.1.2
Rss:                1024 kB
Anonymous:             0 kB
Swap:                  0 kB
7f0000600000-7f0000700000 r--p 00000000 fd:00 124                        /models/model.safetensors
Anonymous:             0 kB
Swap:                  0 kB
7f0000800000-7f0000900000 r--s 00000000 fd:00 125                        /usr/lib/libshared.so
Anonymous:             0 kB
7f0000a00000-7f0000b00000 r--p 00000000 00:00 0
Anonymous:             0 kB
"""


def spare(written: int = 0, swapped: int = 0) -> list[int]:
    lines = SMAPS.format(written=written, swapped=swapped).splitlines()
    return [each.start for each in footprint.mappings(lines) if each.is_spare]


def test_read_only_pages_of_libraries_are_given_back_and_nothing_else() -> None:
    assert spare() == [0x7F0000000000]


def test_what_the_loader_wrote_is_kept_though_it_may_have_been_swapped_out_since() -> None:
    assert not spare(written=4)
    assert not spare(swapped=4)


def test_a_cache_that_somebody_has_sized_keeps_that_size() -> None:
    environ = {"LRU_CACHE_CAPACITY": "5"}
    footprint.limit_caches(environ)
    assert environ == {"LRU_CACHE_CAPACITY": "5", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}


def library_pages() -> int:
    """Of files, in kB."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssFile:")
    )
    return int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_libraries_work_after_their_pages_were_given_back() -> None:
    import numpy as np

    matrix = np.arange(9.0).reshape(3, 3)
    before, expected = library_pages(), matrix @ matrix
    footprint.give_back()
    assert library_pages() < before / 2
    assert ((matrix @ matrix) == expected).all()
