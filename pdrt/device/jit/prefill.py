"""A step with prompts in it, of a Llama-like model, as one compiled function.

Its tokens lie in panels of TILE. Single tokens of sequences that decode come first, in panels of
their own, and attend as in `decode`; after them each chunk of a prompt begins a new panel. Hidden
states, scores and sums are float32; what products take is of the matrices' kind, as is the pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pdrt.device.jit.chunks import attend, pack, prepare
from pdrt.device.jit.compiled import loop
from pdrt.device.jit.lines import LINE, gate, pair, squares
from pdrt.device.jit.panels import multiply
from pdrt.device.jit.products import borrow_tiles, enter, finish, give, leave, take
from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.jit.tiles import load_tiles
from pdrt.device.jit.vectors import bytes_of, put

PHASES: Final = 9  # of a layer
LOT: Final = 64  # most rows of the gate's matrix, and as many of the other half, in a ticket
TALL: Final = 32  # most panels that a product takes before it goes on in the matrix
_TALL: Final = 15  # of them in float32; both measured
_LOG2_E: Final = 1.4426950408889634
_MOST: Final = 256  # rows of a matrix in a ticket


@loop()
def _lot(total, threads):
    """Rows of a matrix in a ticket: enough tickets for all, and each worth its while."""
    some = (total + 4 * threads - 1) // (4 * threads)
    return min(_MOST, (some + DEEP - 1) // DEEP * DEEP)


@loop()
def _tall(kind):
    return TALL if bytes_of(kind) == 2 else _TALL


@loop(fastmath={"contract"})
def _norm_factors(x, eps, line):
    """What makes each token's values of panel x [n, TILE] one in the mean square, left in line."""
    squares(x.ctypes.data, x.shape[0], line.ctypes.data)
    for t in range(TILE):
        line[t] = np.float32(1.0) / np.sqrt(line[t] / np.float32(x.shape[0]) + np.float32(eps))


