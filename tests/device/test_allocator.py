"""What was freed is used again: no page is touched for the first time twice."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from pdrt.device.allocator import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(12 << 20, dtype=torch.uint8).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed()
faults()
print(faults())
"""


def faults_when(kept: str) -> int:
    command = [sys.executable, "-c", FAULTS, kept]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's setting")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults_when("kept") < 100  # of 3,072 pages
