"""A mixture of experts in place of an MLP: a router chooses, each token visits its few experts.

Tokens are sorted by expert, so that each expert that has any multiplies all of its own at once
and the others do nothing; no loop runs over tokens. Measured on CPUs, `torch._grouped_mm` is no
faster than one product an expert, and torch 2.6 lacks it.

A rank of a tensor-parallel group has some columns of every expert. Each rank chooses for itself:
hidden states and the router are the same everywhere. The router works in float32 whatever the
model's dtype, so that rounding does not choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.linear import Linear
from pdrt.device.models.blocks import FeedForward, Mlp, Reader, mlp
from pdrt.device.shard import Run, Shard
from pdrt.modelspec import Experts


@dataclass(frozen=True, slots=True)
class Router:
    """`bias` is added to the scores for choosing alone, never to the weights."""

    how: Experts
    weight: Tensor  # [experts, hidden] in float32
    bias: Tensor | None = None  # [experts] in float32

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row of x [rows, hidden], and how much each counts: [rows, chosen]."""
        how = self.how
        raw = F.linear(x.float(), self.weight)
        scores = raw.softmax(dim=-1) if how.scoring == "softmax" else raw.sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        if how.groups > 1:
            ranked = self._in_best_groups(ranked)
        chosen = ranked.topk(how.per_token, dim=-1).indices
        counts = scores.gather(1, chosen)
        if how.normed:
            counts /= counts.sum(dim=-1, keepdim=True) + 1e-20
        return chosen, counts * how.scale

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        """Minus infinity in place of all experts outside of the row's best groups."""
        how = self.how
        grouped = ranked.view(ranked.shape[0], how.groups, -1)
        best_of_each = grouped.topk(1 if how.group_score == "max" else 2, dim=-1).values
        best = best_of_each.sum(dim=-1).topk(how.top_groups, dim=-1).indices
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device)
        is_out.scatter_(1, best, value=False)
        return grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class Moe:
    """`experts` are this rank's columns of each."""

    router: Router
    experts: tuple[Mlp, ...]
    shared: Mlp | None = None  # the expert that every token uses

    def __call__(self, x: Tensor) -> Tensor:
        chosen, counts = self.router(x)
        visits = self._visited(x, chosen).view(*chosen.shape, -1)
        out = torch.bmm(counts.to(x.dtype).unsqueeze(1), visits).squeeze(1)
        return out if self.shared is None else out.add_(self.shared(x))

    def _visited(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What each choice yields, in the order of `chosen`: [rows * chosen, hidden]."""
        whose = chosen.flatten()
        sizes = torch.bincount(whose, minlength=len(self.experts)).tolist()
        out = x.new_empty(len(whose), x.shape[1])
        sorted_places = torch.split(whose.argsort(stable=True), sizes)
        for expert, places in zip(self.experts, sorted_places, strict=True):
            if len(places):
                out.index_copy_(0, places, expert(x[places // chosen.shape[1]]))
        return out


@dataclass(frozen=True, slots=True)
class _Names:
    """How a checkpoint calls an expert's matrices, below the name of the block."""

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_MIXTRAL = _Names("block_sparse_moe.", "w1", "w3", "w2")


def feed_forward(shard: Shard, read: Reader, layer: int) -> FeedForward:
    """The experts of a layer that has them, else its MLP."""
    at = f"model.layers.{layer}."
    how = shard.spec.experts
    if how is None or layer not in how.layers:
        return mlp(shard, read, at + "mlp.", shard.intermediate)
    is_mixtral = f"{at}{_MIXTRAL.block}gate.weight" in read.weights
    return _moe(shard, how, read, at, _MIXTRAL if is_mixtral else _Names("mlp."))


def _moe(shard: Shard, how: Experts, read: Reader, at: str, names: _Names) -> Moe:
    block, wide = at + names.block, shard.part(how.intermediate)
    is_stacked = f"{block}experts.gate_up_proj" in read.weights
    shared = None
    if how.shared_intermediate:
        shared = mlp(shard, read, f"{block}shared_experts.", shard.part(how.shared_intermediate))
    return Moe(
        _router(how, read, f"{block}gate.", shard.spec.hidden),
        tuple(
            _from_stack(shard, read, f"{block}experts.", Run(number, number + 1, how.count), wide)
            if is_stacked
            else _alone(shard, read, f"{block}experts.{number}.", names, wide)
            for number in range(how.count)
        ),
        shared,
    )


def _router(how: Experts, read: Reader, at: str, hidden: int) -> Router:
    exact = read.in_dtype(torch.float32)
    bias = exact.tensor(f"{at}e_score_correction_bias", how.count) if how.has_bias else None
    return Router(how, exact.tensor(f"{at}weight", how.count, hidden), bias)


def _alone(shard: Shard, read: Reader, at: str, names: _Names, wide: Run) -> Mlp:
    hidden = Run.all_of(shard.spec.hidden)
    return Mlp(
        gate_up=read.fused(at, {names.gate: wide, names.up: wide}, hidden),
        down=read.fused(at, {names.down: hidden}, wide),
    )


def _from_stack(shard: Shard, read: Reader, at: str, which: Run, wide: Run) -> Mlp:
    """From tensors that hold all experts, as transformers 5 has them in memory."""
    hidden = Run.all_of(shard.spec.hidden)
    gate = Run(wide.first, wide.end, 2 * wide.whole)
    up = Run(wide.whole + wide.first, wide.whole + wide.end, 2 * wide.whole)
    gate_up = read.empty(1, 2 * len(wide), len(hidden))
    down = read.empty(1, len(hidden), len(wide))
    for run, part in zip((gate, up), gate_up.chunk(2, dim=1), strict=True):
        read.weights.copy(f"{at}gate_up_proj", part, (which, run, hidden))
    read.weights.copy(f"{at}down_proj", down, (which, hidden, wide))
    return Mlp(Linear(gate_up[0]), Linear(down[0]))
