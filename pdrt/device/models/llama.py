"""Llama and its kin (SmolLM2, Mistral, Mixtral, Qwen2, Qwen3) as one decoder over a paged pool.

They differ in biases, in a norm on queries and keys, in experts, in tied embeddings and in rope.
Query, key and value matrices are one.

A rank of a tensor-parallel group has some of the heads and of the MLP's columns: what it adds to
the hidden states is a part, summed over the ranks before it is added. Rank 0 alone has the
biases of these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from pdrt.device.attention import KvLayouts, Wave, lay_out
from pdrt.device.batch import SeqStep
from pdrt.device.collective import Collective
from pdrt.device.kv import KvPool
from pdrt.device.models.blocks import FeedForward, Reader, rms_norm
from pdrt.device.models.experts import feed_forward
from pdrt.device.models.looped import Looped, are_wrong, looped
from pdrt.device.models.trial import disagreement
from pdrt.device.models.vocabulary import Vocabulary, vocabulary
from pdrt.device.models.waves import TableWave
from pdrt.device.quantized import Matrix, QuantizedLinear
from pdrt.device.rope import frequencies, rotate_
from pdrt.device.shard import Run, Shard
from pdrt.device.weights import Checkpoint
from pdrt.modelspec import Kernels, Quantize

_TRIAL_BLOCK: Final = 16  # tokens


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Matrix
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Matrix
    mlp_norm: Tensor
    mlp: FeedForward


class Llama:
    """`forward` runs all layers and writes the wave's KV; `logits` is asked for single rows."""

    def __init__(
        self,
        shard: Shard,
        vocabulary: Vocabulary,
        layers: list[Layer],
        norm: Tensor,
        looped: Looped | None = None,
    ) -> None:
        """`looped` computes the batches that it takes."""
        self.shard, self.spec = shard, shard.spec
        self._heads, self._kv_heads = len(shard.heads), len(shard.kv_heads)
        self._vocabulary, self._layers, self._norm = vocabulary, layers, norm
        frequency, self._rope_scale = frequencies(self.spec)
        self._frequency = frequency.to(vocabulary.device)
        self._looped = looped

    def lay_out(self, batch: Sequence[SeqStep], pool: KvPool) -> Wave:
        wave = self._looped.lay_out(batch, pool) if self._looped else None
        return wave or lay_out(batch, pool, KvLayouts(pool, self._vocabulary.dtype))

    def forward(self, wave: Wave, pool: KvPool, group: Collective) -> Tensor:
        """Hidden states [rows, hidden] of all tokens, before the last norm."""
        spec, heads = self.spec, self._heads
        turned = heads + self._kv_heads
        x = self._vocabulary.embed(wave.tokens, group)
        cos, sin = self._angles(wave.positions)
        if self._looped and isinstance(wave, TableWave):
            return self._looped.forward(x.float(), cos, sin, wave, pool)
        cos, sin = (each.to(x.dtype).unsqueeze(1) for each in (cos, sin))
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm))
            qkv = qkv.view(-1, turned + self._kv_heads, spec.head_dim)
            qk, kv = qkv[:, :turned], qkv[:, heads:]
            if layer.qk_norm is not None:
                qk.copy_(rms_norm(qk, layer.qk_norm, spec.rms_norm_eps))
            rotate_(qk, cos, sin)
            pool.write(number, wave.cells, kv)
            attended = wave.attend(number, qkv[:, :heads], kv, pool)
            x.add_(group.all_reduce_(layer.out(attended)))
            x.add_(group.all_reduce_(layer.mlp(self._normed(x, layer.mlp_norm))))
        return x

    def logits(self, hidden: Tensor, group: Collective) -> Tensor | None:
        """[rows, vocab] in float32, on the first rank."""
        if self._looped:
            return self._looped.judge(hidden)
        return self._vocabulary.logits(self._normed(hidden, self._norm), group)

    def disagreement(self, dtype: torch.dtype) -> str | None:
        """Where its first layer is another one in the loops than in torch; the dtype is KV's."""
        if self._looped is None:
            return None
        parts = Shard(replace(self.spec, layers=1)), self._vocabulary, self._layers[:1], self._norm
        ours, torchs = Llama(*parts, self._looped.first_layer(parts[0].spec)), Llama(*parts)
        layout = parts[0].layout(_TRIAL_BLOCK, "float32" if dtype is torch.float32 else "bfloat16")
        found = disagreement(ours, torchs, layout, self.spec.vocab)
        if isinstance(self._vocabulary.head, QuantizedLinear):
            self._vocabulary.head.let_go()  # the loops never widen the head, the largest matrix
        return found

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.rms_norm_eps)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, head_dim / 2] in float32."""
        angles = positions.float().unsqueeze(1) * self._frequency
        return angles.cos() * self._rope_scale, angles.sin() * self._rope_scale


def load(
    shard: Shard,
    weights: Checkpoint,
    dtype: torch.dtype,
    device: str,
    kernels: Kernels,
    quantize: Quantize,
) -> Llama:
    """Read the shard's weights. Raises ConfigError when they do not fit the spec."""
    spec, read = shard.spec, Reader(weights, dtype, device, quantize)
    words = vocabulary(shard, read)
    layers = [_layer(shard, read, i) for i in range(spec.layers)]
    norm = read.tensor("model.norm.weight", spec.hidden)
    weights.finish()
    loops = looped(shard, layers, norm, words.head, dtype, kernels, weights.progress)
    model = Llama(shard, words, layers, norm, loops)
    if wrong := model.disagreement(dtype):
        are_wrong(kernels, wrong)
        return Llama(shard, words, layers, norm)
    return model


def _layer(shard: Shard, read: Reader, number: int) -> Layer:
    spec, hidden = shard.spec, Run.all_of(shard.spec.hidden)
    q, kv = shard.heads * spec.head_dim, shard.kv_heads * spec.head_dim
    at = f"model.layers.{number}."
    attention = at + "self_attn."
    qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    return Layer(
        attention_norm=read.tensor(at + "input_layernorm.weight", spec.hidden),
        qkv=read.fused(attention, qkv, hidden, bias=spec.qkv_bias),
        qk_norm=_qk_norm(shard, read, attention) if spec.qk_norm else None,
        out=read.fused(attention, {"o_proj": hidden}, q, bias=spec.o_bias and shard.is_first),
        mlp_norm=read.tensor(at + "post_attention_layernorm.weight", spec.hidden),
        mlp=feed_forward(shard, read, number),
    )


def _qk_norm(shard: Shard, read: Reader, attention: str) -> Tensor:
    """One row a head: those of queries, then those of keys."""
    head_dim = shard.spec.head_dim
    q = read.tensor(attention + "q_norm.weight", head_dim).expand(len(shard.heads), -1)
    k = read.tensor(attention + "k_norm.weight", head_dim).expand(len(shard.kv_heads), -1)
    return torch.cat([q, k])
