"""Batches as the compiled loops take them: block tables of single tokens, and panels of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdrt.device.attention import Wave, blocks_of, scored_rows
from pdrt.device.batch import SeqStep
from pdrt.device.jit.sizes import DEEP, TILE
from pdrt.device.kv import Ints, KvPool

_NOTHING: Final = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class TableWave(Wave):
    """A wave of one token each of some sequences, over block tables [sequences, blocks]."""

    tables: Ints
    ends: Ints  # the tokens' positions


@dataclass(frozen=True, slots=True)
class PanelWave(TableWave):
    """A wave that begins with single tokens, of which the tables are, and has chunks after them.

    Each of both begins a panel of TILE rows; what is left of one has no token.
    """

    panel_cells: Ints  # [panels, TILE], as `jit.chunks.Prompts` wants them, like the next ones
    chunks: Ints
    chunk_tables: Ints


def lay_out_tables(batch: Sequence[SeqStep], pool: KvPool) -> TableWave:
    drawn = [row for row, step in enumerate(batch) if step.draw is not None]
    tables, ends = _tables(batch, pool.block_size)
    return TableWave(
        tokens=torch.tensor([step.tokens[0] for step in batch]),
        positions=torch.from_numpy(ends),
        cells=_NOTHING,
        parts=(),
        drawn=torch.tensor(drawn, dtype=torch.int64),
        scored=_NOTHING,
        tables=tables,
        ends=ends,
    )


def _tables(steps: Sequence[SeqStep], size: int) -> tuple[Ints, Ints]:
    """Block tables of single tokens, and their positions."""
    ends = np.array([step.start for step in steps], np.int64)
    tables = np.zeros((len(steps), int(ends.max(initial=0)) // size + 1), np.int64)
    for table, step in zip(tables, steps, strict=True):
        count = step.start // size + 1
        table[:count] = step.blocks[:count]
    return tables, ends


def lay_out_panels(batch: Sequence[SeqStep], pool: KvPool) -> PanelWave:
    size = pool.block_size
    singles = [i for i, step in enumerate(batch) if len(step.tokens) == 1]
    chunks = [i for i, step in enumerate(batch) if len(step.tokens) > 1]
    heights = [-(-len(batch[i].tokens) // TILE) for i in chunks]
    firsts = np.cumsum([-(-len(singles) // TILE), *heights]).tolist()
    first_row = dict(zip(chunks, (TILE * first for first in firsts), strict=False))
    first_row.update({i: row for row, i in enumerate(singles)})

    rows = TILE * firsts[-1]
    tokens, positions = np.zeros((2, rows), np.int64)
    cells = np.full(rows, -1)
    for i, first in first_row.items():
        step, there = batch[i], slice(first, first + len(batch[i].tokens))
        tokens[there] = step.tokens
        positions[there] = np.arange(step.start, step.start + len(step.tokens))
        cells[there] = blocks_of(step, size) * size + positions[there] % size
    tables, ends = _tables([batch[i] for i in singles], size)
    last = {i: first + len(batch[i].tokens) - 1 for i, first in first_row.items()}
    scored = [row for i, step in enumerate(batch) for row in scored_rows(step, last[i])]
    drawn = [last[i] for i, step in enumerate(batch) if step.draw is not None]
    return PanelWave(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        cells=_NOTHING,
        parts=(),
        drawn=torch.tensor(drawn, dtype=torch.int64),
        scored=torch.tensor(scored, dtype=torch.int64),
        tables=tables,
        ends=ends,
        panel_cells=cells.reshape(-1, TILE),
        chunks=chunk_rows([(batch[i], firsts[number]) for number, i in enumerate(chunks)], size),
        chunk_tables=_joined([_table(batch[i], size) for i in chunks]),
    )


def chunk_rows(steps: Sequence[tuple[SeqStep, int]], size: int) -> Ints:
    """`jit.chunks.Prompts.chunks` of steps, each with its first panel."""
    found, table, room = np.zeros((len(steps), 6), np.int64), 0, 0
    for row, (step, first) in zip(found, steps, strict=True):
        keys = -(-(step.start + len(step.tokens)) // DEEP) * DEEP
        row[:] = first, len(step.tokens), step.start, table, keys, room
        table, room = table + len(_table(step, size)), room + keys
    return found


def _table(step: SeqStep, size: int) -> Sequence[int]:
    """The blocks of the step's tokens and of what came before them."""
    return step.blocks[: -(-(step.start + len(step.tokens)) // size)]


def _joined(tables: Sequence[Sequence[int]]) -> Ints:
    return np.array([block for table in tables for block in table], np.int64)


def panels_of(rows: Tensor) -> Tensor:
    """[rows, n] as panels [rows / TILE, n, TILE]."""
    return rows.view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()
