"""What all tests share: no event loop is left behind, no setting leaks in from outside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside() -> Iterator[None]:
    """PDRT_* of the developer's shell must not change what a test sees."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PDRT_")}
    yield
    os.environ.update(kept)


@pytest.fixture(autouse=True)
def _no_loop_left_behind() -> Iterator[None]:
    """pytest-asyncio leaves a loop set that nobody closes; some later test would fail for it."""
    yield
    asyncio.set_event_loop(None)
