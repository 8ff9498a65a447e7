"""Attention of prompts' chunks in panels, and of the single tokens beside them.

It goes over BLOCK keys at a time, with a running maximum and sum (FlashAttention, Dao et al.,
2022), for keys and values of a whole chunk that were gathered from the pool once a layer.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from pdrt.device.jit.compiled import loop
from pdrt.device.jit.decode import attend_head
from pdrt.device.jit.lines import LINE, copy, pair, rescale, softmax, turn_tokens
from pdrt.device.jit.panels import block
from pdrt.device.jit.products import finish, give, take
from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.jit.vectors import bytes_of

BLOCK: Final = 128  # keys
QUERIES: Final = 3  # most panels of queries that pass keys together
_FIRST, _ROWS, _START, _TABLE, _KEYS, _ROOM = 0, 1, 2, 3, 4, 5  # of a chunk


class Prompts(NamedTuple):
    """What a step computes: `singles` tokens in the first panels, and chunks."""

    x: Any  # float32 [panels, hidden, TILE]: embeddings before, hidden states after
    cos: Any  # float32 [panels, head_dim / 2, TILE]
    sin: Any
    cells: Any  # int64 [panels, TILE]: block * size + offset of a chunk's token; -1: nothing
    singles: Any  # decode.Rows, for as many rows as there are
    chunks: Any  # int64 [chunks, 6]: its first panel, its rows, how many tokens come before, where
    # its table begins in `tables`, keys up to a multiple of DEEP, where these begin in `Desk.keys`
    tables: Any  # int64 [blocks of all chunks]


class Desk(NamedTuple):
    """Memory of a call. `wide` are float32, `narrow` what products take, in 32 bits."""

    normed: Any  # narrow [panels, hidden]
    qkv: Any  # wide [panels, (heads + 2 * kv_heads) * head_dim, TILE]
    queries: Any  # narrow [panels, heads * head_dim]
    attended: Any  # narrow, as these
    hidden: Any  # narrow [panels, intermediate]
    keys: Any  # of the kind [kv_heads, keys, head_dim]: of all chunks
    values: Any  # of the kind, of each chunk [head_dim, its keys], or in float32 as its keys
    straight: Any  # of the kind [threads, keys of the longest, head_dim], for bfloat16
    gates: Any  # wide [threads, 2, TALL, LOT, TILE]
    room: Any  # of the kind [threads, values of a part of a matrix, or 0 where it is of the kind]
    line: Any  # wide [threads, TILE]
    scores: Any  # wide [threads, QUERIES, BLOCK, TILE]
    sums: Any  # wide [threads, QUERIES, head_dim, TILE]
    state: Any  # wide [threads, QUERIES, 3, TILE]


@loop(fastmath={"contract"})
def pack(kind, wide, out):
    """Panel wide [n, TILE] as products take it."""
    if bytes_of(kind) == 2:
        for i in range(wide.shape[0] // 2):
            for t in range(TILE):
                out[i, t] = pair(wide[2 * i, t], wide[2 * i + 1, t])
    else:
        floats = out.view(np.float32)
        for i in range(wide.shape[0]):
            for t in range(TILE):
                floats[i, t] = wide[i, t]


@loop()
def _gather(kind, layer, head, chunk, shape, pool, prompts, desk, room):
    """A chunk's keys of a kv head and layer one after the other, and values as `Desk` says."""
    row, size = shape.head_dim * bytes_of(kind), bytes_of(kind)
    strip = pool.size * row
    base = pool.base + 2 * strip * (head * pool.layers + layer)
    blocks = 2 * strip * pool.layers * shape.kv_heads
    count, padded = chunk[_START] + chunk[_ROWS], chunk[_KEYS]
    keys = desk.keys[head, chunk[_ROOM] : chunk[_ROOM] + padded]
    values = desk.values[head, chunk[_ROOM] : chunk[_ROOM] + padded]
    straight = room[:padded] if size == 2 else values
    for at in range(0, count, pool.size):
        there = base + prompts.tables[chunk[_TABLE] + at // pool.size] * blocks
        some = min(pool.size, count - at) * row
        copy(keys[at].ctypes.data, there, some)
        copy(straight[at].ctypes.data, there + strip, some)
    keys[count:] = 0
    straight[count:] = 0
    if size == 2:
        for at in range(0, padded, DEEP):
            for i in range(0, shape.head_dim, TILE):
                out = values.ctypes.data + size * (i * padded + at)
                turn_tokens(straight[at, i:].ctypes.data, row, out, padded * size)


@loop()
def prepare(kind, me, scratch, phase, layer, weights, shape, pool, prompts, desk):
    """Single tokens attend, and what chunks attend to is gathered."""
    rows, kv_heads = prompts.singles, shape.kv_heads
    singles = rows.positions.shape[0] * kv_heads
    total = singles + prompts.chunks.shape[0] * kv_heads
    while True:
        task = take(scratch, phase, me, total)
        if task >= total:
            break
        if task < singles:
            row, head = task // kv_heads, task % kv_heads
            attend_head(kind, me, scratch, rows, row, head, layer, weights, shape, pool)
        else:
            number, head = (task - singles) // kv_heads, (task - singles) % kv_heads
            room = desk.straight[me]
            _gather(kind, layer, head, prompts.chunks[number], shape, pool, prompts, desk, room)
        give(scratch, phase)
    finish(scratch, phase, total)


@loop()
def _hide(scores, first_key, first_query):
    """What comes after a query cannot be seen by it: scores [keys, TILE]."""
    for j in range(scores.shape[0]):
        for t in range(TILE):
            if first_key + j > first_query + t:
                scores[j, t] = -np.inf


@loop()
def _attend_panels(kind, me, head, first, count, chunk, shape, desk):
    """Queries of a head in panels first.. of a chunk, over all keys that they may see."""
    dim, size = shape.head_dim, bytes_of(kind)
    group, narrow = shape.heads // shape.kv_heads, dim * size // 4
    kv_head, room, padded = head // group, chunk[_ROOM], chunk[_KEYS]
    begin = chunk[_START] + (first - chunk[_FIRST]) * TILE
    end = min(padded, (begin + count * TILE + DEEP - 1) // DEEP * DEEP)
    scores, sums, state = desk.scores[me], desk.sums[me], desk.state[me]
    queries = desk.queries[first, head * narrow :].ctypes.data
    panel = desk.queries.shape[1] * LINE
    keys = desk.keys[kv_head, room:].ctypes.data
    values = desk.values[kv_head, room:].ctypes.data
    state[:, 0] = -np.inf
    state[:, 1] = 0
    for at in range(0, end, BLOCK):
        some = min(BLOCK, end - at)
        here, to = keys + at * dim * size, scores.ctypes.data
        block(
            kind, count, here, some, dim * size, False, queries, panel, dim, to, LINE * BLOCK, True
        )
        for i in range(count):
            query = begin + i * TILE
            if at + some > query + 1:
                _hide(scores[i, :some], at, query)
            place = scores[i].ctypes.data
            softmax(kind, place, some, state[i].ctypes.data, place)
            if at:
                rescale(sums[i].ctypes.data, dim, state[i, 2].ctypes.data)
        # A row of values is a key in float32, and a dimension in bfloat16.
        turned, out = size == 4, sums.ctypes.data
        those = values + at * (dim * size if turned else size)
        apart = (dim if turned else padded) * size
        block(
            kind, count, those, dim, apart, turned, to, LINE * BLOCK, some, out, LINE * dim, at == 0
        )
    for i in range(count):
        for j in range(dim):
            for t in range(TILE):
                sums[i, j, t] /= state[i, 1, t]
        out_of = desk.attended[first + i, head * narrow : (head + 1) * narrow]
        pack(kind, sums[i], out_of)


@loop()
def _single_panel(kind, i, attended, desk):
    """Rows that attended as single tokens, attended [tokens, heads * head_dim], into panel i."""
    wide = desk.qkv[i, : attended.shape[1]]
    for t in range(attended.shape[0]):
        for j in range(attended.shape[1]):
            wide[j, t] = attended[t, j]
    pack(kind, wide, desk.attended[i])


@loop()
def attend(kind, me, scratch, phase, shape, prompts, desk):
    singles = prompts.singles.positions.shape[0]
    panels = (singles + TILE - 1) // TILE
    total = panels
    for chunk in prompts.chunks:
        total += shape.heads * _turns(kind, chunk)
    while True:
        task = take(scratch, phase, me, total)
        if task >= total:
            break
        if task < panels:
            attended = scratch.attended[task * TILE : min(singles, (task + 1) * TILE)]
            _single_panel(kind, task, attended, desk)
        else:
            left = task - panels
            for chunk in prompts.chunks:
                turns = _turns(kind, chunk)
                if left < shape.heads * turns:
                    head, first = left // turns, left % turns * _together(kind)
                    count = min(_together(kind), (chunk[_ROWS] + TILE - 1) // TILE - first)
                    first += chunk[_FIRST]
                    _attend_panels(kind, me, head, first, count, chunk, shape, desk)
                    break
                left -= shape.heads * turns
        give(scratch, phase)
    finish(scratch, phase, total)


@loop()
def _together(kind):
    """Panels of queries that fill the registers, or the tiles."""
    return 2 if bytes_of(kind) == 2 else QUERIES


@loop()
def _turns(kind, chunk):
    """How often so many panels pass for all queries of a chunk and head."""
    rows = TILE * _together(kind)
    return (chunk[_ROWS] + rows - 1) // rows
