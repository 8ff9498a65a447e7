"""What the machine could do at best: read memory and multiply matrices, with the same threads.

A decode step must read every weight and the KV of its sequences once, and multiply them: the
longer of both times is its limit. A prompt's limit is that of its multiplications alone. Both
rates are taken by bare kernels, the best of several, in the same round as what they limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

from pdrt.errors import ConfigError
from pdrt.modelspec import ModelSpec, Quantize

Clock = Callable[[], float]
_LAYERS: Final = 3  # whose matrices are multiplied to find the rate
_BUFFERS: Final = (256 << 20, 512 << 20, 1 << 30)  # bytes: larger than a core's share of caches


@dataclass(frozen=True, slots=True)
class Work:
    """What a model has to do, in bytes and floating-point operations."""

    matrices: tuple[tuple[int, int], ...]  # of one layer: rows (out) and columns (in)
    head: tuple[int, int]
    layers: int
    heads: int
    head_dim: int
    kv_bytes: int  # of one token, all layers
    value_bytes: int  # of activations
    layer_value_bytes: int = 0  # of the layers' matrices; 0: as activations
    head_value_bytes: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype, quantize: Quantize = "none") -> Work:
        """Raises ConfigError for a model that is not a plain dense decoder."""
        if spec.experts is not None or spec.latent is not None:
            raise ConfigError("pdrt bench engine knows the limits of dense models only")
        held = 1 if quantize == "int8" else dtype.itemsize
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return cls(
            matrices=(
                (queries + 2 * keys, spec.hidden),
                (spec.hidden, queries),
                (2 * spec.intermediate, spec.hidden),
                (spec.hidden, spec.intermediate),
            ),
            head=(spec.vocab, spec.hidden),
            layers=spec.layers,
            heads=spec.heads,
            head_dim=spec.head_dim,
            kv_bytes=2 * spec.layers * keys * dtype.itemsize,
            value_bytes=dtype.itemsize,
            layer_value_bytes=held,
            head_value_bytes=dtype.itemsize if spec.tied else held,
        )

    @property
    def layer_values(self) -> int:
        return self.layers * sum(rows * columns for rows, columns in self.matrices)

    @property
    def head_values(self) -> int:
        return self.head[0] * self.head[1]

    def decode_bytes(self, sequences: int, tokens: int) -> int:
        """Read by a step of `sequences` that have `tokens` each: weights and KV, once."""
        layers = self.layer_values * (self.layer_value_bytes or self.value_bytes)
        head = self.head_values * (self.head_value_bytes or self.value_bytes)
        return layers + head + sequences * tokens * self.kv_bytes

    def decode_flops(self, sequences: int, tokens: int) -> int:
        each = 2 * (self.layer_values + self.head_values) + self._attention_flops(tokens)
        return sequences * each

    def prefill_flops(self, tokens: int) -> int:
        """Of a prompt whose last token alone goes through the head; attention is causal."""
        attention = self._attention_flops(1) * tokens * (tokens + 1) // 2
        return 2 * (self.layer_values * tokens + self.head_values) + attention

    def _attention_flops(self, keys: int) -> int:
        """Of one query: scores, and the sum of the values."""
        return 4 * self.layers * self.heads * self.head_dim * keys


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second, and floating-point operations a second by rows that are multiplied."""

    read: float
    multiply: Mapping[int, float]

    def decode_s(self, work: Work, sequences: int, tokens: int) -> float:
        reading = work.decode_bytes(sequences, tokens) / self.read
        best = max(self.multiply.values())
        return max(reading, work.decode_flops(sequences, tokens) / best)

    def prefill_s(self, work: Work, tokens: int) -> float:
        """At the best rate with at most so many rows."""
        fitting = [rate for rows, rate in self.multiply.items() if rows <= tokens]
        return work.prefill_flops(tokens) / max(fitting or self.multiply.values())


class Probe:
    """The bare kernels, over memory of their own that stays allocated."""

    def __init__(
        self,
        work: Work,
        dtype: torch.dtype,
        rows: Sequence[int] = (512, 2048),
        buffers: Sequence[int] = _BUFFERS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._clock, self._buffers, self._rows = clock, buffers, rows
        self._buffer, self._ones = torch.ones(max(buffers) // 4), torch.ones(1024)
        self._weights = [torch.randn(shape).to(dtype) for shape in _LAYERS * work.matrices]
        widths = {weight.shape[1] for weight in self._weights}
        self._inputs = {width: torch.randn(max(rows), width).to(dtype) for width in widths}

    @torch.inference_mode()
    def __call__(self) -> Rates:
        read = max(size / self._timed(kernel) for size, kernel in self._reads())
        return Rates(read, {rows: self._multiply_rate(rows) for rows in self._rows})

    def _reads(self) -> Iterator[tuple[int, Callable[[], object]]]:
        for size in self._buffers:
            part = self._buffer[: size // 4]
            yield size, partial(torch.dot, part, part)
            yield size, partial(torch.mv, part.view(-1, len(self._ones)), self._ones)

    def _multiply_rate(self, rows: int) -> float:
        flops = 2 * rows * sum(weight.numel() for weight in self._weights)
        inputs = [self._inputs[weight.shape[1]][:rows] for weight in self._weights]
        return flops / self._timed(lambda: list(map(F.linear, inputs, self._weights)))

    def _timed(self, kernel: Callable[[], object]) -> float:
        began = self._clock()
        kernel()
        return self._clock() - began
