"""A real model on torch: loads it, binds the KV pool, runs each mixed batch in one forward.

Verified on the CPU. cuda and npu run the same code over a mirrored pool and are unverified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pdrt.device import odds, sampler
from pdrt.device.allocator import keep_freed
from pdrt.device.batch import Drawn, SeqStep
from pdrt.device.collective import Solo, join_both
from pdrt.device.compiler import open_vocabulary
from pdrt.device.context import Asked, Groups, SharedPool, compute, places
from pdrt.device.grammars import Grammars, no_vocabulary
from pdrt.device.kv import DTYPES
from pdrt.device.mirror import Mirror
from pdrt.device.models import registry
from pdrt.device.models.looped import not_compiled
from pdrt.device.models.registry import Model
from pdrt.device.places import Rendezvous
from pdrt.device.shard import Shard
from pdrt.device.slices import Context
from pdrt.device.weights import Progress
from pdrt.errors import ConfigError
from pdrt.messages import Grammar, KvLayout
from pdrt.modelspec import Dtype, Kernels, ModelSpec, Quantize

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_ALONE: Final = Context()


class TorchRunner:
    """Implements Runner. `mirrored` keeps a pool of its own beside the bound memory."""

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        device: str = "cpu",
        *,
        mirrored: bool = False,
        context: Context = _ALONE,
        open_vocabulary: Callable[[], LLTokenizer] = no_vocabulary,
    ) -> None:
        self.layout = layout
        self.eos_token_ids = model.spec.eos_token_ids
        self.vocab = model.spec.vocab
        self._shard, self._context = model.shard, context
        self._groups = Groups(Solo(), Solo()) if self._place == (0, 1) else None
        self.model = model
        self._device, self._mirrored = device, mirrored
        self._pool: SharedPool | None = None
        self._mirror: Mirror | None = None
        self._grammars = Grammars(open_vocabulary, model.spec.vocab)

    @torch.inference_mode()
    def bind(self, pool: memoryview, blocks: int) -> None:
        self._pool = SharedPool(pool, blocks, self.layout, self._device, mirrored=self._mirrored)
        self._mirror = Mirror(self._pool) if self._mirrored else None

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        tp, cp = self._shard.size, self._context.size
        self._groups = Groups(*join_both(self._place[0], tp, cp, rendezvous, timeout_s))

    def prepare(self, grammar: Grammar | None) -> None:
        self._grammars.prepare(grammar)

    @property
    def _place(self) -> tuple[int, int]:
        return places(self._shard, self._context)

    @torch.inference_mode()
    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        if not batch:
            return []
        if self._pool is None or self._groups is None:
            raise RuntimeError("bind and, in a group, join come before execute")
        if self._mirror:
            self._mirror.before(batch)
        with threads_restored():
            torch.set_num_threads(1)  # for a few blocks; a shared call would keep the others awake
            _prepare(batch, self._pool)
        with threads_restored():
            drawn = self._forward(batch, self._pool, self._groups)
        if self._mirror:
            self._mirror.after(batch)
        return drawn

    def _forward(self, batch: Sequence[SeqStep], pool: SharedPool, groups: Groups) -> list[Drawn]:
        asked = compute(self.model, batch, pool, groups)
        return self._answer(batch, asked, groups) if self._context.is_first else []

    def _answer(self, batch: Sequence[SeqStep], asked: Asked, groups: Groups) -> list[Drawn]:
        """What the ranks with the first share of the rows make of them."""
        group = groups.tensor
        wanted = [step for step in batch if step.draw is not None]
        logits = self.model.logits(asked.drawn, group) if wanted else None
        drawn = []
        if logits is not None:
            drawn = sampler.answer(logits.cpu(), wanted, grammars=self._grammars)
        if all(step.scoring is None for step in batch):
            return drawn
        rows, vocab = asked.scored, self.model.spec.vocab
        scored = odds.score(batch, rows, vocab, lambda part: self.model.logits(part, group))
        return odds.joined(batch, drawn, scored) if self._shard.is_first else []


@contextmanager
def threads_restored() -> Iterator[None]:
    """Torch has as many threads after it as before; a model may have reason to take fewer."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _prepare(batch: Sequence[SeqStep], pool: SharedPool) -> None:
    """Blocks that begin as copies of others, or that a step leaves partly empty."""
    size = pool.block_size
    copied = [step for step in batch if step.copy_from >= 0]
    if copied:
        targets = [step.blocks[step.start // size] for step in copied]
        pool.copy([step.copy_from for step in copied], targets)
    fresh = [b for step in batch for b in _begun_in_part(step, size)]
    if fresh:
        pool.clear(fresh)


def _begun_in_part(step: SeqStep, size: int) -> Sequence[int]:
    """The block that this step begins and leaves partly empty, if there is one."""
    last, used = divmod(step.start + len(step.tokens), size)
    begins_here = used and last * size >= step.start
    return [step.blocks[last]] if begins_here else []


def load(  # noqa: PLR0913 - each is a choice of its own
    path: str | Path,
    shard: Shard,
    *,
    device: str,
    dtype: str,
    block_size: int,
    progress: Progress,
    context: Context = _ALONE,
    kernels: Kernels = "auto",
    quantize: Quantize = "none",
) -> TorchRunner:
    """A runner with its weights. Raises ConfigError when they, or the device, are not there."""
    _check_device(device)
    name = _dtype(shard.spec, dtype)
    if context.size > 1:
        not_compiled(kernels, "context-parallel ranks exchange KV within a layer")
        kernels = "torch"
    if device == "cpu":
        keep_freed()
    with torch.inference_mode():
        model = registry.load(Path(path), shard, DTYPES[name], device, progress, kernels, quantize)
    layout = replace(model.shard.layout(block_size, name), quantize=quantize)
    spec = model.spec
    return TorchRunner(
        model,
        layout,
        device,
        mirrored=device != "cpu",
        context=context,
        open_vocabulary=partial(open_vocabulary, str(path), spec.vocab, spec.eos_token_ids),
    )


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
