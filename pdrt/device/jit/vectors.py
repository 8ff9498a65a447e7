"""What numba has no words for: dot products in registers, prefetch, atomics; as LLVM code.

LLVM's own vectoriser keeps one row's sums in registers. Weights are read once for several rows,
so here a tile of sums (rows of x by rows of w) stays there. What comes `AHEAD` in w is brought to
the second-level cache: hardware stops at each page of 4 KiB, which costs a third of the bandwidth.

Addresses are plain integers and rows lie `width` values apart. Matrices are float32, bfloat16
in the form of uint16, or int8; the first argument `kind` is any number of that type. All sums are
float32. A sum's order depends on its row alone, not on how many rows are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FEATURES: Final = llvm.get_host_cpu_features()
LANES: Final = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4
MANY: Final = LANES != 8  # whether there are 32 vector registers, not 16

# Of 2 ** r for -0.5 <= r <= 0.5, from the highest power of r down: fitted for the least relative
# error, which is 2e-9, and 3e-6 for what is rounded to bfloat16.
_EXP2: Final = (
    0.0001534580021,
    0.001339993162,
    0.009618489005,
    0.05550328776,
    0.2402264689,
    0.6931472057,
    1.000000001,
)
_EXP2_SHORT: Final = (0.00957008818, 0.05591786359, 0.240247452, 0.6931218144, 0.9999992613)
AHEAD: Final = 16 << 10  # bytes

BYTE, _HALF, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT: Final = ir.FloatType()
FLOATS, _INTS, _HALVES, _CHARS = (ir.VectorType(each, LANES) for each in (FLOAT, INT, _HALF, BYTE))
ZEROS: Final = ir.Constant(FLOATS, [0.0] * LANES)
ADDRESS: Final = types.intp
_BYTES: Final = {types.float32: 4, types.uint16: 2, types.int8: 1}


class Writer:
    """Writes loads and sums into a function that numba builds."""

    def __init__(self, builder: Any, kind: Any) -> None:
        self.b, self.kind, self.bytes = builder, kind, _BYTES[kind]

    def call(self, name: str, returns: Any, *args: Any) -> Any:
        signature = ir.FunctionType(returns, [each.type for each in args])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        return self.b.call(function, args)

    def at(self, base: Any, index: Any, size: int) -> Any:
        return self.b.add(base, self.b.mul(index, long(size)))

    def read(self, kind: Any, address: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=min(2, self.bytes))

    def floats(self, address: Any) -> Any:
        return self.read(FLOATS, address)

    def values(self, address: Any) -> Any:
        """A vector of the matrix, widened to float32."""
        if self.kind == types.float32:
            return self.floats(address)
        if self.kind == types.int8:
            wide = self.b.sext(self.read(_CHARS, address), _INTS)
            return self.b.sitofp(wide, FLOATS)
        wide = self.b.zext(self.read(_HALVES, address), _INTS)
        return self.b.bitcast(self.b.shl(wide, _ints(16)), FLOATS)

    def narrowed(self, values: Any) -> Any:
        """Floats that the kind, float32 or bfloat16, has exactly: in its form."""
        if self.kind == types.float32:
            return values
        upper = self.b.lshr(self.b.bitcast(values, _INTS), _ints(16))
        return self.b.trunc(upper, _HALVES)

    def pairs(self, firsts: Any, seconds: Any) -> Any:
        """Of floats that are bfloat16: as such, one of each side by side, in 32 bits."""
        lows = self.b.lshr(self.b.bitcast(firsts, _INTS), _ints(16))
        return self.b.or_(lows, self.b.bitcast(seconds, _INTS))

    def write(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=4)

    def constant(self, value: float) -> Any:
        return ir.Constant(FLOATS, [value] * LANES)

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x: Any) -> Any:
        """2 ** x as exact as the kind wants it; 0 or infinite where it has no place."""
        if LANES != 16:  # where nothing but `_scaled` makes 0 of what is infinite
            x = self.larger(self.constant(-150.0), x)
        factors = _EXP2 if self.kind == types.float32 else _EXP2_SHORT
        turns = self.call(f"llvm.rint.v{LANES}f32", FLOATS, x)
        r, p = self.b.fsub(x, turns), self.constant(factors[0])
        for each in factors[1:]:
            p = self.multiply_add(p, r, self.constant(each))
        return self._scaled(p, turns)

    def _scaled(self, x: Any, turns: Any) -> Any:
        """x * 2 ** turns for whole turns, as floats."""
        if LANES == 16:
            mask, now = ir.Constant(_HALF, -1), ir.Constant(INT, 4)
            return self.call("llvm.x86.avx512.mask.scalef.ps.512", FLOATS, x, turns, x, mask, now)
        least, most = self.constant(-127.0), self.constant(128.0)  # become 0, and infinite
        turns = self.b.select(self.b.fcmp_ordered("<", turns, most), turns, most)
        biased = self.b.add(self.b.fptosi(self.larger(turns, least), _INTS), _ints(127))
        return self.b.fmul(x, self.b.bitcast(self.b.shl(biased, _ints(23)), FLOATS))

    def rounded(self, values: Any) -> Any:
        """The upper 16 bits are this float, or a vector of them, as bfloat16 (rounded to even)."""
        kind, number = (_INTS, _ints) if values.type == FLOATS else (INT, partial(ir.Constant, INT))
        bits = self.b.bitcast(values, kind)
        odd = self.b.and_(self.b.lshr(bits, number(16)), number(1))
        return self.b.add(self.b.add(bits, number(0x7FFF)), odd)

    def rounded_pair(self, low: Any, high: Any) -> Any:
        """Two floats, or vectors of them, rounded to bfloat16 and side by side in 32 bits."""
        low, high = map(self.rounded, (low, high))
        number = _ints if low.type == _INTS else partial(ir.Constant, INT)
        return self.b.or_(self.b.lshr(low, number(16)), self.b.and_(high, number(0xFFFF0000)))

    def write_two(self, values: Sequence[Any], base: Any, index: Any, line: int) -> None:
        """Two lines' vectors as products take them: in float32, or as pairs of bfloat16."""
        if self.kind == types.float32:
            for more, value in enumerate(values):
                self.write(value, self.at(base, self.b.add(index, long(more)), line))
            return
        self.write(self.rounded_pair(*values), self.at(base, index, line // 2))

    def multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        return self.call(f"llvm.fma.v{LANES}f32", FLOATS, x, y, total)

    def any(self, truths: Any) -> Any:
        return self.call(f"llvm.vector.reduce.or.v{LANES}i1", ir.IntType(1), truths)

    def sum(self, vector: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        signature = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        return self.b.call(function, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))

    def prefetch(self, address: Any, near: int = 3) -> None:
        """A line, into the first-level cache, or with near = 2 into the second."""
        flags = (ir.Constant(INT, each) for each in (0, near, 1))  # to read, data
        where = self.b.inttoptr(address, BYTE.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), where, *flags)

    def spread(self, value: Any) -> Any:
        alone = self.b.insert_element(ZEROS, value, ir.Constant(INT, 0))
        zeros = ir.Constant(_INTS, [0] * LANES)
        return self.b.shuffle_vector(alone, alone, zeros)

    def loop(self, count: Any, step: int, carried: Sequence[Any], body: _Body) -> list[Any]:
        """`body` for at = 0, step, .. below count (at least once), over values it carries on."""
        entry, inside, after = (self.b.block, *map(self.b.append_basic_block, ("loop", "after")))
        self.b.branch(inside)
        self.b.position_at_end(inside)
        at = self.b.phi(LONG)
        at.add_incoming(long(0), entry)
        olds = [self.b.phi(each.type) for each in carried]
        news = body(at, olds)
        end, following = self.b.block, self.b.add(at, long(step))
        at.add_incoming(following, end)
        for old, first, new in zip(olds, carried, news, strict=True):
            old.add_incoming(first, entry)
            old.add_incoming(new, end)
        self.b.cbranch(self.b.icmp_signed("<", following, count), inside, after)
        self.b.position_at_end(after)
        return news


_Body = Callable[[Any, list[Any]], list[Any]]


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def long(value: int) -> Any:
    return ir.Constant(LONG, value)


@intrinsic(prefer_literal=True)
def dots(_context, kind, rows, columns, x, w, width, count, out, apart):
    """out[j, i] = w[j] . x[i] for j < count and i < rows.

    x [rows, width] and out [count, apart] are float32, w [count, width] of the kind; rows and
    columns of a tile are literal, width % LANES == 0.
    """
    across, down = rows.literal_value, columns.literal_value

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, _, x, w, width, count, out, apart = args
        to = Writer(builder, kind)
        rest = builder.srem(count, long(down))
        whole = builder.sub(count, rest)
        row_bytes = builder.mul(width, long(to.bytes))
        for first, some, size in ((long(0), whole, down), (whole, rest, 1)):
            below_w = builder.add(w, builder.mul(first, row_bytes))
            below_out = to.at(out, builder.mul(first, apart), 4)
            with builder.if_then(builder.icmp_signed(">", some, long(0))):
                _tiles(to, across, size, (x, below_w, width, some, below_out, apart))
        return _context.get_dummy_value()

    return types.void(kind, rows, columns, *(ADDRESS,) * 6), write


def _tiles(to: Writer, across: int, down: int, args: Sequence[Any]) -> None:
    """What `dots` does, for a count that is a multiple of `down`."""
    x, w, width, count, out, apart = args
    xs = [to.at(x, to.b.mul(long(i), width), 4) for i in range(across)]

    def tile(first: Any, _: list[Any]) -> list[Any]:
        numbers = [to.b.add(first, long(j)) for j in range(down)]
        ws = [to.at(w, to.b.mul(number, width), to.bytes) for number in numbers]

        def step(at: Any, sums: list[Any]) -> list[Any]:
            left = [to.floats(to.at(each, at, 4)) for each in xs]
            places = [to.at(each, at, to.bytes) for each in ws]
            right = [to.values(each) for each in places]
            for each in places:
                to.prefetch(to.b.add(each, long(AHEAD)), near=2)
            pairs = [(a, b) for a in left for b in right]
            return [to.multiply_add(a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

        sums = to.loop(width, LANES, [ZEROS] * (across * down), step)
        for number, total in enumerate(sums):
            i, j = divmod(number, down)
            row = to.at(out, to.b.mul(numbers[j], apart), 4)
            to.write(to.sum(total), to.at(row, long(i), 4))
        return []

    to.loop(count, down, [], tile)


@intrinsic(prefer_literal=True)
def mix(_context, kind, rows, vectors, shares, apart, v, tokens, width, out):
    """out[i] += sum over t < tokens of shares[i, t] * v[t], for `vectors` * LANES columns.

    shares [rows, apart] and out [rows, width] are float32, v [tokens, width] of the kind; `rows`
    and `vectors` are literal, tokens > 0.
    """
    across, wide = rows.literal_value, vectors.literal_value

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, _, shares, apart, v, tokens, width, out = args
        to = Writer(builder, kind)
        ps = [to.at(shares, builder.mul(long(i), apart), 4) for i in range(across)]
        outs = [
            to.at(out, builder.add(builder.mul(long(i), width), long(j * LANES)), 4)
            for i in range(across)
            for j in range(wide)
        ]

        def body(at: Any, sums: list[Any]) -> list[Any]:
            row = to.at(v, builder.mul(at, width), to.bytes)
            right = [to.values(to.at(row, long(j * LANES), to.bytes)) for j in range(wide)]
            left = [to.spread(to.read(FLOAT, to.at(each, at, 4))) for each in ps]
            pairs = [(a, b) for a in left for b in right]
            return [to.multiply_add(a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

        for total, place in zip(
            to.loop(tokens, 1, [to.floats(each) for each in outs], body), outs, strict=True
        ):
            to.write(total, place)
        return _context.get_dummy_value()

    return types.void(kind, rows, vectors, *(ADDRESS,) * 6), write


@intrinsic
def fetch(_context, address, count):
    """Bring `count` bytes that will be read soon: at least one line."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to = Writer(builder, types.float32)

        def line(at: Any, _: list[Any]) -> list[Any]:
            to.prefetch(builder.add(args[0], at), near=2)
            return []

        to.loop(args[1], 64, [], line)
        return _context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS), write


@intrinsic
def add(_context, address, number):
    """Add to the integer there; what it was before. All threads see what came before."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], LONG.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(ADDRESS, types.int64), write


@intrinsic
def look(_context, address):
    """The integer there, as another thread left it."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], LONG.as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(ADDRESS), write


@intrinsic
def put(_context, kind, address, value):
    """Store a float32 there, rounded (to even) to the kind: float32 or bfloat16."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to = Writer(builder, kind)
        if to.kind == types.float32:
            to.write(args[2], args[1])
            return _context.get_dummy_value()
        upper = builder.lshr(to.rounded(args[2]), ir.Constant(INT, 16))
        half = builder.trunc(upper, _HALF)
        builder.store(half, builder.inttoptr(args[1], _HALF.as_pointer()), align=2)
        return _context.get_dummy_value()

    return types.void(kind, ADDRESS, types.float32), write


@intrinsic
def power_of_two(_context, exponent):
    """2 ** exponent as a float32, for -126 <= exponent <= 127."""

    def write(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], ir.Constant(INT, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(INT, 23)), FLOAT)

    return types.float32(types.int32), write


@intrinsic
def bytes_of(_context, kind):
    """How many bytes a value of the kind has."""

    def write(_context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
        return long(_BYTES[kind])

    return types.intp(kind), write
