"""A decode step of a Llama-like model as one compiled function, which all threads of a crew run.

Hidden states stay in float32 from the embedding to the logits; the KV pool keeps its dtype.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from pdrt.device.jit.compiled import loop
from pdrt.device.jit.products import (
    add_linear,
    borrow_tiles,
    enter,
    exp,
    finish,
    gated,
    give,
    is_over,
    leave,
    norm_rows,
    portions_of,
    product,
    take,
)
from pdrt.device.jit.tiles import load_tiles
from pdrt.device.jit.vectors import LANES, bytes_of, fetch, mix, put

PHASES: Final = 5  # of a layer


class Weights(NamedTuple):
    """Of all layers. Matrices stand at addresses [layers, 4]: qkv, out, gate and up, down."""

    matrices: Any
    attention_norm: Any  # float32 [layers, hidden]
    mlp_norm: Any
    qk_norm: Any  # float32 [layers, heads + kv_heads, head_dim or, where there is none, 0]
    qkv_bias: Any  # float32 [layers, rows or 0], as the next ones
    out_bias: Any
    gate_up_bias: Any
    down_bias: Any
    qkv_scale: Any  # of matrices in int8: float32 [layers, rows or 0], as the next ones
    out_scale: Any
    gate_up_scale: Any
    down_scale: Any


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Pool(NamedTuple):
    """Blocks [kv_heads, layers, 2 (k, v), size, head_dim], one after the other from `base`."""

    base: int
    layers: int
    size: int


class Rows(NamedTuple):
    """What a step computes, one row a sequence."""

    x: Any  # float32 [rows, hidden]: embeddings before, hidden states after
    cos: Any  # float32 [rows, head_dim / 2]
    sin: Any
    tables: Any  # int64 [rows, blocks]
    positions: Any  # int64 [rows]: of the row's token


@loop(fastmath={"contract", "reassoc"})
def _turn(head, norm, eps, cos, sin, scale):
    """Norm (where it has a weight) and rotate a head [head_dim] in place, then scale it."""
    size = head.shape[0]
    if norm.shape[0]:
        total = np.float32(0.0)
        for i in range(size):
            total += head[i] * head[i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for i in range(size):
            head[i] *= factor * norm[i]
    half = size // 2
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = (first * cos[i] - second * sin[i]) * scale
        head[half + i] = (second * cos[i] + first * sin[i]) * scale


@loop(fastmath={"contract", "reassoc"})
def _softmax(scores, shares):
    """Of each column of scores [tokens, heads], into rows of shares."""
    count = scores.shape[0]
    for head in range(scores.shape[1]):
        row = shares[head]
        most = scores[0, head]
        for t in range(count):
            row[t] = scores[t, head]
            most = max(most, row[t])
        total = np.float32(0.0)
        for t in range(count):
            row[t] = exp(row[t] - most)
            total += row[t]
        total = np.float32(1.0) / total
        for t in range(count):
            row[t] *= total


@loop()
def _mixed(kind, rows, shares, apart, v, tokens, width, out):
    """out[i] += shares[i] . v for any number of rows; width % LANES == 0."""
    i, whole = 0, width // (2 * LANES) * (2 * LANES)
    while i < rows:
        some = 3 if rows - i >= 3 else 1
        p = shares + 4 * i * apart
        for at in range(0, whole, 2 * LANES):
            o, values = out + 4 * (i * width + at), v + at * bytes_of(kind)
            if some == 3:
                mix(kind, 3, 2, p, apart, values, tokens, width, o)
            else:
                mix(kind, 1, 2, p, apart, values, tokens, width, o)
        if whole < width:
            for j in range(some):
                o, values = out + 4 * ((i + j) * width + whole), v + whole * bytes_of(kind)
                mix(kind, 1, 1, p + 4 * j * apart, apart, values, tokens, width, o)
        i += some


@loop()
def _place(kind, row, head, layer, heads, weights, shape, rows, strip, own):
    """Rotate a row's queries of a kv head, and its key; put key and value into the pool at `own`.

    Queries are scaled by what scores are divided by.
    """
    group, dim = shape.heads // shape.kv_heads, shape.head_dim
    first, key = head * group, shape.heads + head
    value, norms = heads[key + shape.kv_heads], weights.qk_norm[layer]
    cos, sin, scale = rows.cos[row], rows.sin[row], np.float32(1.0 / np.sqrt(dim))
    for i in range(first, first + group):
        _turn(heads[i], norms[i], shape.eps, cos, sin, scale)
    _turn(heads[key], norms[key], shape.eps, cos, sin, np.float32(1.0))
    for i in range(dim):
        put(kind, own + i * bytes_of(kind), heads[key, i])
        put(kind, own + strip + i * bytes_of(kind), value[i])
    return heads[first : first + group]


@loop()
def attend_head(kind, me, scratch, rows, row, head, layer, weights, shape, pool):
    """A row's queries of one kv head over its blocks."""
    dim, group, size = shape.head_dim, shape.heads // shape.kv_heads, pool.size
    strip = size * dim * bytes_of(kind)
    base = pool.base + 2 * strip * (head * pool.layers + layer)
    block = 2 * strip * pool.layers * shape.kv_heads
    table, position = rows.tables[row], rows.positions[row]
    own = base + table[position // size] * block + position % size * dim * bytes_of(kind)
    heads = scratch.qkv[row].reshape(-1, dim)
    queries = _place(kind, row, head, layer, heads, weights, shape, rows, strip, own)
    count, shares = position + 1, scratch.shares[me]
    scores = scratch.scores[me, : count * group].reshape(count, group)
    for at in range(0, count, size):
        keys, to = base + table[at // size] * block, scores.ctypes.data + 4 * at * group
        if at + size < count:
            fetch(base + table[at // size + 1] * block, 2 * strip)
        product(kind, group, queries.ctypes.data, keys, dim, min(size, count - at), to, group)
    _softmax(scores, shares)
    out = scratch.attended[row, head * group * dim : (head + 1) * group * dim]
    out[:] = 0
    for at in range(0, count, size):
        values, those = base + strip + table[at // size] * block, shares.ctypes.data + 4 * at
        some = min(size, count - at)
        _mixed(kind, group, those, shares.shape[1], values, some, dim, out.ctypes.data)


@loop()
def _attend(kind, me, scratch, phase, rows, layer, weights, shape, pool):
    tasks = rows.x.shape[0] * shape.kv_heads
    while True:
        task = take(scratch, phase, me, tasks)
        if task >= tasks:
            break
        row, head = task // shape.kv_heads, task % shape.kv_heads
        attend_head(kind, me, scratch, rows, row, head, layer, weights, shape, pool)
        give(scratch, phase)
    finish(scratch, phase, tasks)


@loop()
def decode(kind, pool_kind, tiled, me, weights, shape, pool, rows, scratch):
    """All layers of a step in which each row is one token of a sequence.

    Matrices are of the kind, the pool of its own.
    """
    normed, x, attended, hidden = scratch.normed[me], rows.x, scratch.attended, scratch.hidden
    if not enter(scratch, me):
        return
    if tiled:
        borrow_tiles(scratch, me)
    for layer in range(pool.layers):
        qkv, out, gate_up, down = weights.matrices[layer]
        at = layer * PHASES
        if is_over(scratch, at + PHASES - 1, portions_of(x.shape[1])):
            continue  # the others have done it all: this thread came late
        norm_rows(x, weights.attention_norm[layer], shape.eps, normed)
        scale, bias = weights.qkv_scale[layer], weights.qkv_bias[layer]
        add_linear(kind, tiled, me, scratch, at, normed, qkv, scale, bias, scratch.qkv, False)
        _attend(pool_kind, me, scratch, at + 1, rows, layer, weights, shape, pool)
        scale, bias = weights.out_scale[layer], weights.out_bias[layer]
        add_linear(kind, tiled, me, scratch, at + 2, attended, out, scale, bias, x, True)
        norm_rows(x, weights.mlp_norm[layer], shape.eps, normed)
        scale, bias = weights.gate_up_scale[layer], weights.gate_up_bias[layer]
        gated(kind, tiled, me, scratch, at + 3, normed, gate_up, scale, bias, hidden)
        scale, bias = weights.down_scale[layer], weights.down_bias[layer]
        add_linear(kind, tiled, me, scratch, at + 4, hidden, down, scale, bias, x, True)
    if tiled:
        load_tiles(scratch.tiles[me, 1].ctypes.data)
    leave(scratch, me)
