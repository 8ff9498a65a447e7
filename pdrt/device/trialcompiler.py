"""A process that compiles grammars, to see whether they can be: it may be ended, a thread may not.

A line of JSON in, a line out: first one when the model's tokens are read, then one a grammar. It
ends with its standard input, or when a grammar takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Final

import setproctitle

from pdrt.device.compiler import compiled, open_vocabulary
from pdrt.errors import BadRequest
from pdrt.messages import Grammar

MEMORY_BYTES: Final = 512 << 20  # for grammars, beside the model's tokens


def main(path: str, vocab: str, eos: str, within_s: str) -> None:
    """Arguments are as on the command line; `eos` is separated by commas."""
    setproctitle.setproctitle("pdrt grammars")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader decides when we end
    try:
        vocabulary = open_vocabulary(path, int(vocab), [int(token) for token in eos.split(",")])
    except BadRequest as error:
        _say(str(error))
        return
    _limit_memory()
    _say("")
    for line in sys.stdin:
        signal.alarm(int(within_s))  # the default action ends us, also in the library's code
        try:
            compiled(Grammar(**json.loads(line)), vocabulary)
        except BadRequest as error:
            _say(str(error))
        else:
            _say("")
        signal.alarm(0)


def _limit_memory() -> None:
    """What is over it fails to be allocated, and ends the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _say(problem: str) -> None:
    sys.stdout.write(json.dumps({"problem": problem}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
