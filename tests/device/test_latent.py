"""Attention over latents: where they lie in a block, and two ways to the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdrt.device.attention import Wave, lay_out
from pdrt.device.batch import SeqStep
from pdrt.device.kv import KvPool
from pdrt.device.latent import LatentLayouts, Up, is_expansion_faster
from pdrt.messages import KvLayout
from pdrt.modelspec import Latent

BLOCK, BLOCKS, LAYERS, HEADS = 4, 40, 3, 2
SHAPE = Latent(kv_lora=24, rope_dim=8, nope_dim=6, v_dim=10)
V2_LITE = Latent(kv_lora=512, rope_dim=64, nope_dim=128, v_dim=128)
SHAPES = {
    "values narrower than keys": SHAPE,
    "values wider than keys": replace(SHAPE, v_dim=20),
    "a latent narrower than a key and value": replace(SHAPE, kv_lora=7),
}
SCALE = 0.3
FULL, HALF = torch.float32, torch.bfloat16


def layout(shape: Latent = SHAPE) -> KvLayout:
    width = shape.kv_lora + shape.rope_dim
    return KvLayout(
        block_size=BLOCK, dtype="float32", layers=LAYERS, kv_heads=1, head_dim=width, kind="latent"
    )


def pool(shape: Latent = SHAPE) -> tuple[KvPool, torch.Tensor]:
    """A pool of NaN, and its memory in the layout's own shape."""
    one = layout(shape)
    memory = memoryview(bytearray(b"\xff" * (BLOCKS * one.block_bytes)))
    whole = torch.frombuffer(memory, dtype=torch.float32)
    return (
        KvPool(memory, BLOCKS, one, "cpu", mirrored=False),
        whole.view(BLOCKS, 1, LAYERS, 1, BLOCK, one.head_dim),
    )


def ups(shape: Latent) -> list[Up]:
    def part(rows: int) -> torch.Tensor:
        return torch.randn(HEADS, rows, shape.kv_lora)

    return [Up(part(shape.nope_dim), part(shape.v_dim), shape) for _ in range(LAYERS)]


def test_a_latent_lies_in_a_block_as_the_layout_says() -> None:
    """[1, layers, 1, block_size, width]: what a peer of any kind relies on."""
    latents, whole = pool()
    whole.zero_()
    blocks, offsets = np.array([5, 2, 2]), np.array([3, 0, 1])
    rows = torch.randn(3, layout().head_dim)
    latents.write(1, latents.cells_of(blocks, offsets), rows)
    for row, block, offset in zip(rows, blocks, offsets, strict=True):
        assert torch.equal(whole[block, 0, 1, 0, offset], row)
    assert int((whole != 0).sum()) == rows.numel()


def test_reading_gives_whole_blocks_in_the_tables_order() -> None:
    latents, whole = pool()
    whole.copy_(torch.randn(whole.shape))
    tables = np.array([[3, 0], [5, 5]])
    found = latents.read(2, latents.strips_of(tables))
    assert found.shape == (1, 2, 1, 2 * BLOCK, layout().head_dim)
    for sequence, table in enumerate(tables):
        want = torch.cat([whole[block, 0, 2, 0] for block in table])
        assert torch.equal(found[0, sequence, 0], want)


def naive(q: torch.Tensor, latents: torch.Tensor, up: Up, start: int) -> torch.Tensor:
    """As the paper writes it: keys and values of each head, one query after the other."""
    shape, end = up.shape, len(latents)
    low, turned = latents[:, : shape.kv_lora].double(), latents[:, shape.kv_lora :].double()
    out = torch.empty(len(q), HEADS, shape.v_dim, dtype=torch.float64)
    for head in range(HEADS):
        nope, values = (low @ part[head].double().T for part in (up.keys, up.values))
        keys = torch.cat([nope, turned], dim=1)
        scores = q[:, head].double() @ keys.T * SCALE
        is_later = torch.arange(end) > torch.arange(start, start + len(q))[:, None]
        odds = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        out[:, head] = odds @ values
    return out.flatten(1).float()


