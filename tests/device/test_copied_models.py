"""Real models and copies of KV in host memory: the same tokens whenever a request makes way."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrt.device import torchrunner
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.modelspec import ModelSpec
from pdrt.sched.base import Scheduler
from tests.device import tiny
from tests.sched.devices import RunnerDevice
from tests.sched.fakes import Rig
from tests.sched.test_copies import LIMITS, SAMPLINGS, B, interrupted


@pytest.mark.parametrize("mirrored", [False, True], ids=["cpu", "mirrored"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_real_model_says_the_same_whenever_it_makes_way(
    tmp_path: Path, sampling: str, mirrored: bool
) -> None:
    """Float32; also with the pool of an accelerator, which is a mirror of host memory."""
    tiny.make("qwen3", tmp_path)
    loaded = torchrunner.load(
        tmp_path,
        Shard(ModelSpec.read(tmp_path)),
        device="cpu",
        dtype="float32",
        block_size=B,
        progress=lambda _stage, _done, _total: None,
    )

    def rig() -> Rig:
        runner = TorchRunner(loaded.model, loaded.layout, mirrored=mirrored)
        return Rig(Scheduler(LIMITS, 12, ()), RunnerDevice(runner, 12, LIMITS.host_blocks))

    want = interrupted(rig(), "local", -1, SAMPLINGS[sampling])
    for how, step in (("copy", 1), ("copy", 2), ("copy", 7), ("local", 5)):
        assert interrupted(rig(), how, step, SAMPLINGS[sampling]) == want, (how, step)
