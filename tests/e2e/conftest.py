"""Each module starts its own cluster, once; every test of it talks to that."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.e2e.cluster import Cluster


@pytest.fixture
async def cluster(started: Cluster) -> AsyncIterator[Cluster]:
    async with started.session() as ready:
        yield ready
