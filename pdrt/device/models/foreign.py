"""Any decoder that transformers has, computed by its own code over the paged pool.

Slower than a native family but as exact. All rows of a wave are one sequence to the model's code;
attention alone tells them apart. What a model does beyond its decoder (scaling or capping logits)
is had from its whole forward pass, run with the decoder's answer already given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdrt.device.attention import Wave, lay_out
from pdrt.device.batch import SeqStep
from pdrt.device.collective import Collective
from pdrt.device.foreignattention import running
from pdrt.device.foreignstep import PagedStep, Spans
from pdrt.device.kv import KvPool
from pdrt.device.models.foreigncheck import check
from pdrt.device.models.foreignload import decoder_of, find, read
from pdrt.device.shard import Shard
from pdrt.device.weights import Progress


class Foreign:
    """`model` attends through `foreignattention`; it is not to be called by others from now on."""

    def __init__(self, shard: Shard, model: Any) -> None:  # transformers has no types
        self.shard, self.spec, self.model = shard, shard.spec, model
        self._decoder = decoder_of(model)
        self._compute = self._decoder.forward
        self._given: object = None
        self._output: Any = None  # the class of what the decoder returns
        self._decoder.forward = self._answer

    def lay_out(self, batch: Sequence[SeqStep], pool: KvPool) -> Wave:
        return lay_out(batch, pool, Spans(pool))

    def forward(self, wave: Wave, pool: KvPool, _group: Collective) -> Tensor:
        """Hidden states [rows, hidden] of all tokens, after the last norm."""
        tokens = wave.tokens.unsqueeze(0)
        step = PagedStep(wave, pool)
        with running(step):
            out = self._decoder(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),  # else it looks for sequences by itself
                position_ids=wave.positions.unsqueeze(0),
                use_cache=False,
            )
        assert step.layers == self.spec.layers, "each layer attends once"
        self._output = type(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, _group: Collective) -> Tensor:
        """[rows, vocab] in float32."""
        self._given = self._output(last_hidden_state=hidden.unsqueeze(0))
        try:
            nothing = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self.model(input_ids=nothing, use_cache=False).logits
        finally:
            self._given = None
        return logits[0].float()

    def _answer(self, *args: object, **kwargs: object) -> object:
        """In place of the decoder's forward: what is given, or what it computes."""
        return self._compute(*args, **kwargs) if self._given is None else self._given


def load(path: Path, shard: Shard, dtype: torch.dtype, device: str, progress: Progress) -> Foreign:
    """Raises ConfigError, before the weights are read where that can be seen."""
    found = find(path, shard.spec)
    model = Foreign(Shard(found.spec), read(found, path, dtype, progress).to(device))
    check(model, dtype, device)
    return model
