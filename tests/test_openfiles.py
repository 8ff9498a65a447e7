"""A process takes all the descriptors that it may have."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
from pdrt.openfiles import allow_all
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
allow_all()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=20)
