"""Whether two ways to compute a model agree: a few tokens through its first layer, both ways.

A compiler makes mistakes, and on other processors others: of heads of 16 values in bfloat16 one
left attention out, where the loops came from its cache on disk. An answer would not show that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch import Tensor

from pdrt.device.attention import Wave
from pdrt.device.batch import Draw, SeqStep
from pdrt.device.collective import Collective, Solo
from pdrt.device.kv import DTYPES, KvPool
from pdrt.messages import KvLayout, Sampling

# Beyond rounding, which large biases of queries and keys bring to 0.04 in bfloat16.
_MOST_OFF: Final = {torch.float32: 0.01, torch.bfloat16: 0.15}
_LENGTHS: Final = (1, 20, 37)  # a block in part, two, three
_BLOCKS: Final = 4  # of each sequence
_GREEDY: Final = Sampling(temperature=0)


class Way(Protocol):
    """As `registry.Model`, which this does not load."""

    def lay_out(self, batch: list[SeqStep], pool: KvPool) -> Wave: ...
    def forward(self, wave: Wave, pool: KvPool, group: Collective) -> Tensor: ...
    def logits(self, hidden: Tensor, group: Collective) -> Tensor | None: ...


def disagreement(one: Way, other: Way, layout: KvLayout, vocab: int) -> str | None:
    """Where the first is off from the second by more than rounding; on the CPU."""
    most, threads = _MOST_OFF[DTYPES[layout.dtype]], torch.get_num_threads()
    try:
        found = list(_answers(one, layout, vocab))
    finally:
        torch.set_num_threads(threads)  # which the loops' steps change
    wanted = _answers(other, layout, vocab)
    for (what, ours), (_, theirs) in zip(found, wanted, strict=True):
        off = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        if not off <= most:  # NaN is no agreement
            return f"{what} are off by {off:.1%}"
    return None


def _answers(way: Way, layout: KvLayout, vocab: int) -> Iterator[tuple[str, Tensor]]:
    """Logits after prompts, and after a token more of each; then all KV."""
    blocks = _BLOCKS * len(_LENGTHS)
    memory = bytearray(blocks * layout.block_bytes)
    pool = KvPool(memoryview(memory), blocks, layout, "cpu", mirrored=False)
    for what, is_begun in (("prompts", False), ("single tokens", True)):
        batch = list(_steps(layout.block_size, vocab, is_begun=is_begun))
        wave = way.lay_out(batch, pool)
        logits = way.logits(way.forward(wave, pool, Solo())[wave.drawn], Solo())
        assert logits is not None, "a rank alone is the first"
        yield f"logits of {what}", logits
    yield "keys and values", torch.frombuffer(memory, dtype=DTYPES[layout.dtype]).float()


def _steps(size: int, vocab: int, *, is_begun: bool) -> Iterator[SeqStep]:
    """Of each sequence all of its prompt, or the token after it."""
    for key, length in enumerate(_LENGTHS):
        tokens = [(7 * at + key) % vocab for at in range(length + 1)]
        start = length if is_begun else 0
        table = [at * len(_LENGTHS) + key for at in range(_BLOCKS)]  # not side by side
        assert length < size * _BLOCKS, "the table covers it"
        some = tokens[start:] if is_begun else tokens[:length]
        yield SeqStep(key, some, start, table, Draw(_GREEDY, tokens, length))
