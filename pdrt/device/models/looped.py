"""Steps of a dense Llama through the compiled loops, where its shape and device allow.

Torch's own operators take some 60 calls a layer, and each waits for memory or for its threads.
Prompts in bfloat16 stay with torch where there are no tiles.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from pdrt.device.attention import Wave
from pdrt.device.batch import SeqStep
from pdrt.device.jit.sizes import TILE
from pdrt.device.kv import KvPool
from pdrt.device.models.blocks import FeedForward, Mlp
from pdrt.device.models.waves import (
    PanelWave,
    TableWave,
    chunk_rows,
    lay_out_panels,
    lay_out_tables,
    panels_of,
)
from pdrt.device.quantized import Matrix, QuantizedLinear
from pdrt.device.shard import Shard
from pdrt.device.weights import Progress as Told
from pdrt.errors import ConfigError
from pdrt.modelspec import Kernels, ModelSpec

if TYPE_CHECKING:
    from pdrt.device.jit.decode import Weights
    from pdrt.device.jit.loops import Loops

log = structlog.get_logger()
MOST_ROWS: Final = 64  # single tokens; with more, products of panels are faster
LARGE: Final = 1 << 20  # values of which torch's threads make more than they cost


class Layer(Protocol):
    """Of a Llama, as `llama.Layer`."""

    @property
    def attention_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Matrix: ...
    @property
    def qk_norm(self) -> Tensor | None: ...
    @property
    def out(self) -> Matrix: ...
    @property
    def mlp_norm(self) -> Tensor: ...
    @property
    def mlp(self) -> FeedForward: ...


class Looped:
    """The layers' weights as the loops want them; `forward` stands for the torch model's."""

    def __init__(
        self, spec: ModelSpec, layers: Sequence[Layer], norm: Tensor, head: Matrix, loops: Loops
    ) -> None:
        """`norm` is that before the head."""
        from pdrt.device.jit.decode import Shape

        self._loops = loops
        self._shape = Shape(spec.heads, spec.kv_heads, spec.head_dim, spec.rms_norm_eps)
        self._hidden, self._wide = spec.hidden, spec.intermediate
        self._has_prefill = loops.has_prefill(spec.head_dim)
        self._layers = layers  # which own what the addresses lead to
        self._weights = _weights(layers, spec.heads + spec.kv_heads)
        self._norm, self._head = norm.float(), head

    def compile(self) -> None:
        """Takes some 30 s for the first time on a machine; later ones find it on disk."""
        from pdrt.device.jit.chunks import Prompts
        from pdrt.device.jit.decode import Pool, Rows

        x, half = torch.zeros(1, self._hidden), torch.zeros(1, self._shape.head_dim // 2)
        none = np.zeros((1, 1), np.int64)
        rows = Rows(x.numpy(), half.numpy(), half.numpy(), none, none[0])
        nowhere = Pool(0, 0, 1)
        self._loops.decode(self._weights, self._shape, nowhere, rows, self._wide)
        self._logits(x)
        if self._has_prefill:
            panels, halves = (panels_of(each.expand(TILE, -1)).numpy() for each in (x, half))
            cells, chunks = none.repeat(TILE, 1), chunk_rows([], 1)
            prompts = Prompts(panels, halves, halves, cells, rows, chunks, none[0])
            self._loops.prefill(self._weights, self._shape, nowhere, prompts, self._wide)

    def first_layer(self, spec: ModelSpec) -> Looped:
        """The same loops, of a model that ends after it; its spec."""
        return Looped(spec, self._layers[:1], self._norm, self._head, self._loops)

    def lay_out(self, batch: Sequence[SeqStep], pool: KvPool) -> Wave | None:
        """None: torch has to compute it."""
        single = all(len(step.tokens) == 1 and step.scoring is None for step in batch)
        if single and len(batch) <= MOST_ROWS:
            wave: TableWave | None = lay_out_tables(batch, pool)
        else:
            wave = lay_out_panels(batch, pool) if self._has_prefill else None
        self._share(len(wave.tokens) * self._hidden if wave else math.inf)
        return wave

    def _share(self, values: float) -> None:
        """Let torch's threads come when what it does next with so many values is large.

        Each call that they share keeps them spinning for milliseconds after it, in which a thread
        of the crew on the same core does not get to its work.
        """
        torch.set_num_threads(1 if values <= LARGE else self._loops.threads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, wave: TableWave, pool: KvPool) -> Tensor:
        """Hidden states for embeddings x [rows, hidden]; cosines and sines [rows, head_dim / 2].

        All are float32; x may become the hidden states.
        """
        from pdrt.device.jit.chunks import Prompts
        from pdrt.device.jit.decode import Pool, Rows

        place = Pool(pool.address, len(self._layers), pool.block_size)
        if not isinstance(wave, PanelWave):
            rows = Rows(x.numpy(), cos.numpy(), sin.numpy(), wave.tables, wave.ends)
            self._loops.decode(self._weights, self._shape, place, rows, self._wide)
            return x
        count = len(wave.ends)
        first, turn = x[:count].numpy(), [each[:count].numpy() for each in (cos, sin)]
        rows = Rows(first, turn[0], turn[1], wave.tables, wave.ends)
        panels = panels_of(x)
        prompts = Prompts(
            panels.numpy(),
            panels_of(cos).numpy(),
            panels_of(sin).numpy(),
            wave.panel_cells,
            rows,
            wave.chunks,
            wave.chunk_tables,
        )
        self._loops.prefill(self._weights, self._shape, place, prompts, self._wide)
        return panels.transpose(1, 2).reshape(x.shape)

    def judge(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [rows, hidden], in float32."""
        self._share(len(hidden) * len(self._head.weight))
        parts = (hidden[at : at + MOST_ROWS] for at in range(0, len(hidden), MOST_ROWS))
        return torch.cat([self._logits(part) for part in parts])

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self._head
        return self._loops.linear(hidden, head.weight, _scale(head), self._norm, self._shape.eps)


