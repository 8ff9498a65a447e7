"""What only start-up needed is given back: a worker holds its model, its KV and little else.

Loading libraries touches most of their pages once: of torch's that is 75 MB of relocation tables
and of constructors that register operators, of a compiler's 85 MB more. They are clean copies
of files; the kernel would take them when memory runs short, but until then they count as ours, and
whoever sizes a machine by what its processes hold is misled. Pages that are needed after all come
back from the page cache at the next touch (26 MB do with the first steps), at no cost one can
measure in a step.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PRIMITIVES: Final = "8"
_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and ideep's
_DONTNEED: Final = 4  # MADV_DONTNEED of Linux
_HEADER: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")
_LIBRARY: Final = re.compile(r"/.*\.so(\.[0-9]+)*")


def limit_caches(environ: MutableMapping[str, str]) -> None:
    """Before torch is loaded: of its compiled products only the last ones used are kept.

    oneDNN compiles one for each number of rows and each shape of weights and keeps 1,024, as does
    torch's layer on top. With prompts of all lengths that was 2.3 MB more in each step of a
    100M model. 8 are those of one number of rows, for a decode batch that stays as it is from step
    to step; compiling one takes half a millisecond, and a step of bfloat16 needs five.
    """
    for name in _CACHES:
        environ.setdefault(name, _PRIMITIVES)


@dataclass(slots=True)
class Mapping:
    """One of a process, as Linux tells of it."""

    start: int
    end: int
    access: str
    path: str
    private_bytes: int = 0  # written by us, in memory or swapped out

    @property
    def is_spare(self) -> bool:
        """Whether all of it can be read from its file again, whenever it is touched.

        Pages that the loader relocated cannot, though they are read only by now. Of files only
        libraries are looked at: they stay mapped, so that nothing else can have taken their
        place since the mapping was read.
        """
        is_private_copy = self.access.endswith("p") and "w" not in self.access
        is_library = _LIBRARY.fullmatch(self.path) is not None
        return is_private_copy and is_library and not self.private_bytes


def mappings(lines: Iterable[str]) -> Iterator[Mapping]:
    """From the lines of /proc/PID/smaps."""
    found: Mapping | None = None
    for line in lines:
        if header := _HEADER.match(line):
            if found is not None:
                yield found
            start, end, access, path = header.groups()
            found = Mapping(int(start, 16), int(end, 16), access, path)
        elif found is not None and line.startswith(("Anonymous:", "Swap:")):
            found.private_bytes += int(line.split()[1]) * 1024
    if found is not None:
        yield found


def trim() -> None:
    """To the system what malloc has kept of freed memory: 0.1 ms, or 10 ms when it is 80 MB.

    Activations of steps of all sizes lie between products that live longer, so that little of
    what is freed is at the end of a heap, from where malloc would give it back itself.
    """
    if trim_all := getattr(ctypes.CDLL(None), "malloc_trim", None):  # not every libc has it
        trim_all(0)


def give_back() -> None:
    """To the system: all of it that only start-up needed. Libraries' pages only on Linux."""
    trim()
    libc, smaps = ctypes.CDLL(None), Path("/proc/self/smaps")
    if not smaps.exists():
        return
    for each in list(mappings(smaps.read_text().splitlines())):
        if each.is_spare:
            size = ctypes.c_size_t(each.end - each.start)
            libc.madvise(ctypes.c_void_p(each.start), size, _DONTNEED)  # a refusal costs nothing
