"""What every model family offers to the runner, and which module loads which model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pdrt.device.attention import Wave
from pdrt.device.batch import SeqStep
from pdrt.device.collective import Collective
from pdrt.device.kv import KvPool
from pdrt.device.models.looped import not_compiled
from pdrt.device.shard import Shard
from pdrt.device.weights import Checkpoint, Progress
from pdrt.modelspec import Kernels, ModelSpec, Quantize


class Model(Protocol):
    """A rank's shard of a model. All ranks of a group make the same calls in the same order."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def shard(self) -> Shard: ...

    def lay_out(self, batch: Sequence[SeqStep], pool: KvPool) -> Wave:
        """Rows, index tensors and masks of a batch of at least one step."""
        ...

    def forward(self, wave: Wave, pool: KvPool, group: Collective) -> Tensor:
        """Write the wave's KV; hidden states [rows, hidden] of its tokens, on every rank."""
        ...

    def logits(self, hidden: Tensor, group: Collective) -> Tensor | None:
        """[rows, vocab] in float32 for rows of hidden states, on the first rank alone."""
        ...


def load(  # noqa: PLR0913 - each is a choice of its own
    path: Path,
    shard: Shard,
    dtype: torch.dtype,
    device: str,
    progress: Progress,
    kernels: Kernels = "auto",
    quantize: Quantize = "none",
) -> Model:
    """The model in a directory. Raises ConfigError when its weights do not fit its spec.

    A family's module is imported only when it is used.
    """
    shard.spec.check_quantize(quantize)
    if shard.spec.backend == "transformers":
        from pdrt.device.models import foreign

        not_compiled(kernels, "transformers computes this model")
        return foreign.load(path, shard, dtype, device, progress)
    if shard.spec.latent is not None:
        from pdrt.device.models import mla

        not_compiled(kernels, "latent attention is not compiled")
        return mla.load(shard, Checkpoint(path, progress), dtype, device)
    from pdrt.device.models import llama

    return llama.load(shard, Checkpoint(path, progress), dtype, device, kernels, quantize)
