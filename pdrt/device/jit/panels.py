"""Products with many rows: panels of 16 tokens side by side, as wide as the widest vector.

A panel [values, TILE] has one line of 64 bytes for each value of its tokens in float32. What a
matrix multiplies is, for float32, such a panel; for bfloat16, which AMX multiplies, the values 2 i
and 2 i + 1 of a token stand side by side in 32 bits, [values / 2, TILE]. Results are panels again,
so nothing is ever turned round, and norms, rotations and softmax go through whole lines.

A block of the matrix stays in the first-level cache while all panels pass it, and the panels in
the second: therefore products go through some values of all rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdrt.device.jit.compiled import loop
from pdrt.device.jit.lines import LINE, PARTS
from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.jit.tiles import HAS_TILES, amx
from pdrt.device.jit.vectors import (
    ADDRESS,
    FLOAT,
    LANES,
    ZEROS,
    Writer,
    bytes_of,
    long,
)

# Values that a block of a product is deep, by how large they are: measured.
DEPTH: Final = 512
_DEPTH_OF_PAIRS: Final = 256
_DOWN: Final = 8 if LANES == TILE else 4  # rows of a matrix, and panels, whose sums fill
_ACROSS: Final = 3 if LANES == TILE else 1  # the registers
_STEPS: Final = 4  # of a product's depth, one after the other
_SOON: Final = 8  # lines: what a panel's line is fetched ahead of its use


@intrinsic
def _vector_block(_context, turned, across, w, apart, x, panel, depth, out, out_panel, fresh):
    """out[i][j] = (fresh: 0, else out[i][j]) + sum over k < depth of w[j, k] * x[i][k].

    For j < _DOWN and i < across <= _ACROSS; depth % _STEPS == 0. Rows of w lie `apart` bytes apart,
    or, when it is turned, its columns; panels of x and out `panel` and `out_panel` bytes.
    """

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        turned, across, *given = args
        for is_turned, columns in product((False, True), range(1, _ACROSS + 1)):
            wide = builder.icmp_signed("==", across, long(columns))
            truth = ir.Constant(turned.type, is_turned)
            with builder.if_then(builder.and_(wide, builder.icmp_signed("==", turned, truth))):
                _vectors(Writer(builder, types.float32), columns, given, is_turned=is_turned)
        return _context.get_dummy_value()

    return types.void(types.boolean, *(ADDRESS,) * 8, types.boolean), write


def _vectors(to: Writer, columns: int, args: Sequence[Any], *, is_turned: bool) -> None:
    """What `_vector_block` does, for so many panels.

    The distances that are known are written as such, and a value of w is used up before the next
    one: otherwise the compiler has too few registers, and sums go through memory.
    """
    w, apart, x, panel, depth, out, out_panel, fresh = args
    b, near = to.b, long(to.bytes)
    down, right = (near, apart) if is_turned else (apart, near)
    rows = [b.mul(long(j), down) for j in range(_DOWN)]
    panels = [b.mul(long(i), panel) for i in range(columns)]
    outs = [
        b.add(b.add(out, b.mul(long(i), out_panel)), long(LINE * j + part))
        for j in range(_DOWN)
        for i in range(columns)
        for part in PARTS
    ]

    def some(at: Any, sums: list[Any]) -> list[Any]:
        first, line = b.add(w, b.mul(at, right)), b.add(x, b.mul(at, long(LINE)))
        for more in range(_STEPS):
            lines = [b.add(b.add(line, each), long(LINE * more)) for each in panels]
            values = [to.floats(b.add(each, long(part))) for each in lines for part in PARTS]
            for each in lines:
                to.prefetch(b.add(each, long(LINE * _SOON)))
            news = list[Any]()
            for row in rows:
                place = b.add(b.add(first, row), b.mul(right, long(more)))
                left, own = to.spread(to.read(FLOAT, place)), sums[len(news) :]
                news += [to.multiply_add(left, v, s) for v, s in zip(values, own, strict=False)]
            sums = news
        return sums

    olds = [b.select(fresh, ZEROS, to.floats(each)) for each in outs]
    for total, place in zip(to.loop(depth, _STEPS, olds, some), outs, strict=True):
        to.write(total, place)


@intrinsic(prefer_literal=True)
def _tile_block(_context, down, across, w, row, x, panel, depth, out, out_panel, fresh):
    """As `_vector_block` for bfloat16, down * TILE rows of w; its values lie side by side.

    down, across <= 2 and depth % DEEP == 0.
    """
    rows, columns = down.literal_value, across.literal_value

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, w, row, x, panel, depth, out, out_panel, fresh = args
        if not HAS_TILES:
            return _context.get_dummy_value()  # never called: see `tiles.are_usable`
        to = Writer(builder, types.uint16)
        ws = [builder.add(w, builder.mul(long(TILE * j), row)) for j in range(rows)]
        xs = [builder.add(x, builder.mul(long(i), panel)) for i in range(columns)]
        outs = [
            builder.add(builder.add(out, builder.mul(long(i), out_panel)), long(LINE * TILE * j))
            for j in range(rows)
            for i in range(columns)
        ]
        _begin(to, outs, fresh)

        def some(at: Any, _: list[Any]) -> list[Any]:
            for j, each in enumerate(ws):
                amx(to, "tileloadd64", 4 + j, to.at(each, at, 2), row)
            for i, each in enumerate(xs):
                amx(to, "tileloadd64", 6 + i, to.at(each, at, LINE // 2), long(LINE))
            for j in range(rows):
                for i in range(columns):
                    amx(to, "tdpbf16ps", j * columns + i, 4 + j, 6 + i)
            return []

        to.loop(depth, DEEP, [], some)
        for number, place in enumerate(outs):
            amx(to, "tilestored64", number, place, long(LINE))
        return _context.get_dummy_value()

    return types.void(down, across, *(ADDRESS,) * 7, types.boolean), write


def _begin(to: Writer, places: Sequence[Any], fresh: Any) -> None:
    """Tiles 0, 1, .. with zeros, or what is at these places."""
    with to.b.if_else(fresh) as (anew, further):
        with anew:
            for number in range(len(places)):
                amx(to, "tilezero", number)
        with further:
            for number, place in enumerate(places):
                amx(to, "tileloadd64", number, place, long(LINE))


@loop()
def _with_vectors(count, w, n, apart, turned, x, panel, depth, out, out_panel, fresh):
    near = 4 if turned else apart
    for j in range(0, n, _DOWN):
        rows, to = w + j * near, out + LINE * j
        for i in range(0, count, _ACROSS):
            some, here, there = min(_ACROSS, count - i), x + i * panel, to + i * out_panel
            _vector_block(turned, some, rows, apart, here, panel, depth, there, out_panel, fresh)


@loop()
def _with_tiles(count, w, n, row, x, panel, depth, out, out_panel, fresh):
    for j in range(0, n, 2 * TILE):
        rows, to = w + j * row, out + LINE * j
        for i in range(0, count, 2):
            here, there = x + i * panel, to + i * out_panel
            is_pair = count - i >= 2
            if n - j < 2 * TILE:
                if is_pair:
                    _tile_block(1, 2, rows, row, here, panel, depth, there, out_panel, fresh)
                else:
                    _tile_block(1, 1, rows, row, here, panel, depth, there, out_panel, fresh)
            elif is_pair:
                _tile_block(2, 2, rows, row, here, panel, depth, there, out_panel, fresh)
            else:
                _tile_block(2, 1, rows, row, here, panel, depth, there, out_panel, fresh)


@loop()
def block(kind, count, w, n, apart, turned, x, panel, depth, out, out_panel, fresh):
    """out[i][j] = (fresh: 0, else out[i][j]) + w[j] . x[i] for j < n and i < count panels.

    All are addresses; n % TILE == 0, and depth % DEEP == 0. Rows of w lie `apart` bytes apart, or,
    when it is turned, which is for float32 alone, columns.
    """
    if bytes_of(kind) == 2:
        _with_tiles(count, w, n, apart, x, panel, depth, out, out_panel, fresh)
    else:
        _with_vectors(count, w, n, apart, turned, x, panel, depth, out, out_panel, fresh)


@loop()
def multiply(kind, held, count, w, n, width, x, out, out_panel, fresh, room):
    """As `block` for rows of w [n, width] that lie one after the other, and panels as well.

    w is of the kind `held`: where that is int8, it is widened into `room` [n, DEPTH] part by part.
    """
    size, most = bytes_of(kind), _depth(kind)
    for at in range(0, width, most):
        depth = min(most, width - at)
        here, there, apart = w + bytes_of(held) * at, x + size * TILE * at, bytes_of(held) * width
        if bytes_of(held) < size:
            for row in range(n):
                widen(kind, here + row * apart, depth, room + row * depth * size)
            here, apart = room, depth * size
        panel, anew = size * TILE * width, fresh and at == 0
        block(kind, count, here, n, apart, False, there, panel, depth, out, out_panel, anew)


@loop()
def _depth(kind):
    return _DEPTH_OF_PAIRS if bytes_of(kind) == 2 else DEPTH


@intrinsic
def widen(_context, kind, row, count, out):
    """`count` values in int8, a multiple of LANES, to the kind: float32 or bfloat16."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, row, count, out = args
        narrow, to = Writer(builder, types.int8), Writer(builder, kind)

        def some(at: Any, _: list[Any]) -> list[Any]:
            to.write(to.narrowed(narrow.values(builder.add(row, at))), to.at(out, at, to.bytes))
            return []

        to.loop(count, LANES, [], some)
        return _context.get_dummy_value()

    return types.void(kind, *(ADDRESS,) * 3), write
