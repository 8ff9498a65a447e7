"""DeepSeek-V2 and V3: latent attention (MLA), and experts after the first dense layers.

Their weights rotate neighbouring pairs; rows are put in order when they are read, so that the
first half of a rotated part turns with the second, as everywhere else here. A rank has some of
the query heads and all of the latent, which is therefore the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdrt.device.attention import Wave, lay_out
from pdrt.device.batch import SeqStep
from pdrt.device.collective import Collective
from pdrt.device.kv import KvPool
from pdrt.device.latent import LatentLayouts, Up
from pdrt.device.models.blocks import FeedForward, Reader, rms_norm
from pdrt.device.models.experts import feed_forward
from pdrt.device.models.vocabulary import Vocabulary, vocabulary
from pdrt.device.quantized import Matrix
from pdrt.device.rope import frequencies, rotate_
from pdrt.device.shard import Run, Shard
from pdrt.device.weights import Checkpoint
from pdrt.modelspec import Latent, ModelSpec

LATENT_EPS: Final = 1e-6  # of the norms between down and up, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    down: Matrix  # queries, compressed where `q_up` is, and the latent
    q_norm: Tensor | None
    q_up: Matrix | None
    kv_norm: Tensor
    out: Matrix
    mlp_norm: Tensor
    mlp: FeedForward


class Mla:
    """Implements registry.Model."""

    def __init__(
        self,
        shard: Shard,
        vocabulary: Vocabulary,
        layers: list[Layer],
        ups: list[Up],
        norm: Tensor,
    ) -> None:
        self.shard, self.spec = shard, shard.spec
        self._latent = latent_of(self.spec)
        self._vocabulary, self._layers, self._norm = vocabulary, layers, norm
        self._ups, self._scale = ups, softmax_scale(self.spec)
        frequency, self._rope_scale = frequencies(self.spec)
        self._frequency = frequency.to(vocabulary.device)

    def lay_out(self, batch: Sequence[SeqStep], pool: KvPool) -> Wave:
        layouts = LatentLayouts(pool, self._vocabulary.dtype, self._ups, self._scale)
        return lay_out(batch, pool, layouts)

    def forward(self, wave: Wave, pool: KvPool, group: Collective) -> Tensor:
        x = self._vocabulary.embed(wave.tokens, group)
        cos, sin = self._angles(wave.positions)
        for number, layer in enumerate(self._layers):
            q, latent = self._projected(layer, self._normed(x, layer.attention_norm))
            rotate_(q[..., self._latent.nope_dim :], cos, sin)
            rotate_(latent[:, None, self._latent.kv_lora :], cos, sin)
            pool.write(number, wave.cells, latent)
            attended = wave.attend(number, q, latent, pool)
            x.add_(group.all_reduce_(layer.out(attended)))
            x.add_(group.all_reduce_(layer.mlp(self._normed(x, layer.mlp_norm))))
        return x

    def _projected(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, nope_dim + rope_dim] and latents [rows, width], not yet rotated."""
        down, width = layer.down(x), self._latent.kv_lora + self._latent.rope_dim
        q, latent = down[:, :-width], down[:, -width:]
        low = latent[:, : self._latent.kv_lora]
        low.copy_(rms_norm(low, layer.kv_norm, LATENT_EPS))
        if layer.q_up is not None and layer.q_norm is not None:
            q = layer.q_up(rms_norm(q, layer.q_norm, LATENT_EPS))
        return q.view(len(x), len(self.shard.heads), -1), latent

    def logits(self, hidden: Tensor, group: Collective) -> Tensor | None:
        return self._vocabulary.logits(self._normed(hidden, self._norm), group)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.rms_norm_eps)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.float().unsqueeze(1) * self._frequency).unsqueeze(1)
        dtype, scale = self._vocabulary.dtype, self._rope_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def latent_of(spec: ModelSpec) -> Latent:
    assert spec.latent is not None, "this family's specs have one"
    return spec.latent


def softmax_scale(spec: ModelSpec) -> float:
    """Stretched ropes that say `mscale_all_dim` sharpen attention by its square."""
    latent, rope = latent_of(spec), spec.rope
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def load(shard: Shard, weights: Checkpoint, dtype: torch.dtype, device: str) -> Mla:
    """Read the shard's weights. Raises ConfigError when they do not fit the spec."""
    spec, read = shard.spec, Reader(weights, dtype, device)
    words = vocabulary(shard, read)
    layers, ups = list[Layer](), list[Up]()
    for number in range(spec.layers):
        layers.append(_layer(shard, read, number))
        ups.append(_up(shard, read, f"model.layers.{number}.self_attn."))
    norm = read.tensor("model.norm.weight", spec.hidden)
    weights.finish()
    return Mla(shard, words, layers, ups, norm)


def _layer(shard: Shard, read: Reader, number: int) -> Layer:
    spec, latent = shard.spec, latent_of(shard.spec)
    at = f"model.layers.{number}."
    attention, hidden = at + "self_attn.", Run.all_of(spec.hidden)
    down, q_up = _projections(shard, read, attention)
    q_norm = None
    if q_up is not None:
        q_norm = read.tensor(attention + "q_a_layernorm.weight", latent.q_lora)
    return Layer(
        attention_norm=read.tensor(at + "input_layernorm.weight", spec.hidden),
        down=down,
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=read.tensor(attention + "kv_a_layernorm.weight", latent.kv_lora),
        out=read.fused(attention, {"o_proj": hidden}, shard.heads * latent.v_dim),
        mlp_norm=read.tensor(at + "post_attention_layernorm.weight", spec.hidden),
        mlp=feed_forward(shard, read, number),
    )


def _projections(shard: Shard, read: Reader, at: str) -> tuple[Matrix, Matrix | None]:
    """From hidden states to queries and latents, and from compressed queries to queries."""
    latent, hidden = latent_of(shard.spec), Run.all_of(shard.spec.hidden)
    heads = shard.heads * (latent.nope_dim + latent.rope_dim)
    kv = {"kv_a_proj_with_mqa": Run.all_of(latent.kv_lora + latent.rope_dim)}
    if latent.q_lora:
        lora = Run.all_of(latent.q_lora)
        down = read.fused(at, {"q_a_proj": lora} | kv, hidden)
        q_up = read.fused(at, {"q_b_proj": heads}, lora)
        queries = q_up.weight
    else:
        down, q_up = read.fused(at, {"q_proj": heads} | kv, hidden), None
        queries = down.weight[: len(heads)]
    by_head = queries.view(len(shard.heads), -1, queries.shape[1])
    _pairs_to_halves_(by_head[:, latent.nope_dim :])
    _pairs_to_halves_(down.weight[-latent.rope_dim :])
    return down, q_up


def _pairs_to_halves_(rows: Tensor) -> None:
    """Rows [.., rope_dim, columns] in place: the first of each pair, then the second of each."""
    rows.copy_(torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2))


def _up(shard: Shard, read: Reader, at: str) -> Up:
    latent = latent_of(shard.spec)
    rows = shard.heads * (latent.nope_dim + latent.v_dim)
    up = read.fused(at, {"kv_b_proj": rows}, Run.all_of(latent.kv_lora))
    by_head = up.weight.view(len(shard.heads), -1, latent.kv_lora)
    keys, values = by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
    return Up(keys.contiguous(), values.contiguous(), latent)
