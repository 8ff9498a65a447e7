"""What takes how long on some machine: a small TOML file, and the two sums made from it.

Files in pdrt/sim/costs are known by their names. All times are of one worker, that is of one
scheduler with all its devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from pdrt.errors import ConfigError
from pdrt.settings import Positive, Section, check, read_toml

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Point = Annotated[tuple[NotNegative, NotNegative], Field(strict=False)]
Factor = Annotated[tuple[Positive, AboveZero], Field(strict=False)]
Row = Annotated[tuple[AboveZero, AboveZero, AboveZero, AboveZero], Field(strict=False)]

_MOST_BLOCKS: Final = 4_000_000
_MS: Final = 1e-3
_US: Final = 1e-6
_NS: Final = 1e-9


class ModelCost(Section):
    kv_bytes_per_token: Positive  # of all layers, on all devices of a worker together


class InstanceCost(Section):
    """The scheduler's settings, as in a node's [scheduler] and [transfer] tables."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    kv_tokens: Positive  # that one worker's pool holds
    max_prefill_tokens: Positive = 512
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    tp: Positive = 1  # devices in a worker
    reserved_tokens: Positive = 64
    adaptive_reserve: bool = True
    max_waiting: Positive = 1024  # beyond: 429
    retraction: Literal["reprefill", "local"] = "reprefill"
    chunked: bool = True  # blocks leave while the next chunk computes
    early_first_token: bool = True


class StepCost(Section):
    """One device step takes base + prompt part + decode part."""

    base_ms: NotNegative = 0.0
    token_us: NotNegative = 0.0  # for each prompt token
    pair_ns: NotNegative = 0.0  # for each prompt token and each token that it looks at
    decode_ms: Annotated[tuple[Point, ...], Field(strict=False)] = ()  # (sequences, ms); 0 is 0
    context_ns: NotNegative = 0.0  # for each token that a decoding sequence looks at

    @model_validator(mode="after")
    def _rises(self) -> Self:
        batches = [batch for batch, _ in self.decode_ms]
        if any(b <= a for a, b in zip([0.0, *batches], batches, strict=False)):
            raise ValueError(f"decode_ms: batches must rise from above 0, not {batches}")
        return self


class RequestCost(Section):
    front_ms: NotNegative = 0.0  # router and server, before a prompt can be planned
    handshake_ms: NotNegative = 0.0  # apart: from decode's blocks until prefill knows of them
    token_ms: NotNegative = 0.0  # from a step's end until the client has its token
    # Work of one process that stands for router, nodes and clients; what waits for it is late.
    cpu_ms: NotNegative = 0.0  # for each request, before it is planned
    token_cpu_ms: NotNegative = 0.0  # for each token, before its client has it


class DpCost(Section):
    """What it means that several workers (dp ranks) are one instance."""

    lockstep: bool = False  # its ranks step together; each step lasts as long as the longest
    exchange_ms: NotNegative = 0.0  # and longer by this times (ranks - 1) / ranks


class TransferCost(Section):
    curve: Annotated[tuple[Row, ...], Field(strict=False)] = ()  # (bytes, GB/s, avg us, p99 us)
    parallel: Positive = 1  # writes that are under way at once
    devices: Positive = 1  # that wrote together when the curve was measured
    cpu_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # of its time: work on shared cores

    @model_validator(mode="after")
    def _rises(self) -> Self:
        sizes = [row[0] for row in self.curve]
        if any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"curve: sizes must rise, not {sizes}")
        return self


