"""Threads that run one compiled function together, each with its number.

They wait in Python between calls, so a crew costs nothing while nothing is computed. Inside the
function they share the work without the interpreter (see `products`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[int], object]


class Crew:
    """`size` threads, the caller's own among them. One caller at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(size - 1)]
        self._failures: SimpleQueue[Exception] = SimpleQueue()
        for number, jobs in enumerate(self._jobs, 1):
            name, args = f"pdrt-crew-{number}", (number, jobs, self._failures)
            threading.Thread(target=_work, args=args, name=name, daemon=True).start()

    def run(self, job: Job) -> None:
        """job(0) here; job(1).. in the others when they have a core, perhaps when it is over.

        The job sees to it that what it works on is not used again while another is in it. Raises
        what one of the others met in an earlier job.
        """
        with contextlib.suppress(Empty):
            raise self._failures.get_nowait()
        for jobs in self._jobs:
            with contextlib.suppress(Empty):
                jobs.get_nowait()  # what it did not come to is over
            jobs.put(job)
        job(0)


def _work(number: int, jobs: SimpleQueue[Job], failures: SimpleQueue[Exception]) -> None:
    while True:
        job = jobs.get()
        try:
            job(number)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            failures.put(error)
        del job  # and the results that it would keep