def looped(  # noqa: PLR0913 - the parts of a model, and how it is computed
    shard: Shard,
    layers: Sequence[Layer],
    norm: Tensor,
    head: Matrix,
    dtype: torch.dtype,
    kernels: Kernels,
    told: Told,
) -> Looped | None:
    """The model's steps as loops, compiled; None: torch computes them.

    The dtype is that of the pool. `told` hears before and after that. Raises ConfigError when
    they must be compiled and cannot.
    """
    if kernels == "torch":
        return None
    problem = _problem(shard, layers, head.weight)
    if problem is None:
        from pdrt.device.jit.crew import Crew
        from pdrt.device.jit.loops import Loops

        told("compile", 0, 1)
        is_quantized = any(isinstance(layer.qkv, QuantizedLinear) for layer in layers)
        loops = Loops(dtype, Crew(torch.get_num_threads()), quantized=is_quantized)
        found = Looped(shard.spec, layers, norm, head, loops)
        found.compile()
        told("compile", 1, 1)
        return found
    not_compiled(kernels, problem)
    return None


def not_compiled(kernels: Kernels, why: str) -> None:
    """Say so, unless torch was asked for. Raises ConfigError when the loops were."""
    if kernels == "compiled":
        raise ConfigError(f"[device] kernels = 'compiled': {why}")
    if kernels == "auto":
        log.info("decode_not_compiled", why=why)


def are_wrong(kernels: Kernels, how: str) -> None:
    """The loops do not compute this model. Raises ConfigError when they were asked for."""
    if kernels == "compiled":
        raise ConfigError(f"[device] kernels = 'compiled': on this processor they are wrong: {how}")
    told = "torch computes this model, which may be slower: please report it with your processor"
    log.error("compiled_loops_are_wrong", how=how, what=told)


def _problem(shard: Shard, layers: Sequence[Layer], head: Tensor) -> str | None:
    """Why the loops cannot compute this model here."""
    if not head.is_cpu:
        return "they are for the CPU"
    if shard.size > 1:
        return "a tensor-parallel group sums within a layer"
    if not all(isinstance(layer.mlp, Mlp) for layer in layers):
        return "a model with experts is not compiled"
    return _numbas_problem(shard.spec)


def _numbas_problem(spec: ModelSpec) -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install 'pdrt[cpu]'"
    try:
        from pdrt.device.jit import loops, vectors
    except (ImportError, RuntimeError) as error:  # it does not fit, or has no place for its cache
        return f"numba: {error}"
    step, lanes = loops.STEP, vectors.LANES
    widths = spec.hidden, spec.heads * spec.head_dim, spec.intermediate
    if any(width % step for width in widths) or spec.head_dim % lanes:
        return f"widths {widths} or head_dim {spec.head_dim} are not multiples of {step}, {lanes}"
    return None


def _weights(layers: Sequence[Layer], heads: int) -> Weights:
    from pdrt.device.jit.decode import Weights

    linears = [(each.qkv, each.out, *_halves(each.mlp)) for each in layers]
    columns = list(zip(*linears, strict=True))
    biases = (_floats([_or_nothing(each.bias) for each in column]) for column in columns)
    scales = (_floats([_or_nothing(_scale(each)) for each in column]) for column in columns)
    return Weights(
        np.array([[linear.weight.data_ptr() for linear in row] for row in linears], np.int64),
        _floats([each.attention_norm for each in layers]),
        _floats([each.mlp_norm for each in layers]),
        _floats([_norms(each, heads) for each in layers]),
        *biases,
        *scales,
    )


def _halves(mlp: FeedForward) -> tuple[Matrix, Matrix]:
    assert isinstance(mlp, Mlp), "see _problem"
    return mlp.gate_up, mlp.down


def _scale(matrix: Matrix) -> Tensor | None:
    return matrix.scale if isinstance(matrix, QuantizedLinear) else None


def _or_nothing(rows: Tensor | None) -> Tensor:
    return torch.empty(0) if rows is None else rows


def _norms(layer: Layer, heads: int) -> Tensor:
    return torch.empty(heads, 0) if layer.qk_norm is None else layer.qk_norm


def _floats(rows: Sequence[Tensor]) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = torch.stack(list(rows)).float().numpy()
    return found