class MachineCost(Section):
    cores: Annotated[int, Field(ge=0)] = 0  # that all workers share; 0: each has its own
    # (workers that step at once, how many times as long a step takes): they share more than cores.
    crowd: Annotated[tuple[Factor, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _rises(self) -> Self:
        busy = [count for count, _ in self.crowd]
        if any(b <= a for a, b in pairwise(busy)) or (self.crowd and not self.cores):
            raise ValueError(f"crowd: counts must rise, and [machine] cores be given, not {busy}")
        return self


class Cost(Section):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    about: str
    model: ModelCost
    instance: InstanceCost
    step: StepCost
    request: RequestCost = RequestCost()
    dp: DpCost = DpCost()
    transfer: TransferCost = TransferCost()
    machine: MachineCost = MachineCost()

    @property
    def blocks(self) -> int:
        """KV blocks of one worker."""
        return self.instance.kv_tokens // self.instance.block_size

    @property
    def block_bytes(self) -> int:
        return self.instance.block_size * self.model.kv_bytes_per_token

    @model_validator(mode="after")
    def _has_blocks(self) -> Self:
        if self.blocks > _MOST_BLOCKS:
            raise ValueError(
                f"[instance] kv_tokens = {self.instance.kv_tokens} is more than {_MOST_BLOCKS}"
                f" blocks of {self.instance.block_size}"
            )
        if self.blocks < 1:
            raise ValueError(
                f"[instance] kv_tokens = {self.instance.kv_tokens} is less than a block of"
                f" {self.instance.block_size}"
            )
        return self


def shipped() -> list[str]:
    """Names of the files that come with pdrt."""
    every = files("pdrt.sim").joinpath("costs").iterdir()
    return sorted(one.name.removesuffix(".toml") for one in every if one.name.endswith(".toml"))


def load(name: str) -> Cost:
    """A shipped file's name, or a path. Raises ConfigError."""
    if name in shipped():
        path = Path(str(files("pdrt.sim").joinpath("costs", f"{name}.toml")))
    elif Path(name).exists():
        path = Path(name)
    else:
        known = ", ".join(shipped())
        raise ConfigError(f"--cost {name}: neither a file nor one that comes with pdrt: {known}")
    return check(Cost, read_toml(path), str(path))


def step_s(
    step: StepCost, *, prompt_tokens: int = 0, pairs: float = 0, decoding: int = 0, context: int = 0
) -> float:
    """How long one step of a worker lasts that has all its devices to itself.

    `pairs`: for each prompt token the tokens before it and itself, summed up. `context`: the same
    for the sequences that decode.
    """
    prompt = prompt_tokens * step.token_us * _US + pairs * step.pair_ns * _NS
    decode = decode_ms(step, decoding) * _MS + context * step.context_ns * _NS
    return step.base_ms * _MS + prompt + decode


def decode_ms(step: StepCost, batch: int) -> float:
    """Between two points on their line, beyond the last one on the last two's."""
    points = ((0.0, 0.0), *step.decode_ms)
    if batch <= 0 or len(points) < 2:
        return 0.0
    at = next((i for i, (size, _) in enumerate(points) if size >= batch), len(points) - 1)
    (low, before), (high, after) = points[at - 1], points[at]
    return max(0.0, before + (after - before) * (batch - low) / (high - low))


def chunk_pairs(start: int, count: int) -> float:
    """Of a chunk of `count` tokens that begins at token `start`: how many tokens are looked at."""
    return count * start + count * (count + 1) / 2


def write_us(transfer: TransferCost, size: float, *, tail: bool = False) -> float:
    """One write of so many bytes by as many devices as were measured; `tail`: p99, not mean.

    Between two sizes on a line in their logarithms; smaller ones last as long as the smallest,
    larger ones go at the largest one's rate. Without a curve it takes no time.
    """
    curve = transfer.curve
    if not curve or size <= 0:
        return 0.0
    column = 3 if tail else 2
    if size <= curve[0][0]:
        return curve[0][column]
    for low, high in pairwise(curve):
        if size <= high[0]:
            share = math.log(size / low[0]) / math.log(high[0] / low[0])
            return float(low[column] * (high[column] / low[column]) ** share)
    return curve[-1][column] * size / curve[-1][0]


def transfer_s(
    cost: Cost, writes: Sequence[int], write: Callable[[float], float] | None = None
) -> float:
    """How long one worker needs to write these, each of so many bytes, with its link to itself.

    `parallel` of them are under way at once, but no faster than the curve's best rate. `write` is
    `write_us`, for who asks often.
    """
    transfer = cost.transfer
    timed = write or partial(write_us, transfer)
    if not writes or not transfer.curve:
        return 0.0
    share = transfer.devices / cost.instance.tp
    each = [timed(size * share) for size in writes]
    best = max(row[1] for row in transfer.curve) * 1e9
    return max(sum(each) / transfer.parallel * _US, max(each) * _US, sum(writes) * share / best)
