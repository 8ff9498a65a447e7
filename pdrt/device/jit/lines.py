"""What goes through panels of 16 tokens line by line: norms, softmax, gates, and changes of form.

A line is one value of each token in float32, see `panels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdrt.device.jit.sizes import TILE
from pdrt.device.jit.vectors import (
    ADDRESS,
    BYTE,
    INT,
    LANES,
    ZEROS,
    Writer,
    long,
)

LINE: Final = 4 * TILE  # bytes
PARTS: Final = range(0, LINE, 4 * LANES)  # vectors of a line


@intrinsic
def squares(_context, x, count, out):
    """out[token] = sum over i < count of x[i, token] squared, for a panel x."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, count, out = args
        to = Writer(builder, types.float32)

        def line(at: Any, sums: list[Any]) -> list[Any]:
            here = to.at(x, at, LINE)
            values = [to.floats(builder.add(here, long(part))) for part in PARTS]
            return [to.multiply_add(v, v, s) for v, s in zip(values, sums, strict=True)]

        sums = to.loop(count, 1, [ZEROS] * len(PARTS), line)
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
        for part in PARTS:
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
        for part in PARTS:
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
            for part in PARTS:
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
    for vector, part in zip(vectors, PARTS, strict=True):
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
        return Writer(builder, types.uint16).rounded_pair(*args)

    return types.uint32(types.float32, types.float32), write
