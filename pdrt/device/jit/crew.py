"""Threads that run one compiled function together, each with its number.

They wait in Python between calls, so a crew costs nothing while nothing is computed. Inside the
function they share the work without the interpreter (see `products`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[int], object]


class Crew:
    """`size` threads, the caller's own among them. One caller at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(size - 1)]
        for number, jobs in enumerate(self._jobs, 1):
            name = f"pdrt-crew-{number}"
            threading.Thread(target=_work, args=(number, jobs), name=name, daemon=True).start()

    def run(self, job: Job) -> None:
        """job(0) here; job(1).. in the others when they have a core, perhaps when it is over.

        The job sees to it that what it works on is not used again while another is in it.
        """
        for jobs in self._jobs:
            jobs.put(job)
        job(0)


def _work(number: int, jobs: SimpleQueue[Job]) -> None:
    while True:
        jobs.get()(number)
