"""What all tests share: no event loop is left behind, no setting leaks in from outside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# A test is about what holds, not about how busy the machine is; pytest's limit bounds it.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside() -> Iterator[None]:
    """PDRT_* of the developer's shell must not change what a test sees."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PDRT_")}
    yield
    os.environ.update(kept)


@pytest.fixture(autouse=True, scope="session")
def _no_logger_keeps_its_settings() -> Iterator[None]:
    """Loggers that were once used would otherwise go on as some earlier test configured them."""
    configure = structlog.configure
    structlog.configure = lambda **said: configure(**said | {"cache_logger_on_first_use": False})
    yield
    structlog.configure = configure


@pytest.fixture(autouse=True)
def _no_log_settings_left_behind() -> Iterator[None]:
    """A command that a test runs in this process says how to log, to a stderr that is gone."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()


@pytest.fixture(autouse=True)
def _no_loop_left_behind() -> Iterator[None]:
    """pytest-asyncio leaves a loop set that nobody closes; some later test would fail for it."""
    yield
    asyncio.set_event_loop(None)
