"""Failures met in the field, by number, and which tests hold what must be here instead.

A test names its cases in its docstring ("CASES 1, 2"), a module in its own where all its tests are
of them. `python -m tests.cases` prints the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent
CASES: Final[Mapping[int, str]] = {
    # A. Hangs and lost errors.
    1: "the router waits for decode though prefill failed",
    2: "a prompt at the limit hangs until the client's timeout",
    3: "one failing request holds its partner among many",
    5: "a layout pair that cannot work is found out in a transfer",
    6: "a bootstrap lookup that fails once is never answered",
    7: "clean-up runs only when there is traffic",
    9: "KV is evicted before its send",
    10: "a lost acknowledgement leaves the pair unusable",
    11: "requests hang while instances come and go",
    13: "a retracted request waits for a room that is consumed",
    14: "each side matches by an id of its own",
    15: "the first transfers after idling fail",
    17: "writers of several ranks collide",
    18: "queueing in prefill is taken for its death",
    19: "an error does not say what failed where",
    21: "an endless loop of failed allocations",
    # B. Death, restart and readiness of peers.
    22: "decode must be restarted because prefill was",
    23: "dead prefill instances make decode unhealthy",
    25: "a wrong address is a silent local prefill",
    26: "one fault crashes the engine",
    27: "all of a side gone and back needs a router restart",
    29: "ready before a pair can serve",
    30: "a client that leaves is not noticed at some point",
    31: "draining loses what runs",
    33: "one dead worker ends its instance",
    # C. Leaks.
    34: "an abort on decode leaks KV",
    35: "an abort leaks a metadata slot",
    37: "an aborted request is run all the same",
    38: "an abort keeps the host copy of KV",
    39: "aborts use up a quota",
    41: "an abort during a copy leaks",
    42: "both sides abort and nobody reports",
    43: "decode refuses and prefill's blocks are stranded",
    45: "a prefix hit never releases its receive blocks",
    46: "decode never unpins",
    47: "a sequence is removed while a send reads it",
    49: "a peer fills the table of rooms",
    # D. Corruption and wrong output.
    50: "a late write lands in another request's KV",
    51: "several ranks write one slot",
    53: "a stale slot looks like damage",
    54: "output degrades after many requests",
    55: "a prompt over the limit is decoded from empty KV",
    57: "a failed receive is a good answer",
    58: "a prefix hit changes the number of chunks",
    59: "a chunked request restarts its prefix",
    61: "an end is overwritten by what comes later",
    # E. Parallel layout.
    62: "unequal tp is slow or crashes",
    63: "unequal tp crashes on the first request",
    65: "a retracted request goes to another dp rank",
    66: "turns of a conversation are scattered",
    # F. Memory admission and retraction.
    67: "growth of answers freezes an instance",
    69: "a full pool recomputes prompts on decode",
    70: "retraction without a copy crashes",
    71: "preemption right after a receive crashes",
    # G. Router.
    73: "load is counted too late",
    74: "one hot instance disables affinity for all",
    75: "rebalancing discards locality",
    77: "saturation opens circuits",
    78: "another model's instance is chosen",
    79: "429 when there is no instance",
    81: "a silent decode-only path",
    82: "a client's fields reach the other leg",
    83: "command line and file disagree",
    # H. API semantics across the hand-off.
    85: "one token too few",
    86: "the first token is not checked for an end",
    87: "a stream without a last chunk",
    89: "the first token's log-probability is missing",
    90: "echo crashes decode",
    93: "cached tokens are counted wrongly",
    94: "the whole answer lacks decode's first chunk",
    95: "prefill goes on for a client that left",
    97: "the first token waits for the transfer",
    # I. Health, configuration, operations.
    98: "health says nothing, or waits in line",
    99: "a canary sees one dp rank only",
    101: "healthy after a burst of cancels, and serving nobody",
    102: "a dead control path is invisible",
    103: "two roles on a host collide on a port",
    105: "a wrong NIC is found out by the first request",
    106: "a duplicate room crashes both sides",
    107: "anybody may register",
}
NOT_HERE: Final[Mapping[int, str]] = {
    39: "there is no quota of prefetched tokens that an abort could use up",
}
_NAMED: Final = re.compile(r"CASES ((?:\d+(?:, | and )?)+)")


def named(folder: Path = TESTS) -> dict[int, list[str]]:
    """Tests by the numbers that they name."""
    found: dict[int, list[str]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        for number, name in _in(file.read_text()):
            found.setdefault(number, []).append(f"{file.relative_to(folder)}: {name}")
    return found


def _in(text: str) -> Iterator[tuple[int, str]]:
    name = "all of it"
    for line in text.splitlines():
        if begun := re.match(r"(?:async )?def (test_\w+)", line):
            name = begun[1]
        for match in _NAMED.finditer(line):
            for number in re.findall(r"\d+", match[1]):
                yield int(number), name


def lines() -> Iterator[str]:
    tests = named()
    for number, title in CASES.items():
        yield f"{number}. {title}"
        held = tests.get(number) or [NOT_HERE.get(number, "no test")]
        yield from (f"     {each}" for each in dict.fromkeys(held))


if __name__ == "__main__":
    import sys

    sys.stdout.write("\n".join(lines()) + "\n")
