"""What device tests share: one thread, tiny models made once a module, ranks in processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.device import ranks, tiny
from tests.device.ranks import Ranks
from tests.device.tiny import Tiny

SHARDED = "qwen3"  # its weights are in several files


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    @functools.cache
    def make(name: str) -> Tiny:
        directory = tmp_path_factory.mktemp(name)
        saving = {"max_shard_size": "100KB"} if name == SHARDED else {}
        return directory, tiny.make(name, directory, **saving)

    return make


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[[str], Tiny]) -> Callable[[str], str]:
    """For processes; the null device needs no model."""
    return lambda name: name if name == "null" else str(tiny_model(name)[0])


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks.started(tmp_path_factory.mktemp("groups")) as found:
        yield found
