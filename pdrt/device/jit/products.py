"""Products of a few rows with a matrix, in portions that threads take by ticket.

A phase is over when each of its portions is done, whoever did them: a thread whose core is busy
elsewhere holds the others up for the one portion that it has begun, and not for its share; and
once a call, if it was in it, until it has seen that all is done (`leave`).

`kind` tells the matrix's type as in `vectors`; `tiled` says that AMX multiplies it, of which
`scratch.packed` holds what it needs. A matrix in int8 has a float32 scale a row, which multiplies
the sums; for others there are none.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from pdrt.device.jit.compiled import loop
from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.jit.tiles import load_tiles, save_tiles, tile_dots
from pdrt.device.jit.vectors import MANY, add, bytes_of, dots, look, power_of_two

PORTION: Final = 48  # rows of a matrix in a portion: a multiple of each tile's
_DOOR, _LEFT, _FIRST = 0, 1, 2  # in `Scratch.sync`
_SHUT = 1 << 32  # more than there are threads
_SPINS = 4000  # looks before a thread that waits lets others have the core
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


class Scratch(NamedTuple):
    """Memory of a call. What has a place for each thread begins with [threads]."""

    sync: Any  # int64, zeros: who came and left; each phase's tickets, and how much is done
    tiles: Any  # uint8 [threads, 2, 64]: the tiles' configuration, and where another's is kept
    packed: Any  # uint32 [threads, ...]: rows as tiles multiply them
    room: Any  # uint8 [threads, tiles.ROOM]
    portion: Any  # float32 [threads, 2, PORTION, rows up to a multiple of TILE]
    normed: Any  # float32 [threads, rows, hidden]
    qkv: Any  # float32 [rows, (heads + 2 * kv_heads) * head_dim]
    attended: Any  # float32 [rows, heads * head_dim]
    hidden: Any  # float32 [rows, intermediate]
    scores: Any  # float32 [threads, heads of a kv head * tokens]
    shares: Any  # float32 [threads, heads of a kv head, tokens]


@loop(fastmath={"contract"}, inline="always")
def exp(x):
    """Within 2 ulp between -87 and 88, beyond as there (the polynomial is of Cephes)."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    turns = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - turns * _LN2_HIGH - turns * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * power_of_two(np.int32(turns))


@loop()
def enter(scratch, me):
    """Whether the call still goes on; a thread other than the caller's may come too late."""
    return me == 0 or add(scratch.sync.ctypes.data + 8 * _DOOR, 1) < _SHUT


@loop()
def leave(scratch, me):
    """The caller's thread leaves last: the others may still read what it will use again."""
    left = scratch.sync.ctypes.data + 8 * _LEFT
    if me:
        add(left, 1)
    else:
        _await(left, add(scratch.sync.ctypes.data + 8 * _DOOR, _SHUT))


@loop()
def _await(place, number):
    spins = 0
    while look(place) < number:
        spins += 1
        if spins > _SPINS:
            _sched_yield()


@loop()
def _phase(scratch, phase):
    """Where its tickets are, of each thread's share, and after them how many portions are done."""
    return scratch.sync.ctypes.data + 8 * (_FIRST + phase * (scratch.tiles.shape[0] + 1))


@loop()
def take(scratch, phase, me, total):
    """A portion of this phase that nobody has, of `total`; or `total` when there is none.

    First those of a thread's own share, which lie side by side, then what is left of others'.
    """
    threads = scratch.tiles.shape[0]
    for turn in range(threads):
        whose = (me + turn) % threads
        first, end = total * whose // threads, total * (whose + 1) // threads
        number = first + add(_phase(scratch, phase) + 8 * whose, 1)
        if number < end:
            return number
    return total


@loop()
def give(scratch, phase):
    """A portion is done."""
    add(_phase(scratch, phase) + 8 * scratch.tiles.shape[0], 1)


@loop()
def is_over(scratch, phase, total):
    return look(_phase(scratch, phase) + 8 * scratch.tiles.shape[0]) >= total


@loop()
def finish(scratch, phase, total):
    """Wait until all portions are done."""
    _await(_phase(scratch, phase) + 8 * scratch.tiles.shape[0], total)


@loop()
def portions_of(rows):
    return (rows + PORTION - 1) // PORTION


@loop()
def _tiles(kind, rows, x, w, width, n, out, apart):
    """out[j, i] = w[j] . x[i] for i < rows: 8, 4, 2 or 1; j < n."""
    if rows == 8:
        dots(kind, 8, 3, x, w, width, n, out, apart)
    elif rows == 4:
        dots(kind, 4, 3, x, w, width, n, out, apart)
    elif rows == 2:
        dots(kind, 2, 4, x, w, width, n, out, apart)
    else:
        dots(kind, 1, 8, x, w, width, n, out, apart)


@loop()
def product(kind, rows, x, w, width, n, out, apart):
    """out[j, i] = w[j] . x[i] for any number of rows; n is small enough for w to stay cached."""
    i = 0
    while i < rows:
        left = rows - i
        some = 8 if MANY and left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        _tiles(kind, some, x + 4 * i * width, w, width, n, out + 4 * i, apart)
        i += some


