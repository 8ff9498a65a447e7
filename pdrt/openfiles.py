"""As many open files as this process may have: each peer costs a worker several descriptors."""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_all() -> None:
    """Raise the soft limit, often 1024 for the sake of `select`, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # a sandbox may forbid it: then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