@loop(fastmath={"contract", "reassoc"})
def _norm_panel(kind, x, weight, eps, scale, out):
    count = x.shape[0]
    _norm_factors(x, eps, scale)
    if bytes_of(kind) == 2:
        for i in range(count // 2):
            low, high = weight[2 * i], weight[2 * i + 1]
            for t in range(TILE):
                out[i, t] = pair(x[2 * i, t] * scale[t] * low, x[2 * i + 1, t] * scale[t] * high)
    else:
        floats = out.view(np.float32)
        for i in range(count):
            for t in range(TILE):
                floats[i, t] = x[i, t] * scale[t] * weight[i]


@loop()
def _norm(kind, me, scratch, phase, x, weight, eps, desk):
    total = x.shape[0]
    while True:
        i = take(scratch, phase, me, total)
        if i >= total:
            break
        _norm_panel(kind, x[i], weight, eps, desk.line[me], desk.normed[i])
        give(scratch, phase)
    finish(scratch, phase, total)


@loop()
def _linear(kind, held, me, scratch, phase, desk, x, width, matrix, out, adds):
    """Panels out (adds: +)= x w^T * scale + bias, for x as products take it."""
    w, scale, bias = matrix
    panels, total, tall = out.shape[0], out.shape[1], _tall(kind)
    lot = _lot(total, scratch.tiles.shape[0])
    if scale.shape[0]:
        lot = min(lot, 2 * LOT)  # as there is room for
    lots, room = (total + lot - 1) // lot, desk.room[me].ctypes.data
    sums = desk.gates[me].reshape(TALL, 2 * LOT, TILE)
    while True:
        first = take(scratch, phase, me, lots) * lot
        if first >= total:
            break
        n = min(lot, total - first)
        start = w + first * width * bytes_of(held)
        for i in range(0, panels, tall):
            some, here = min(tall, panels - i), x[i].ctypes.data
            if scale.shape[0]:
                to, apart = sums.ctypes.data, LINE * 2 * LOT
                multiply(kind, held, some, start, n, width, here, to, apart, True, room)
                for k in range(some):
                    _scale_rows(sums[k, :n], scale[first : first + n])
                    _move(sums[k, :n], out[i + k, first : first + n], adds)
            else:
                to, apart = out[i, first].ctypes.data, LINE * total
                multiply(kind, held, some, start, n, width, here, to, apart, not adds, room)
        if bias.shape[0]:
            for i in range(panels):
                _add_rows(out[i, first : first + n], bias[first : first + n])
        give(scratch, phase)
    finish(scratch, phase, lots)


@loop()
def _scale_rows(panel, scale):
    for j in range(panel.shape[0]):
        for t in range(TILE):
            panel[j, t] *= scale[j]


@loop()
def _move(panel, out, adds):
    """out (adds: +)= panel."""
    for j in range(panel.shape[0]):
        for t in range(TILE):
            out[j, t] = panel[j, t] + (out[j, t] if adds else np.float32(0.0))


@loop()
def _add_rows(panel, bias):
    for j in range(panel.shape[0]):
        for t in range(TILE):
            panel[j, t] += bias[j]


@loop()
def _gated(kind, held, me, scratch, phase, desk, width, matrix, wide):
    w, scale, bias = matrix
    panels, size, tall = desk.normed.shape[0], bytes_of(kind), _tall(kind)
    lots, room = (wide + LOT - 1) // LOT, desk.room[me].ctypes.data
    gates, ups = desk.gates[me]
    while True:
        first = take(scratch, phase, me, lots) * LOT
        if first >= wide:
            break
        n = min(LOT, wide - first)
        gate_bias, up_bias = bias[first : first + n], bias[wide + first : wide + first + n]
        gate_scale, up_scale = scale[first : first + n], scale[wide + first : wide + first + n]
        for i in range(0, panels, tall):
            some, here = min(tall, panels - i), desk.normed[i].ctypes.data
            for half, out in ((0, gates), (wide, ups)):
                start, to = w + (half + first) * width * bytes_of(held), out.ctypes.data
                multiply(kind, held, some, start, n, width, here, to, LINE * LOT, True, room)
            for k in range(some):
                if scale.shape[0]:
                    _scale_rows(gates[k, :n], gate_scale)
                    _scale_rows(ups[k, :n], up_scale)
                if bias.shape[0]:
                    _add_rows(gates[k, :n], gate_bias)
                    _add_rows(ups[k, :n], up_bias)
                to = desk.hidden[i + k, first * size // 4].ctypes.data
                gate(kind, gates[k].ctypes.data, ups[k].ctypes.data, n, to)
        give(scratch, phase)
    finish(scratch, phase, lots)


@loop(fastmath={"contract"})
def _turn(head, norm, eps, cos, sin, scale, factor):
    """Norm (where it has a weight) and rotate a head [head_dim, TILE] in place, then scale it."""
    size = head.shape[0]
    if norm.shape[0]:
        _norm_factors(head, eps, factor)
        for i in range(size):
            for t in range(TILE):
                head[i, t] *= factor[t] * norm[i]
    half = size // 2
    for i in range(half):
        for t in range(TILE):
            first, second = head[i, t], head[half + i, t]
            head[i, t] = (first * cos[i, t] - second * sin[i, t]) * scale
            head[half + i, t] = (second * cos[i, t] + first * sin[i, t]) * scale


@loop()
def _store(kind, panel, cells, at, size, blocks, strip):
    """A head's keys or values, panel [head_dim, TILE], into their cells."""
    dim = panel.shape[0]
    for t in range(TILE):
        cell = cells[t]
        if cell >= 0:
            to = at + cell // size * blocks + cell % size * dim * bytes_of(kind)
            for i in range(dim):
                put(kind, to + i * bytes_of(kind), panel[i, t])


@loop()
def _place_panel(kind, layer, i, weights, shape, pool, prompts, desk, line):
    """Rotate a panel's queries and keys; queries as products take them, the others to the pool."""
    dim, heads, kv_heads = shape.head_dim, shape.heads, shape.kv_heads
    parts, norms = desk.qkv[i].reshape(-1, dim, TILE), weights.qk_norm[layer]
    cos, sin, one = prompts.cos[i], prompts.sin[i], np.float32(1.0)
    narrow = dim * bytes_of(kind) // 4
    for head in range(heads):
        scale = np.float32(_LOG2_E / np.sqrt(dim))
        _turn(parts[head], norms[head], shape.eps, cos, sin, scale, line)
        pack(kind, parts[head], desk.queries[i, head * narrow : (head + 1) * narrow])
    strip = pool.size * dim * bytes_of(kind)
    blocks = 2 * strip * pool.layers * kv_heads
    for head in range(kv_heads):
        key = heads + head
        _turn(parts[key], norms[key], shape.eps, cos, sin, one, line)
        at = pool.base + 2 * strip * (head * pool.layers + layer)
        _store(kind, parts[key], prompts.cells[i], at, pool.size, blocks, strip)
        value = parts[key + kv_heads]
        _store(kind, value, prompts.cells[i], at + strip, pool.size, blocks, strip)


@loop()
def _turn_round(panel, out):
    """Tokens of a panel [n, TILE] as rows of out [tokens, n]."""
    for t in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[t, j] = panel[j, t]


@loop()
def _place(kind, me, scratch, phase, layer, weights, shape, pool, prompts, desk):
    total, singles = prompts.x.shape[0], prompts.singles.positions.shape[0]
    while True:
        i = take(scratch, phase, me, total)
        if i >= total:
            break
        if i * TILE < singles:
            _turn_round(desk.qkv[i], scratch.qkv[i * TILE : (i + 1) * TILE])
        else:
            _place_panel(kind, layer, i, weights, shape, pool, prompts, desk, desk.line[me])
        give(scratch, phase)
    finish(scratch, phase, total)


@loop()
def prefill(kind, held, me, weights, shape, pool, prompts, desk, scratch):
    """All layers. The pool is of the kind: float32, or bfloat16 with tiles; so are matrices, or
    they are held in int8."""
    if not enter(scratch, me):
        return
    if bytes_of(kind) == 2:
        borrow_tiles(scratch, me)
    x, hidden, wide = prompts.x, prompts.x.shape[1], desk.hidden.shape[1] * 4 // bytes_of(kind)
    q = shape.heads * shape.head_dim
    for layer in range(pool.layers):
        qkv, out, gate_up, down = weights.matrices[layer]
        at = layer * PHASES
        _norm(kind, me, scratch, at, x, weights.attention_norm[layer], shape.eps, desk)
        matrix = qkv, weights.qkv_scale[layer], weights.qkv_bias[layer]
        _linear(kind, held, me, scratch, at + 1, desk, desk.normed, hidden, matrix, desk.qkv, False)
        _place(kind, me, scratch, at + 2, layer, weights, shape, pool, prompts, desk)
        prepare(kind, me, scratch, at + 3, layer, weights, shape, pool, prompts, desk)
        attend(kind, me, scratch, at + 4, shape, prompts, desk)
        matrix = out, weights.out_scale[layer], weights.out_bias[layer]
        _linear(kind, held, me, scratch, at + 5, desk, desk.attended, q, matrix, x, True)
        _norm(kind, me, scratch, at + 6, x, weights.mlp_norm[layer], shape.eps, desk)
        matrix = gate_up, weights.gate_up_scale[layer], weights.gate_up_bias[layer]
        _gated(kind, held, me, scratch, at + 7, desk, hidden, matrix, wide)
        matrix = down, weights.down_scale[layer], weights.down_bias[layer]
        _linear(kind, held, me, scratch, at + 8, desk, desk.hidden, wide, matrix, x, True)
    if bytes_of(kind) == 2:
        load_tiles(scratch.tiles[me, 1].ctypes.data)
    leave(scratch, me)