@loop()
def _pack(kind, x, out):
    """Rows of x in bfloat16 [groups of TILE rows, width / 2, TILE, 2 values], as pairs in uint32.

    What stands in place of rows that x does not have stays as it is.
    """
    bits = x.view(np.uint32)
    pairs = x.shape[1] // 2
    for row in range(x.shape[0]):
        group, column = divmod(row, TILE)
        for pair in range(pairs):
            first, second = 2 * pair, 2 * pair + 1
            if bytes_of(kind) == 1:  # as tiles widen w
                first = pair // TILE * DEEP + pair % TILE
                second = first + TILE
            low, high = bits[row, first], bits[row, second]
            low += np.uint32(0x7FFF) + ((low >> np.uint32(16)) & np.uint32(1))
            high += np.uint32(0x7FFF) + ((high >> np.uint32(16)) & np.uint32(1))
            out[(group * pairs + pair) * TILE + column] = (low >> np.uint32(16)) | (
                high & np.uint32(0xFFFF0000)
            )


@loop()
def _tiled(kind, groups, x, w, width, n, out, apart, room):
    """As many of the rows of w as tiles can do; how many."""
    done = 0
    while n - done >= TILE:
        some = 3 if n - done >= 3 * TILE else 1
        at, to = w + done * width * bytes_of(kind), out + 4 * done * apart
        group = 0
        while group < groups:
            here, there = x + 2 * group * TILE * width, to + 4 * group * TILE
            if groups - group >= 2:
                if some == 3:
                    tile_dots(kind, 3, 2, here, at, width, there, apart, room)
                else:
                    tile_dots(kind, 1, 2, here, at, width, there, apart, room)
                group += 2
            else:
                if some == 3:
                    tile_dots(kind, 3, 1, here, at, width, there, apart, room)
                else:
                    tile_dots(kind, 1, 1, here, at, width, there, apart, room)
                group += 1
        done += some * TILE
    return done


@loop()
def _portion(kind, tiled, me, scratch, number, x, w, first, n):
    """Rows first..first + n of matrix w by all rows of x, in this thread's portion `number`."""
    rows, width = x.shape
    place = scratch.portion[me, number]
    to, apart = place.ctypes.data, place.shape[1]
    start = w + first * width * bytes_of(kind)
    done = 0
    if tiled:
        packed, groups = scratch.packed[me].ctypes.data, (rows + TILE - 1) // TILE
        room = scratch.room[me].ctypes.data
        done = _tiled(kind, groups, packed, start, width, n, to, apart, room)
    if done < n:
        start += done * width * bytes_of(kind)
        product(kind, rows, x.ctypes.data, start, width, n - done, to + 4 * done * apart, apart)
    return place


@loop()
def borrow_tiles(scratch, me):
    """Configure this thread's tiles; oneDNN, which thinks they are as it left them, needs its own
    configuration back."""
    save_tiles(scratch.tiles[me, 1].ctypes.data)
    load_tiles(scratch.tiles[me, 0].ctypes.data)


@loop(fastmath={"contract"})
def add_linear(kind, tiled, me, scratch, phase, x, w, scale, bias, out, adds):
    """out = scale * x w^T + bias, or out += that, in portions that threads share."""
    rows, total = out.shape
    if tiled:
        _pack(kind, x, scratch.packed[me])
    portions = portions_of(total)
    while True:
        first = take(scratch, phase, me, portions) * PORTION
        if first >= total:
            break
        n = min(PORTION, total - first)
        found = _portion(kind, tiled, me, scratch, 0, x, w, first, n)
        for row in range(rows):
            for i in range(n):
                value = found[i, row]
                if scale.shape[0]:
                    value *= scale[first + i]
                if bias.shape[0]:
                    value += bias[first + i]
                if adds:
                    value += out[row, first + i]
                out[row, first + i] = value
        give(scratch, phase)
    finish(scratch, phase, portions)


@loop(fastmath={"contract"})
def gated(kind, tiled, me, scratch, phase, x, w, scale, bias, out):
    """out = silu(gate) * up; of w [2 * n, width] the gate is the first half."""
    rows, total = out.shape
    if tiled:
        _pack(kind, x, scratch.packed[me])
    portions = portions_of(total)
    while True:
        first = take(scratch, phase, me, portions) * PORTION
        if first >= total:
            break
        n = min(PORTION, total - first)
        gates = _portion(kind, tiled, me, scratch, 0, x, w, first, n)
        ups = _portion(kind, tiled, me, scratch, 1, x, w, total + first, n)
        for row in range(rows):
            for i in range(n):
                gate, up = gates[i, row], ups[i, row]
                if scale.shape[0]:
                    gate *= scale[first + i]
                    up *= scale[total + first + i]
                if bias.shape[0]:
                    gate += bias[first + i]
                    up += bias[total + first + i]
                out[row, first + i] = gate / (np.float32(1.0) + exp(-gate)) * up
        give(scratch, phase)
    finish(scratch, phase, portions)


@loop(fastmath={"contract", "reassoc"})
def norm_rows(x, weight, eps, out):
    """RMSNorm of each row."""
    for row in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[1]) + np.float32(eps))
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * weight[i]


@loop()
def linear(kind, tiled, me, x, norm, eps, matrix, scale, bias, out, scratch):
    """out [rows, n] = scale * x [rows, width] w^T + bias, all float32 but w, of the kind.

    Where weights `norm` [width or 0] are there, x is normed before.
    """
    if not enter(scratch, me):
        return
    if tiled:
        borrow_tiles(scratch, me)
    if not is_over(scratch, 0, portions_of(out.shape[1])):
        if norm.shape[0]:
            norm_rows(x, norm, eps, scratch.normed[me])
            x = scratch.normed[me]
        add_linear(kind, tiled, me, scratch, 0, x, matrix, scale, bias, out, False)
    if tiled:
        load_tiles(scratch.tiles[me, 1].ctypes.data)
    leave(scratch, me)


def sync_size(phases: int, threads: int) -> int:
    """Values of `Scratch.sync`."""
    return _FIRST + phases * (threads + 1)
