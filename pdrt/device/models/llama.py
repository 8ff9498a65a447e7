"""Llama and its kin (SmolLM2, Mistral, Qwen2, Qwen3 dense) as one decoder over a paged pool.

They differ in biases, in a norm on queries and keys, in tied embeddings and in rope. Query,
key and value matrices are one, gate and up matrices are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.device.attention import Wave
from pdrt.device.kv import KvPool
from pdrt.device.linear import Linear
from pdrt.device.rope import frequencies, rotate_
from pdrt.device.weights import Checkpoint
from pdrt.modelspec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """`forward` runs all layers and writes the wave's KV; `logits` is asked for single rows."""

    def __init__(
        self, spec: ModelSpec, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Linear
    ) -> None:
        self.spec = spec
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        frequency, self._rope_scale = frequencies(spec)
        self._frequency = frequency.to(embedding.device)

    def forward(self, wave: Wave, pool: KvPool) -> Tensor:
        """Hidden states [rows, hidden] of all tokens, before the last norm."""
        spec = self.spec
        heads, turned = spec.heads, spec.heads + spec.kv_heads
        x = F.embedding(wave.tokens, self._embedding)
        cos, sin = self._angles(wave.positions)
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm))
            qkv = qkv.view(-1, turned + spec.kv_heads, spec.head_dim)
            qk, kv = qkv[:, :turned], qkv[:, heads:]
            if layer.qk_norm is not None:
                qk.copy_(rms_norm(qk, layer.qk_norm, spec.rms_norm_eps))
            rotate_(qk, cos, sin)
            pool.write(number, wave.cells, kv)
            x.add_(layer.out(wave.attend(number, qkv[:, :heads], kv, pool)))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] in float32."""
        return self._head(self._normed(hidden, self._norm)).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.rms_norm_eps)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.float().unsqueeze(1) * self._frequency).unsqueeze(1)
        dtype, scale = self._embedding.dtype, self._rope_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 whatever x is, as transformers does; torch's own is slow for many rows."""
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def load(spec: ModelSpec, weights: Checkpoint, dtype: torch.dtype, device: str) -> Llama:
    """Read all weights. Raises ConfigError when they do not fit the spec."""
    read = _Reader(weights, dtype, device)
    embedding = read.tensor("model.embed_tokens.weight", spec.vocab, spec.hidden)
    layers = [_layer(spec, read, f"model.layers.{i}.") for i in range(spec.layers)]
    norm = read.tensor("model.norm.weight", spec.hidden)
    head = embedding if spec.tied else read.tensor("lm_head.weight", spec.vocab, spec.hidden)
    weights.finish()
    return Llama(spec, embedding, layers, norm, Linear(head))


def _layer(spec: ModelSpec, read: _Reader, at: str) -> Layer:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    wide = spec.intermediate
    attention, mlp = at + "self_attn.", at + "mlp."
    qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    return Layer(
        attention_norm=read.tensor(at + "input_layernorm.weight", spec.hidden),
        qkv=read.fused(attention, qkv, spec.hidden, bias=spec.qkv_bias),
        qk_norm=_qk_norm(spec, read, attention) if spec.qk_norm else None,
        out=read.fused(attention, {"o_proj": spec.hidden}, q, bias=spec.o_bias),
        mlp_norm=read.tensor(at + "post_attention_layernorm.weight", spec.hidden),
        gate_up=read.fused(
            mlp, {"gate_proj": wide, "up_proj": wide}, spec.hidden, bias=spec.mlp_bias
        ),
        down=read.fused(mlp, {"down_proj": spec.hidden}, wide, bias=spec.mlp_bias),
    )


def _qk_norm(spec: ModelSpec, read: _Reader, attention: str) -> Tensor:
    """One row a head: those of queries, then those of keys."""
    q = read.tensor(attention + "q_norm.weight", spec.head_dim).expand(spec.heads, -1)
    k = read.tensor(attention + "k_norm.weight", spec.head_dim).expand(spec.kv_heads, -1)
    return torch.cat([q, k])


class _Reader:
    """Makes tensors of one dtype on one device out of a checkpoint."""

    def __init__(self, weights: Checkpoint, dtype: torch.dtype, device: str) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device

    def tensor(self, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._weights.copy(name, out)
        return out

    def fused(self, at: str, rows: dict[str, int], columns: int, *, bias: bool) -> Linear:
        """The matrices named in `rows`, one below the other."""
        total = sum(rows.values())
        weight = torch.empty(total, columns, dtype=self._dtype, device=self._device)
        offsets = torch.empty(total, dtype=self._dtype, device=self._device) if bias else None
        first = 0
        for name, count in rows.items():
            part = slice(first, first + count)
            self._weights.copy(f"{at}{name}.weight", weight[part])
            if offsets is not None:
                self._weights.copy(f"{at}{name}.bias", offsets[part])
            first += count
        return Linear(weight, offsets)
