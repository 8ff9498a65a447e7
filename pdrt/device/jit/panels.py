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
from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.jit.tiles import HAS_TILES, amx
from pdrt.device.jit.vectors import (
    ADDRESS,
    BYTE,
    FLOAT,
    INT,
    LANES,
    ZEROS,
    Writer,
    bytes_of,
    long,
)

LINE: Final = 4 * TILE  # bytes
# Values that a block of a product is deep, by how large they are: measured.
DEPTH: Final = 512
_DEPTH_OF_PAIRS: Final = 256
_DOWN: Final = 8 if LANES == TILE else 4  # rows of a matrix, and panels, whose sums fill
_ACROSS: Final = 3 if LANES == TILE else 1  # the registers
_STEPS: Final = 4  # of a product's depth, one after the other
_SOON: Final = 8  # lines: what a panel's line is fetched ahead of its use
_PARTS: Final = range(0, LINE, 4 * LANES)  # vectors of a line


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
        for part in _PARTS
    ]

    def some(at: Any, sums: list[Any]) -> list[Any]:
        first, line = b.add(w, b.mul(at, right)), b.add(x, b.mul(at, long(LINE)))
        for more in range(_STEPS):
            lines = [b.add(b.add(line, each), long(LINE * more)) for each in panels]
            values = [to.floats(b.add(each, long(part))) for each in lines for part in _PARTS]
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


@intrinsic
def squares(_context, x, count, out):
    """out[token] = sum over i < count of x[i, token] squared, for a panel x."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, count, out = args
        to = Writer(builder, types.float32)

        def line(at: Any, sums: list[Any]) -> list[Any]:
            here = to.at(x, at, LINE)
            values = [to.floats(builder.add(here, long(part))) for part in _PARTS]
            return [to.multiply_add(v, v, s) for v, s in zip(values, sums, strict=True)]

        sums = to.loop(count, 1, [ZEROS] * len(_PARTS), line)
        _write_line(to, sums, out)
        return _context.get_dummy_value()

    return types.void(*(ADDRESS,) * 3), write


@intrinsic
def softmax(_context, kind, scores, count, state, shares):
    """Go on with each token's softmax by `count` keys, an even number: scores [count, TILE].

    Scores are to the base of 2.

    state [3, TILE]: the largest score so far, the sum of exponentials, and, after the call, what
    to multiply with that stands for earlier keys. The shares, not yet divided by the sum, are
    left as products take them; their place may be that of the scores.
    """

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, scores, count, state, shares = args
        to = Writer(builder, kind)
        for part in _PARTS:
            here, kept = (builder.add(each, long(part)) for each in (scores, state))
            places = [builder.add(kept, long(LINE * each)) for each in range(3)]
            most, total = (to.floats(each) for each in places[:2])

            def look(at: Any, found: list[Any], here: Any = here) -> list[Any]:
                return [to.larger(found[0], to.floats(to.at(here, at, LINE)))]

            (highest,) = to.loop(count, 1, [most], look)

            out = builder.add(shares, long(part))

            def two(
                at: Any, sums: list[Any], here: Any = here, top: Any = highest, out: Any = out
            ) -> list[Any]:
                places = [to.at(here, each, LINE) for each in (at, builder.add(at, long(1)))]
                ups = [to.exp2(builder.fsub(to.floats(each), top)) for each in places]
                to.write_two(ups, out, at, LINE)
                return [builder.fadd(s, up) for s, up in zip(sums, ups, strict=True)]

            less = to.exp2(builder.fsub(most, highest))
            first, second = to.loop(count, 2, [builder.fmul(total, less), ZEROS], two)
            news = highest, builder.fadd(first, second), less
            for value, place in zip(news, places, strict=True):
                to.write(value, place)
        return _context.get_dummy_value()

    return types.void(kind, *(ADDRESS,) * 4), write


@intrinsic
def rescale(_context, panel, count, factors):
    """panel [count, TILE] *= factors [TILE], unless all of these are 1."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        panel, count, factors = args
        to = Writer(builder, types.float32)
        for part in _PARTS:
            by = to.floats(builder.add(factors, long(part)))
            here = builder.add(panel, long(part))

            def line(at: Any, _: list[Any], here: Any = here, by: Any = by) -> list[Any]:
                place = to.at(here, at, LINE)
                to.write(builder.fmul(to.floats(place), by), place)
                return []

            with builder.if_then(to.any(builder.fcmp_unordered("!=", by, to.constant(1.0)))):
                to.loop(count, 1, [], line)
        return _context.get_dummy_value()

    return types.void(*(ADDRESS,) * 3), write


