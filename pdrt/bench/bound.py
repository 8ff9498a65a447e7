"""Runs a program on the named cores only: `python -m pdrt.bench.bound 0,1 PROGRAM ...`.

Whatever the program starts stays on them too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence


def bound(cores: Collection[int], program: Sequence[str]) -> list[str]:
    """The command line for that."""
    names = ",".join(map(str, sorted(cores)))
    return [sys.executable, "-m", "pdrt.bench.bound", names, *program]


def main(arguments: Sequence[str]) -> None:
    cores, *program = arguments
    os.sched_setaffinity(0, set(map(int, cores.split(","))))
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
