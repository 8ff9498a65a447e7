"""Products of bfloat16 matrices on Intel's AMX: tiles of 16 rows of 64 bytes.

Weights are a tile as they lie in memory, 16 rows of 32 values; of the activations two values that
follow each other in a row stand side by side (`products._pack`). A tile that is multiplied is 16
rows of x deep whether they are there or not, so a product is the same for a row alone and among
others.

Weights in int8, all of which bfloat16 holds exactly, are widened into tiles first. What stands
side by side then is a value and the one 16 further on, since that takes half as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.jit.vectors import ADDRESS, BYTE, FEATURES, LANES, Writer, long

_TILE_BYTES: Final = TILE * DEEP * 2
ROOM: Final = 2 * 3 * _TILE_BYTES
HAS_TILES: Final = FEATURES.get("amx-bf16", False) and FEATURES.get("amx-tile", False)


def are_usable() -> bool:
    """Whether the processor has them, and the kernel lets this process use them: asked by torch."""
    asks = getattr(torch.cpu, "_init_amx", None)  # of torch 2.7 on; no public one
    return bool(HAS_TILES and asks and asks())


@intrinsic(prefer_literal=True)
def tile_dots(_context, kind, down, across, x, w, width, out, apart, room):
    """out[j, i] = w[j] . x[i] for j < down * TILE, i < across * TILE; down * across <= 6 (literal).

    w is bfloat16 or int8 with rows of `width` values, x as `products._pack` leaves it for the kind,
    out float32. For int8 there are ROOM bytes to widen it in.
    """
    rows, columns = down.literal_value, across.literal_value

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, _, x, w, width, out, apart, room = args
        if not HAS_TILES:
            return _context.get_dummy_value()  # never called: see `are_usable`
        to = Writer(builder, kind)
        for number in range(rows * columns):
            amx(to, "tilezero", number)
        if kind == types.int8:
            _widened_sums(to, rows, columns, (x, w, width, room))
        else:
            _sums(to, rows, columns, (x, w, width))
        for number in range(rows * columns):
            j, i = divmod(number, columns)
            row = to.at(out, builder.mul(long(j * TILE), apart), 4)
            pitch_out = builder.mul(apart, long(4))
            amx(to, "tilestored64", number, to.at(row, long(i * TILE), 4), pitch_out)
        return _context.get_dummy_value()

    return types.void(kind, down, across, *(ADDRESS,) * 6), write


def _sums(to: Writer, rows: int, columns: int, args: Sequence[Any]) -> None:
    """Of all of x and w, in tiles 0, 1, .. by rows and columns."""
    x, w, width = args
    pitch = to.b.mul(width, long(2))
    group = to.b.mul(pitch, long(TILE))  # bytes of 16 rows

    def step(at: Any, _: list[Any]) -> list[Any]:
        places = [
            to.b.add(to.b.add(w, to.b.mul(long(j), group)), to.at(long(0), at, 2))
            for j in range(rows)
        ]
        _multiply(to, columns, places, pitch, (x, width, at))
        _fetch_next(to, rows, w, width, at)
        return []

    to.loop(width, DEEP, [], step)


def _widened_sums(to: Writer, rows: int, columns: int, args: Sequence[Any]) -> None:
    """As `_sums`: while some tiles are multiplied the next ones are widened, in the cache."""
    x, w, width, room = args
    half = rows * _TILE_BYTES

    def step(at: Any, carried: list[Any]) -> list[Any]:
        here, there = carried
        following = to.b.add(at, long(DEEP))
        is_within = to.b.icmp_signed("<", following, width)
        _widen(to, rows, to.b.add(w, to.b.select(is_within, following, at)), width, there)
        places = [to.b.add(here, long(j * _TILE_BYTES)) for j in range(rows)]
        _multiply(to, columns, places, long(64), (x, width, at))
        _fetch_next(to, rows, w, width, at)
        return [there, here]

    _widen(to, rows, w, width, room)
    to.loop(width, DEEP, [room, to.b.add(room, long(half))], step)


def _widen(to: Writer, rows: int, w: Any, width: Any, out: Any) -> None:
    """DEEP values of rows * TILE rows as bfloat16 tiles: values 0, 16, 1, 17, .. of each."""
    row = w
    for line in range(rows * TILE):
        for part in range(0, TILE, LANES):
            firsts, seconds = (to.values(to.b.add(row, long(part + i))) for i in (0, TILE))
            to.write(to.pairs(firsts, seconds), to.b.add(out, long(64 * line + 4 * part)))
        row = to.b.add(row, width)


def _multiply(
    to: Writer, columns: int, places: Sequence[Any], pitch: Any, args: Sequence[Any]
) -> None:
    """Add the products of tiles at these places with those of x."""
    x, width, at = args
    group = to.b.mul(width, long(2 * TILE))
    block = to.b.add(x, to.b.mul(at, long(2 * TILE)))
    for j, place in enumerate(places):
        amx(to, "tileloadd64", 6, place, pitch)
        for i in range(columns):
            amx(to, "tileloadd64", 7, to.b.add(block, to.b.mul(long(i), group)), long(64))
            amx(to, "tdpbf16ps", j * columns + i, 6, 7)


def _fetch_next(to: Writer, rows: int, w: Any, width: Any, at: Any) -> None:
    """A part of the rows that follow those of w: all of it, when `at` has gone through width."""
    each = rows * TILE * to.bytes  # bytes of a column
    after = to.b.add(w, to.b.mul(width, long(each)))
    soon = to.b.add(after, to.b.mul(at, long(each)))
    for line in range(0, each * DEEP, 64):
        to.prefetch(to.b.add(soon, long(line)), near=2)


def amx(to: Writer, name: str, *args: Any) -> None:
    """An instruction on tiles, by number; an address, which comes after one, may have a pitch."""
    tiles = [ir.Constant(BYTE, each) for each in args if isinstance(each, int)]
    place = [to.b.inttoptr(each, BYTE.as_pointer()) for each in args[len(tiles) :][:1]]
    to.call(f"llvm.x86.{name}", ir.VoidType(), *tiles, *place, *args[len(tiles) + 1 :])


def _configurer(name: str) -> Any:
    @intrinsic
    def configure(_context, address):
        def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            to = Writer(builder, types.uint16)
            if not HAS_TILES:
                return _context.get_dummy_value()
            amx(to, name, args[0])
            return _context.get_dummy_value()

        return types.void(ADDRESS), write

    return configure


load_tiles = _configurer("ldtilecfg")  # the configuration at an address
save_tiles = _configurer("sttilecfg")
