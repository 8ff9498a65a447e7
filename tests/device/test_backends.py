"""A config opens the device it asks for, or is refused with what is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from pdrt.config import NodeConfig
from pdrt.device.backends import device_kind, open_runner
from pdrt.device.null import NullRunner
from pdrt.errors import ConfigError
from tests.device import tiny


def config(**tables: dict[str, object]) -> NodeConfig:
    return NodeConfig.model_validate(tables)


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize(
    ("path", "kind", "opens"),
    [
        ("null", "auto", "null"),
        ("null", "null", "null"),
        ("/models/some", "auto", "cpu"),
        ("/models/some", "cpu", "cpu"),
        ("/models/some", "cuda", "cuda"),
        ("null", "cpu", None),
        ("/models/some", "null", None),
    ],
)
def test_model_and_device_must_fit(path: str, kind: str, opens: str | None) -> None:
    asked = config(model={"path": path}, device={"kind": kind})
    if opens is not None:
        assert device_kind(asked) == opens
        return
    with pytest.raises(ConfigError, match="go together"):
        device_kind(asked)


def test_the_null_device_takes_its_times_and_block_size_from_the_config() -> None:
    runner = open_runner(
        config(model={"path": "null"}, scheduler={"block_size": 8}, device={"step_ms": 3}), quiet
    )
    assert isinstance(runner, NullRunner)
    assert runner.layout.block_size == 8
    assert runner.layout.block_bytes == 8 * 64


def test_a_directory_opens_on_the_cpu_and_tells_its_progress(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    told = list[tuple[str, int, int]]()
    runner = open_runner(
        config(model={"path": str(tmp_path), "dtype": "bfloat16"}, device={"threads": 1}),
        lambda *step: told.append(step),
    )
    assert runner.layout.dtype == "bfloat16"
    assert runner.eos_token_ids == {7}
    assert told[-1][1] == told[-1][2] > 0
    assert torch.get_num_threads() == 1


def test_a_missing_model_is_refused_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"\[model\] path: .*'/nowhere/config.json'"):
        open_runner(config(model={"path": "/nowhere"}), quiet)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_refused(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    with pytest.raises(ConfigError, match="no CUDA device"):
        open_runner(config(model={"path": str(tmp_path)}, device={"kind": "cuda"}), quiet)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="there is torch-npu")
def test_npu_that_is_not_installed_is_refused_with_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="pip install torch-npu"):
        open_runner(config(device={"kind": "npu"}), quiet)
