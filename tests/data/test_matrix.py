"""Byte-exact: every pair of layouts, through real desks and real transports."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from random import Random

import pytest

from tests.data.fabric import POOL, Fabric, Model, transfer

TRANSPORTS = [name for name in ("shm", "tcp") if find_spec(f"pdrt.data.transport.{name}")]
SIZES = [*product((1, 2, 4), (1, 2, 4))]
MODELS = {"mha": (4, False), "gqa": (2, False), "one_head": (1, False), "mla": (1, True)}
ROOMS = 4  # as many as replicas can be: each of them writes once


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
async def test_every_byte_arrives_where_it_belongs_and_nothing_else_is_touched(
    prefill_tp: int, decode_tp: int, model: str, dtype: str, transport: str
) -> None:
    """CASES 62, 63: what lies in the pool is compared whole with what the model's KV says."""
    heads, is_latent = MODELS[model]
    random = Random(f"{prefill_tp} {decode_tp} {model} {dtype}")
    async with Fabric(Model(heads, dtype, is_latent), prefill_tp, decode_tp, transport) as fabric:
        free = [random.sample(range(POOL), POOL) for _ in fabric.ds]
        for room in range(ROOMS):
            await transfer(fabric, room, random, free)
        for d, own in zip(fabric.ds, free, strict=True):
            assert (d.pool[own] == 0xEE).all(), "a block that was given to nobody was written"
            assert not d.desk.rooms
        for p in fabric.ps:
            assert not p.desk.rooms
            assert p.desk.counters["sent_bytes"], "a replica never wrote"
