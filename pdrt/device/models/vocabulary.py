"""Embedding and head, whose rows the ranks of a tensor-parallel group share.

A token's row is on one rank: the others add zeros. Each rank computes the logits of its own rows,
and the first one gathers them. Where the vocabulary is uneven the last parts are padded with rows
that no token has and whose logits are cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.collective import Collective
from pdrt.device.linear import Linear
from pdrt.device.models.blocks import Reader
from pdrt.device.quantized import Matrix
from pdrt.device.shard import Run, Shard


class Vocabulary:
    """`embedding` and `head` are [rows, hidden], as many rows on each rank; tied, they are one."""

    def __init__(self, shard: Shard, embedding: Tensor, head: Matrix) -> None:
        self._shard, self.embedding, self.head = shard, embedding, head

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, tokens: Tensor, group: Collective) -> Tensor:
        """[tokens, hidden], the same on every rank."""
        if self._shard.size == 1:
            return F.embedding(tokens, self.embedding)
        rows = tokens - self._shard.vocab.first
        is_elsewhere = (rows < 0) | (rows >= len(self._shard.vocab))
        found = F.embedding(rows.masked_fill_(is_elsewhere, 0), self.embedding)
        return group.all_reduce_(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def logits(self, normed: Tensor, group: Collective) -> Tensor | None:
        """[rows, vocab] in float32 for rows of normed hidden states, on the first rank."""
        parts = group.gather(self.head(normed))
        if parts is None:
            return None
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found[:, : self._shard.spec.vocab].float()


def vocabulary(shard: Shard, read: Reader) -> Vocabulary:
    """The shard's rows of both, padded with zeros to as many as the first rank has."""
    hidden, own = Run.all_of(shard.spec.hidden), shard.vocab
    rows = -(-shard.spec.vocab // shard.size)
    embedding = read.table({"model.embed_tokens.weight": own}, hidden, rows)
    if shard.spec.tied:
        return Vocabulary(shard, embedding, Linear(embedding))
    return Vocabulary(shard, embedding, read.matrix({"lm_head.weight": own}, hidden, rows))
