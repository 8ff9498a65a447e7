"""The cost file, and the sums made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.errors import ConfigError
from pdrt.sim.cost import (
    Cost,
    StepCost,
    TransferCost,
    chunk_pairs,
    decode_ms,
    load,
    step_s,
    transfer_s,
    write_us,
)
from pdrt.sim.steps import StepTimes, Work

TEXT = """
name = "a"
about = "made up"
[model]
kv_bytes_per_token = 1000
[instance]
block_size = 10
kv_tokens = 1005
tp = 2
[step]
base_ms = 1
token_us = 10.0
pair_ns = 100.0
decode_ms = [[1, 4], [11, 14.0]]
context_ns = 1000
[transfer]
curve = [[1000, 0.1, 10.0, 20.0], [100000, 1.0, 100.0, 400.0]]
parallel = 2
"""


def cost(folder: Path, text: str = TEXT) -> Cost:
    path = folder / "cost.toml"
    path.write_text(text)
    return load(str(path))


def test_a_file_is_read_with_whole_numbers_where_fractions_may_stand(tmp_path: Path) -> None:
    read = cost(tmp_path)
    assert read.step.base_ms == 1.0
    assert read.blocks == 100
    assert read.block_bytes == 10_000


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("kv_tokens = 1005", "kv_tokens = 9", r"\[instance\] kv_tokens = 9"),
        ("kv_tokens = 1005", "", r"\[instance\] kv_tokens"),
        ("kv_tokens = 1005", "kv_tokens = 1000000000000", r"more than 4000000 blocks"),
        ("base_ms = 1", "base_ms = inf", r"\[step\] base_ms"),
        ("base_ms = 1", "base_ms = -1", r"\[step\] base_ms"),
        ("base_ms = 1", "base = 1", r"did you mean base_ms"),
        ("[[1, 4], [11, 14.0]]", "[[11, 4], [1, 14.0]]", r"\[step\].*decode_ms"),
        ("[[1, 4], [11, 14.0]]", "[[0, 4]]", r"\[step\].*decode_ms"),
        ("[100000, 1.0, 100.0, 400.0]", "[100, 1.0, 100.0, 4.0]", r"\[transfer\].*curve"),
        ("[100000, 1.0, 100.0, 400.0]", "[100, 1.0]", r"\[transfer\] curve"),
        ('name = "a"', "", "name"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_its_key(
    tmp_path: Path, before: str, after: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        cost(tmp_path, TEXT.replace(before, after))


def test_a_name_that_is_neither_shipped_nor_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load("nowhere")


def test_a_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    step = cost(tmp_path).step
    assert step_s(step) == pytest.approx(0.001)
    assert step_s(step, prompt_tokens=100) == pytest.approx(0.002)
    assert step_s(step, pairs=1e6) == pytest.approx(0.101)
    assert step_s(step, decoding=6, context=1000) == pytest.approx(0.001 + 0.009 + 0.001)


@pytest.mark.parametrize(("batch", "ms"), [(0, 0.0), (1, 4.0), (6, 9.0), (11, 14.0), (21, 24.0)])
def test_between_and_beyond_its_points_decode_time_is_on_lines(batch: int, ms: float) -> None:
    assert decode_ms(StepCost(decode_ms=((1, 4), (11, 14))), batch) == pytest.approx(ms)


def test_each_token_of_a_chunk_looks_at_those_before_it_and_at_itself() -> None:
    assert chunk_pairs(10, 3) == 11 + 12 + 13


def test_a_write_is_on_a_line_in_the_logarithms(tmp_path: Path) -> None:
    transfer = cost(tmp_path).transfer
    assert write_us(transfer, 10) == 10.0
    assert write_us(transfer, 1000) == 10.0
    assert write_us(transfer, 10_000) == pytest.approx(10**1.5)
    assert write_us(transfer, 100_000) == pytest.approx(100.0)
    assert write_us(transfer, 200_000) == pytest.approx(200.0)
    assert write_us(transfer, 100_000, tail=True) == pytest.approx(400.0)


def test_writes_share_the_link_and_each_device_writes_its_part(tmp_path: Path) -> None:
    read = cost(tmp_path)
    assert transfer_s(read, []) == 0.0
    assert transfer_s(read, [200_000]) == pytest.approx(100e-6)  # two devices write half of it
    assert transfer_s(read, [2000] * 8) == pytest.approx(40e-6)  # two at once
    assert transfer_s(read, [200_000] * 8) == pytest.approx(800e-6)  # no faster than 1 GB/s
    assert transfer_s(read.model_copy(update={"transfer": TransferCost()}), [1000]) == 0.0


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_is_longer_takes_no_less_time(one: int, other: int) -> None:
    transfer = TransferCost(curve=((1000, 0.1, 10.0, 20.0), (100000, 1.0, 100.0, 400.0)))
    low, high = sorted((one, other))
    assert write_us(transfer, low) <= write_us(transfer, high) * (1 + 1e-9)


@given(st.integers(0, 4000), st.integers(0, 99_999), st.integers(0, 40), st.integers(0, 99_999))
def test_what_a_simulated_step_lasts_is_what_a_fit_goes_by(
    prompt: int, pairs: int, decoding: int, context: int
) -> None:
    step = StepCost(
        base_ms=2.0, token_us=11.0, pair_ns=3.0, decode_ms=((1, 6), (16, 9)), context_ns=7.0
    )
    expected = step_s(step, prompt_tokens=prompt, pairs=pairs, decoding=decoding, context=context)
    work = Work(prompt, pairs, decoding, context)
    assert StepTimes(step, 16).of(work) == pytest.approx(expected)  # looked up, and beyond
