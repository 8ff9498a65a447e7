"""A foreign model must say over the paged pool what its plain forward pass says.

Models differ in ways that no config tells. So a random prompt is run in two chunks beside
another sequence, and the last logits are compared with those of the model's own attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from pdrt.device.attention import Wave
from pdrt.device.batch import SeqStep
from pdrt.device.collective import Collective, Solo
from pdrt.device.foreignattention import NAME
from pdrt.device.kv import KvPool
from pdrt.device.models.foreignload import refusal, refusing
from pdrt.device.shard import Shard
from pdrt.modelspec import Dtype, ModelSpec

BLOCK: Final = 8
LONG, FIRST, SHORT = 24, 13, 9  # a prompt, its first chunk, another prompt
BOUNDS: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the difference to the size


class Checked(Protocol):
    shard: Shard
    spec: ModelSpec
    model: Any

    def lay_out(self, batch: Sequence[SeqStep], pool: KvPool) -> Wave: ...

    def forward(self, wave: Wave, pool: KvPool, group: Collective) -> Tensor: ...

    def logits(self, hidden: Tensor, group: Collective) -> Tensor: ...


def check(model: Checked, dtype: torch.dtype, device: str) -> None:
    """Raises ConfigError with the figure when it says something else, beyond rounding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.spec.vocab, (LONG + SHORT + 1,), generator=generator).tolist()
    long, short = ids[:LONG], ids[LONG:]
    with refusing(model.spec, "it fails on a first prompt"):
        paged = _paged(model, long, short, dtype, device)
        plain = torch.cat([_plain(model.model, short)[-1:], _plain(model.model, long)[FIRST:]])
    off = (paged - plain).norm(dim=-1) / plain.norm(dim=-1)
    worst = float(off.max() if dtype == torch.float32 else off.median())  # experts may flip
    if not worst <= BOUNDS[dtype]:
        raise refusal(
            model.spec,
            f"over the paged cache its logits are {worst:.2g} of their size away from its own"
            f" forward pass; rounding explains {BOUNDS[dtype]:g}",
        )


def _paged(
    model: Checked, long: list[int], short: list[int], dtype: torch.dtype, device: str
) -> Tensor:
    """Logits of the short sequence's last token and of the long one's second chunk."""
    layout = model.shard.layout(BLOCK, _name(dtype))
    here, there = [1, 4, 2], [5, 3]
    memory = memoryview(bytearray(6 * layout.block_bytes))
    pool = KvPool(memory, 6, layout, device, mirrored=device != "cpu")
    first = [
        SeqStep(0, long[:FIRST], 0, here, None),
        SeqStep(1, short[:SHORT], 0, there, None),
    ]
    model.forward(model.lay_out(first, pool), pool, Solo())
    second = [
        SeqStep(0, long[FIRST:], FIRST, here, None),
        SeqStep(1, short[SHORT:], SHORT, there, None),
    ]
    hidden = model.forward(model.lay_out(second, pool), pool, Solo())
    return model.logits(hidden, Solo())


def _plain(model: Any, tokens: list[int]) -> Tensor:
    """Logits [tokens, vocab] with the attention that the model brings."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=next(model.parameters()).device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits[0].float()
    finally:
        model.set_attn_implementation(NAME)


def _name(dtype: torch.dtype) -> Dtype:
    return "float32" if dtype == torch.float32 else "bfloat16"