@intrinsic
def gate(_context, kind, gates, ups, count, out):
    """silu(gates) * ups of panels [count, TILE], as products take it; count is even."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, gates, ups, count, out = args
        to = Writer(builder, kind)
        minus_log2_e, one = to.constant(-1.4426950408889634), to.constant(1.0)

        def two(at: Any, _: list[Any]) -> list[Any]:
            for part in _PARTS:
                found = []
                for each in (at, builder.add(at, long(1))):
                    place = builder.add(to.at(long(0), each, LINE), long(part))
                    g, up = (to.floats(builder.add(base, place)) for base in (gates, ups))
                    power = to.exp2(builder.fmul(g, minus_log2_e))
                    found.append(builder.fmul(builder.fdiv(g, builder.fadd(power, one)), up))
                to.write_two(found, builder.add(out, long(part)), at, LINE)
            return []

        to.loop(count, 2, [], two)
        return _context.get_dummy_value()

    return types.void(kind, *(ADDRESS,) * 4), write


def _write_line(to: Writer, vectors: Sequence[Any], place: Any) -> None:
    for vector, part in zip(vectors, _PARTS, strict=True):
        to.write(vector, to.b.add(place, long(part)))


@intrinsic
def copy(_context, to_address, from_address, count):
    """That many bytes, between places that do not overlap."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        places = [builder.inttoptr(each, BYTE.as_pointer()) for each in args[:2]]
        Writer(builder, types.uint16).call(
            "llvm.memcpy.p0.p0.i64", ir.VoidType(), *places, args[2], ir.Constant(ir.IntType(1), 0)
        )
        return _context.get_dummy_value()

    return types.void(*(ADDRESS,) * 3), write


@intrinsic
def turn_tokens(_context, tokens, row, out, apart):
    """out[i, t] = tokens[t, i] for 16 values of 32 tokens in 16 bits; rows of both, in bytes."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        tokens, row, out, apart = args
        to = Writer(builder, types.uint16)
        halves, words = ir.VectorType(ir.IntType(16), TILE), ir.VectorType(INT, TILE)
        by_16 = ir.Constant(words, [16] * TILE)

        def values(number: int) -> Any:
            place = builder.add(tokens, builder.mul(long(number), row))
            return builder.zext(to.read(halves, place), words)

        found = [
            builder.or_(values(t), builder.shl(values(t + 1), by_16)) for t in range(0, 2 * TILE, 2)
        ]
        for number, vector in enumerate(_transposed(builder, found)):
            to.write(vector, builder.add(out, builder.mul(long(number), apart)))
        return _context.get_dummy_value()

    return types.void(*(ADDRESS,) * 4), write


def _transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Each bit of a row's number changes places with that bit of a column's, one after another."""
    found, bit = list(rows), len(rows) // 2
    while bit:
        for i in range(len(rows)):
            if not i & bit:
                low, high, columns = found[i], found[i + bit], range(len(rows))
                stay = [len(rows) + j - bit if j & bit else j for j in columns]
                go = [len(rows) + j if j & bit else j + bit for j in columns]
                found[i], found[i + bit] = (
                    builder.shuffle_vector(low, high, ir.Constant(low.type, each))
                    for each in (stay, go)
                )
        bit //= 2
    return found


@intrinsic
def pair(_context, low, high):
    """Two floats rounded (to even) to bfloat16, in 32 bits."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        halves = []
        for each in args:
            bits = builder.bitcast(each, INT)
            odd = builder.and_(builder.lshr(bits, ir.Constant(INT, 16)), ir.Constant(INT, 1))
            halves.append(builder.add(builder.add(bits, ir.Constant(INT, 0x7FFF)), odd))
        low = builder.lshr(halves[0], ir.Constant(INT, 16))
        return builder.or_(low, builder.and_(halves[1], ir.Constant(INT, 0xFFFF0000)))

    return types.uint32(types.float32, types.float32), write
