"""A cost file's [step] from measured steps: non-negative least squares of relative errors.

The model is linear in its numbers once the decode part is written as slopes between two batch
sizes, so the fit has one answer; no number is negative, and a larger batch never costs less.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.bench.step_grid import Shape
from pdrt.errors import ConfigError
from pdrt.sim.cost import StepCost, step_s

Array: TypeAlias = npt.NDArray[np.float64]
_DIGITS: Final = 5
_MOST_TURNS: Final = 100
_ZERO: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Residual:
    """A measured step beside what the fitted cost says of it."""

    shape: Shape
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Relative; above 0 where the fit says more than was measured."""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Fit:
    step: StepCost
    residuals: Sequence[Residual]

    @property
    def worst(self) -> Residual:
        return max(self.residuals, key=lambda one: abs(one.error))

    @property
    def usual_error(self) -> float:
        return statistics.median(abs(one.error) for one in self.residuals)


def fit(measured: Mapping[Shape, float]) -> Fit:
    """Seconds of each shape in, milliseconds and so on out. Raises ConfigError for too few."""
    batches = sorted({shape.decoding for shape in measured} - {0})
    if len(measured) < 4 + len(batches):
        raise ConfigError(f"{len(measured)} steps are too few to fit a cost to")
    rows = np.array([_row(shape, batches) for shape in measured])
    seconds = np.array(list(measured.values()))
    found = nnls(rows / seconds[:, None], np.ones(len(seconds)))
    step = _step(found, batches)
    return Fit(step, [Residual(s, took, cost_s(step, s)) for s, took in measured.items()])


def cost_s(step: StepCost, shape: Shape) -> float:
    return step_s(
        step,
        prompt_tokens=shape.prompt_tokens,
        pairs=shape.pairs,
        decoding=shape.decoding,
        context=shape.context_tokens,
    )


def _row(shape: Shape, batches: Sequence[int]) -> list[float]:
    """What multiplies base, token, pair, context and each slope, in the order of `_step`."""
    slopes = [
        float(np.clip(shape.decoding - low, 0, high - low))
        for low, high in itertools.pairwise((0, *batches))
    ]
    return [1.0, shape.prompt_tokens, shape.pairs, shape.context_tokens, *slopes]


def _step(found: Array, batches: Sequence[int]) -> StepCost:
    base, token, pair, context, *slopes = map(float, found)
    steps = [high - low for low, high in itertools.pairwise((0, *batches))]
    rises = [slope * size for slope, size in zip(slopes, steps, strict=True)]
    totals = itertools.accumulate(rises)
    return StepCost(
        base_ms=round(base * 1e3, _DIGITS),
        token_us=round(token * 1e6, _DIGITS),
        pair_ns=round(pair * 1e9, _DIGITS),
        context_ns=round(context * 1e9, _DIGITS),
        decode_ms=tuple(
            (float(n), round(total * 1e3, _DIGITS))
            for n, total in zip(batches, totals, strict=True)
        ),
    )


def nnls(rows: Array, wanted: Array) -> Array:
    """The x >= 0 for which rows @ x comes nearest to `wanted` (Lawson and Hanson's active set)."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    matrix = rows / scale
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    for _ in range(_MOST_TURNS):
        pull = matrix.T @ (wanted - matrix @ x)
        pull[free] = -np.inf
        if free.all() or pull.max() <= _ZERO:
            break
        free[int(pull.argmax())] = True
        x = _settled(matrix, wanted, x, free)
    found: Array = x / scale
    return found


def _settled(matrix: Array, wanted: Array, x: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Least squares over the free ones; who would fall below zero is bound to it again."""
    while True:
        best = np.zeros_like(x)
        best[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
        below = free & (best <= _ZERO)
        if not below.any():
            return best
        share = np.min(x[below] / np.maximum(x[below] - best[below], _ZERO))
        x = x + share * (best - x)
        free &= x > _ZERO
        x[~free] = 0.0
        if not free.any():
            return x
