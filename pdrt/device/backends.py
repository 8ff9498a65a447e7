"""From the config to a device with its model, or a ConfigError that says what is not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal, TypeAlias

from pdrt.config import NodeConfig
from pdrt.device.batch import Runner
from pdrt.device.cores import threads_of
from pdrt.device.null import NullRunner
from pdrt.device.shard import Shard
from pdrt.device.slices import Context
from pdrt.errors import ConfigError
from pdrt.modelspec import NULL_PATH, NULL_SPEC, ModelSpec

Progress: TypeAlias = Callable[[str, int, int], None]  # stage, done, total
Retraction: TypeAlias = Literal["copy", "reprefill", "local"]
Kind: TypeAlias = Literal["cpu", "cuda", "npu", "null"]


def open_runner(config: NodeConfig, progress: Progress, rank: int = 0, size: int = 1) -> Runner:
    """A runner with its weights loaded, still without a pool. Takes seconds to minutes.

    It is number `rank` of a group of `size` ranks, `[parallel] cp` x tp with tp varying fastest;
    above 1, `join` comes next. `[model] path` must be a directory here, or `null`. Raises
    ConfigError.
    """
    kind, tp = device_kind(config), _tp_of(config, size)
    context = Context(rank // tp, size // tp)
    if kind == "null":
        device = config.device
        shard = Shard(NULL_SPEC, rank % tp, tp)
        block_size = config.scheduler.block_size
        times = device.step_ms, device.token_ms
        return NullRunner(block_size, *times, shard=shard, context=context)
    shard = Shard(ModelSpec.of(config.model), rank % tp, tp)
    import torch  # here, so that the null device needs none

    from pdrt.device import torchrunner

    torch.set_num_threads(threads_of(config))
    return torchrunner.load(
        config.model.path,
        shard,
        device=kind,
        dtype=config.model.dtype,
        block_size=config.scheduler.block_size,
        progress=progress,
        context=context,
        kernels=config.device.kernels,
        quantize=config.model.quantize,
    )


def _tp_of(config: NodeConfig, size: int) -> int:
    """Ranks of the group that share one context; who opens a runner alone has no group."""
    return max(1, size // config.parallel.cp)


def device_kind(config: NodeConfig) -> Kind:
    """What `auto` means here. Raises ConfigError where model and device do not fit together.

    `auto` never takes an accelerator: cuda and npu are unverified and must be asked for.
    """
    kind, path = config.device.kind, config.model.path
    if (path == NULL_PATH) != (kind == "null") and kind != "auto":
        raise ConfigError(
            f"[device] kind = {kind!r} with [model] path = {path!r}:"
            " the null device and the null model go together"
        )
    if kind == "auto":
        return "null" if path == NULL_PATH else "cpu"
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            "[device] kind = 'npu': torch-npu is not installed: pip install torch-npu"
        )
    return kind


def retraction_of(config: NodeConfig) -> Retraction:
    """What `auto` means here: on a CPU copies would only take memory that KV could have."""
    asked = config.scheduler.retraction
    if asked != "auto":
        return asked
    return "copy" if device_kind(config) in ("cuda", "npu") else "reprefill"