class Sequences:
    """Latents of sequences in a pool that is NaN everywhere else, and a wave over their ends."""

    def __init__(self, shape: Latent, spans: list[tuple[int, int]]) -> None:
        """`spans`: how many tokens came before, and how many are new."""
        self.pool, self._whole = pool(shape)
        self.ups, self.spans = ups(shape), spans
        self.latents = [torch.randn(start + new, layout(shape).head_dim) for start, new in spans]
        free = iter(torch.randperm(BLOCKS).tolist())
        self._tables = [[next(free) for _ in range(-(-sum(s) // BLOCK))] for s in spans]
        for table, rows in zip(self._tables, self.latents, strict=True):
            self._whole[table[-1]] = 0  # begun in part: cleared before it is used
            for position, row in enumerate(rows):
                block, offset = divmod(position, BLOCK)
                self._whole[table[block], 0, :, 0, offset] = row

    def wave(self, cache_bytes: int) -> Wave:
        steps = [
            SeqStep(key, [0] * new, start, table, None)
            for key, ((start, new), table) in enumerate(zip(self.spans, self._tables, strict=True))
        ]
        layouts = LatentLayouts(self.pool, FULL, self.ups, SCALE, cache_bytes)
        return lay_out(steps, self.pool, layouts)

    def row(self, wave: Wave, sequence: int) -> int:
        """Where its new tokens begin: positions and latents tell sequences apart."""
        start, new = self.spans[sequence]
        cell = self._tables[sequence][start // BLOCK] * LAYERS * BLOCK + start % BLOCK
        first = int((wave.cells == cell).nonzero())
        assert wave.positions[first : first + new].tolist() == list(range(start, start + new))
        return first


@pytest.mark.parametrize("cache_bytes", [1, 1 << 20], ids=["one by one", "at once"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 9)],
        [(11, 1), (3, 1), (12, 1), (0, 1)],
        [(40, 1), (2, 1), (8, 2), (1, 9), (0, 5), (21, 17)],
    ],
    ids=["a first token", "a prompt", "decode steps", "all together"],
)
def test_each_row_attends_to_its_own_past_alone(
    shape: Latent, spans: list[tuple[int, int]], cache_bytes: int
) -> None:
    torch.manual_seed(3)
    sequences = Sequences(shape, spans)
    wave = sequences.wave(cache_bytes)
    rows = len(wave.tokens)
    q = torch.randn(rows, HEADS, shape.nope_dim + shape.rope_dim)
    firsts = [sequences.row(wave, number) for number in range(len(spans))]
    new = torch.empty(rows, layout(shape).head_dim)
    for first, (start, count), rows_of in zip(firsts, spans, sequences.latents, strict=True):
        new[first : first + count] = rows_of[start:]
    for layer in range(LAYERS):
        found = wave.attend(layer, q, new, sequences.pool)
        for first, (start, count), rows_of in zip(firsts, spans, sequences.latents, strict=True):
            want = naive(q[first : first + count], rows_of, sequences.ups[layer], start)
            torch.testing.assert_close(found[first : first + count], want, rtol=1e-4, atol=1e-4)


def test_the_spans_above_go_both_ways() -> None:
    chosen = [
        is_expansion_faster(SHAPE, new, start + new, FULL) for start, new in [(8, 2), (21, 17)]
    ]
    assert chosen == [False, True]


sizes = st.integers(1, 600)


@given(
    st.builds(Latent, kv_lora=sizes, rope_dim=sizes, nope_dim=sizes, v_dim=sizes),
    sizes,
    sizes,
    st.sampled_from([FULL, HALF]),
)
def test_more_new_tokens_never_speak_against_expanding(
    shape: Latent, rows: int, past: int, dtype: torch.dtype
) -> None:
    """Tokens are the same ones, as in a chunk that grows into its past."""
    tokens = rows + 1 + past
    fewer, more = (is_expansion_faster(shape, n, tokens, dtype) for n in (rows, rows + 1))
    assert fewer <= more


def test_deepseek_v2_lite_absorbs_decode_steps_and_expands_prompts_and_long_chunks() -> None:
    def least(past: int, dtype: torch.dtype) -> int:
        """New tokens that are expanded."""
        choices = (is_expansion_faster(V2_LITE, n, past + n, dtype) for n in range(1, 500))
        return list(choices).index(True) + 1

    for dtype in (FULL, HALF):
        assert not is_expansion_faster(V2_LITE, 1, 2, dtype)
        assert is_expansion_faster(V2_LITE, 2, 2, dtype)
        assert is_expansion_faster(V2_LITE, 2048, 2048, dtype)
    assert [least(past, FULL) for past in (256, 2048, 32768)] == [118, 159, 170]
    assert [least(past, HALF) for past in (256, 2048, 32768)] == [48, 56, 57]
