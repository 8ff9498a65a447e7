"""A real model on torch: loads it, binds the KV pool, runs each mixed batch in one forward.

Verified on the CPU. cuda and npu run the same code over a mirrored pool and are unverified.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pdrt.device import odds, sampler
from pdrt.device.batch import Drawn, SeqStep
from pdrt.device.collective import Collective, Solo, join
from pdrt.device.kv import DTYPES, KvPool
from pdrt.device.mirror import Mirror
from pdrt.device.models import registry
from pdrt.device.models.registry import Model
from pdrt.device.places import Rendezvous
from pdrt.device.shard import Shard
from pdrt.device.weights import Progress
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout
from pdrt.modelspec import Dtype, ModelSpec


class TorchRunner:
    """Implements Runner. `mirrored` keeps a pool of its own beside the bound memory."""

    def __init__(
        self, model: Model, layout: KvLayout, device: str = "cpu", *, mirrored: bool = False
    ) -> None:
        self.layout = layout
        self.eos_token_ids = model.spec.eos_token_ids
        self._shard = model.shard
        self._group: Collective | None = Solo() if model.shard.size == 1 else None
        self.model = model
        self._device, self._mirrored = device, mirrored
        self._pool: KvPool | None = None
        self._mirror: Mirror | None = None

    @torch.inference_mode()
    def bind(self, pool: memoryview, blocks: int) -> None:
        self._pool = KvPool(pool, blocks, self.layout, self._device, mirrored=self._mirrored)
        self._mirror = Mirror(self._pool) if self._mirrored else None

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._group = join(self._shard.rank, self._shard.size, rendezvous, timeout_s)

    @torch.inference_mode()
    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        if not batch:
            return []
        if self._pool is None or self._group is None:
            raise RuntimeError("bind and, in a group, join come before execute")
        if self._mirror:
            self._mirror.before(batch)
        drawn = self._forward(batch, self._pool, self._group)
        if self._mirror:
            self._mirror.after(batch)
        return drawn

    def _forward(self, batch: Sequence[SeqStep], pool: KvPool, group: Collective) -> list[Drawn]:
        copied = [step for step in batch if step.copy_from >= 0]
        if copied:
            targets = [step.blocks[step.start // self.layout.block_size] for step in copied]
            pool.copy([step.copy_from for step in copied], targets)
        fresh = [b for step in batch for b in _begun_in_part(step, self.layout.block_size)]
        if fresh:
            pool.clear(fresh)
        wave = self.model.lay_out(batch, pool)
        hidden = self.model.forward(wave, pool, group)
        wanted = [step for step in batch if step.draw is not None]
        logits = self.model.logits(hidden[wave.drawn], group) if wanted else None
        drawn = [] if logits is None else sampler.answer(logits.cpu(), wanted)
        if all(step.scoring is None for step in batch):
            return drawn
        rows, vocab = hidden[wave.scored], self.model.spec.vocab
        scored = odds.score(batch, rows, vocab, lambda part: self.model.logits(part, group))
        return odds.joined(batch, drawn, scored) if self._shard.is_first else []


def _begun_in_part(step: SeqStep, size: int) -> Sequence[int]:
    """The block that this step begins and leaves partly empty, if there is one."""
    last, used = divmod(step.start + len(step.tokens), size)
    begins_here = used and last * size >= step.start
    return [step.blocks[last]] if begins_here else []


def load(
    path: str | Path,
    shard: Shard,
    *,
    device: str,
    dtype: str,
    block_size: int,
    progress: Progress,
) -> TorchRunner:
    """A runner with its weights. Raises ConfigError when they, or the device, are not there."""
    _check_device(device)
    name = _dtype(shard.spec, dtype)
    with torch.inference_mode():
        model = registry.load(Path(path), shard, DTYPES[name], device, progress)
    layout = model.shard.layout(block_size, name)
    return TorchRunner(model, layout, device, mirrored=device != "cpu")


def _dtype(spec: ModelSpec, asked: str) -> Dtype:
    """`auto` is the checkpoint's own; float16 becomes float32, which holds all its values."""
    match asked if asked != "auto" else spec.dtype:
        case "bfloat16":
            return "bfloat16"
        case "float32" | "float16":
            return "float32"
        case other:
            raise ConfigError(f"[model] dtype = {other!r}: must be auto, float32 or bfloat16")


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("[device] kind = 'cuda': torch finds no CUDA device")
    if device == "npu":
        import torch_npu

        if not torch_npu.npu.is_available():
            raise ConfigError("[device] kind = 'npu': torch_npu finds no NPU")
