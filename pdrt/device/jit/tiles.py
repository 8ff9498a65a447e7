"""Products of bfloat16 matrices on Intel's AMX: tiles of 16 rows of 64 bytes.

Weights are a tile as they lie in memory, 16 rows of 32 values; of the activations (`pack`) two
values that follow each other in a row stand side by side. A tile that is multiplied is 16 rows of
x deep whether they are there or not, so a product is the same for a row alone and among others.

Weights in int8, all of which bfloat16 holds exactly, are widened first, a portion at a time. What
stands side by side then is a value and the one 16 further on, since that takes half as long.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdrt.device.jit.vectors import ADDRESS, AHEAD, BYTE, FEATURES, LANES, Writer, long

TILE: Final = 16
DEEP: Final = 32  # values of a row that one instruction multiplies


_HAS_THEM: Final = FEATURES.get("amx-bf16", False) and FEATURES.get("amx-tile", False)


def are_usable() -> bool:
    """Whether the processor has them, and the kernel lets this process use them: asked by torch."""
    asks = getattr(torch.cpu, "_init_amx", None)  # of torch 2.7 on; no public one
    return bool(_HAS_THEM and asks and asks())


@intrinsic(prefer_literal=True)
def tile_dots(_context, down, across, x, w, width, out, apart):
    """out[j, i] = w[j] . x[i] for j < down * TILE, i < across * TILE; down * across <= 6 (literal).

    w is bfloat16 with rows of `width` values, x as `pack` leaves it, out float32.
    """
    rows, columns = down.literal_value, across.literal_value

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, x, w, width, out, apart = args
        if not _HAS_THEM:
            return _context.get_dummy_value()  # never called: see `are_usable`
        to = Writer(builder, types.uint16)
        pitch = builder.mul(width, long(2))
        group = builder.mul(pitch, long(TILE))  # bytes of 16 rows, of w and of x alike
        after = builder.add(w, builder.mul(group, long(rows)))
        for number in range(rows * columns):
            _amx(to, "tilezero", number)

        def step(at: Any, _: list[Any]) -> list[Any]:
            soon = builder.add(after, builder.mul(at, long(2 * TILE * rows)))
            block = builder.add(x, builder.mul(at, long(2 * TILE)))
            for j in range(rows):
                here = builder.add(
                    builder.add(w, builder.mul(long(j), group)), to.at(long(0), at, 2)
                )
                _amx(to, "tileloadd64", 6, here, pitch)
                for line in range(TILE):
                    to.prefetch(builder.add(soon, long(64 * (j * TILE + line))), near=2)
                for i in range(columns):
                    there = builder.add(block, builder.mul(long(i), group))
                    _amx(to, "tileloadd64", 7, there, long(64))
                    _amx(to, "tdpbf16ps", j * columns + i, 6, 7)
            return []

        to.loop(width, DEEP, [], step)
        for number in range(rows * columns):
            j, i = divmod(number, columns)
            row = to.at(out, builder.mul(long(j * TILE), apart), 4)
            pitch_out = builder.mul(apart, long(4))
            _amx(to, "tilestored64", number, to.at(row, long(i * TILE), 4), pitch_out)
        return _context.get_dummy_value()

    return types.void(down, across, *(ADDRESS,) * 5), write


@intrinsic
def widen(_context, w, count, out):
    """int8 w [count] as bfloat16 in `out`, of each DEEP values 0, 16, 1, 17, .. in this order."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        w, count, out = args
        to = Writer(builder, types.int8)

        def step(at: Any, _: list[Any]) -> list[Any]:
            here = builder.add(w, at)
            to.prefetch(builder.add(here, long(AHEAD)), near=2)
            for part in range(0, TILE, LANES):
                firsts, seconds = (to.values(builder.add(here, long(part + i))) for i in (0, TILE))
                there = builder.add(to.at(out, at, 2), long(4 * part))
                to.write(to.pairs(firsts, seconds), there)
            return []

        to.loop(count, DEEP, [], step)
        return _context.get_dummy_value()

    return types.void(*(ADDRESS,) * 3), write


def _amx(to: Writer, name: str, *args: Any) -> None:
    """An instruction on tiles, by number; an address, which comes after one, may have a pitch."""
    tiles = [ir.Constant(BYTE, each) for each in args if isinstance(each, int)]
    place = [to.b.inttoptr(each, BYTE.as_pointer()) for each in args[len(tiles) :][:1]]
    to.call(f"llvm.x86.{name}", ir.VoidType(), *tiles, *place, *args[len(tiles) + 1 :])


def _configurer(name: str) -> Any:
    @intrinsic
    def configure(_context, address):
        def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            to = Writer(builder, types.uint16)
            if not _HAS_THEM:
                return _context.get_dummy_value()
            _amx(to, name, args[0])
            return _context.get_dummy_value()

        return types.void(ADDRESS), write

    return configure


load_tiles = _configurer("ldtilecfg")  # the configuration at an address
save_tiles = _configurer("sttilecfg")
