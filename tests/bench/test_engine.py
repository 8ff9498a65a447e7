"""Decode and prefill against the machine's limits: what the limits are, and a tiny run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pdrt.bench.engine import (
    PROMPT,
    Asked,
    Case,
    Effort,
    Ours,
    Series,
    dtypes_of,
    engine,
    measure,
    points,
)
from pdrt.bench.limits import Probe, Rates, Work
from pdrt.bench.random_model import LLAMA_100M, TINY, make
from pdrt.bench.shell import Report
from pdrt.cli import app
from pdrt.config import NodeConfig, check
from pdrt.device.batch import Drawn, SeqStep
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout
from pdrt.modelspec import ModelSpec

WORK = Work(((10, 4),), (6, 4), layers=2, heads=2, head_dim=3, kv_bytes=48, value_bytes=4)


def test_a_decode_step_reads_each_weight_and_the_kv_once() -> None:
    assert WORK.decode_bytes(3, 5) == (2 * 40 + 24) * 4 + 3 * 5 * 48
    assert WORK.decode_flops(3, 5) == 3 * (2 * (2 * 40 + 24) + 4 * 2 * 2 * 3 * 5)


def test_a_prompts_last_token_alone_is_multiplied_by_the_head() -> None:
    assert WORK.prefill_flops(4) == 2 * (4 * 80 + 24) + 4 * 2 * 2 * 3 * (1 + 2 + 3 + 4)


def test_the_limit_of_a_decode_step_is_memory_or_arithmetic_whichever_takes_longer() -> None:
    few_bytes = Rates(read=1e9, multiply={1: 1.0, 8: 100.0})
    assert few_bytes.decode_s(WORK, 3, 5) == WORK.decode_flops(3, 5) / 100
    few_flops = Rates(read=1.0, multiply={8: 1e9})
    assert few_flops.decode_s(WORK, 3, 5) == WORK.decode_bytes(3, 5)


def test_a_prompt_is_held_against_the_rate_of_matrices_that_are_not_longer() -> None:
    rates = Rates(read=1.0, multiply={4: 10.0, 8: 20.0})
    assert rates.prefill_s(WORK, 5) == WORK.prefill_flops(5) / 10
    assert rates.prefill_s(WORK, 9) == WORK.prefill_flops(9) / 20
    assert rates.prefill_s(WORK, 2) == WORK.prefill_flops(2) / 20  # no better knowledge


def test_llama_100m_has_as_many_weights_as_its_name_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e4}
            | {"tie_word_embeddings": False, "hidden_act": "silu", "dtype": "float32"}
            | dict(LLAMA_100M)
        )
    )
    work = Work.of(ModelSpec.read(tmp_path, 0), torch.bfloat16)
    assert (work.layer_values + work.head_values) * 1e-6 == pytest.approx(97.5, abs=0.5)
    assert work.kv_bytes == 2 * 15 * 4 * 64 * 2


def test_rates_are_those_of_the_fastest_kernel() -> None:
    times = iter(range(1, 1000))

    def clock() -> float:
        """Every kernel takes a second."""
        return float(next(times))

    rates = Probe(WORK, torch.float32, rows=(2, 4), buffers=(4096, 8192), clock=clock)()
    assert rates.read == 8192
    assert rates.multiply == {2: 3 * 2 * 2 * 40, 4: 3 * 2 * 4 * 40}


class Recorder:
    """A runner that remembers its batches."""

    layout = KvLayout(block_size=16, dtype="float32", layers=1, kv_heads=1, head_dim=1)
    eos_token_ids = frozenset[int]()
    vocab = 1000

    def __init__(self) -> None:
        self.batches = list[Sequence[SeqStep]]()
        self.blocks = 0

    def bind(self, _pool: memoryview, blocks: int) -> None:
        self.blocks = blocks

    def join(self, _rendezvous: object, _timeout_s: float) -> None: ...

    def prepare(self, _grammar: object) -> None: ...

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.batches.append(batch)
        return []


def ours(most: int) -> tuple[Ours, Recorder]:
    runner, times = Recorder(), iter(range(10_000))
    return Ours(runner, 100, 512, most, lambda: float(next(times))), runner


def test_prompts_are_computed_in_chunks_as_in_serving() -> None:
    engine_, runner = ours(1300)
    assert engine_.seconds(Case("prefill", 1300), 8) == 1.0
    assert [(s.start, len(s.tokens)) for (s,) in runner.batches] == [
        (0, 512),
        (512, 512),
        (1024, 276),
    ]


def test_sequences_are_decoded_together_over_blocks_of_their_own() -> None:
    case, steps = Case("decode", 8), 20
    engine_, runner = ours(case.held(steps))
    engine_.seconds(case, steps)
    prompts, decoded = runner.batches[:8], runner.batches[8:]
    assert all(len(batch) == 1 and len(batch[0].tokens) == PROMPT for batch in prompts)
    assert [{step.start for step in batch} for batch in decoded] == [
        {PROMPT + done} for done in range(steps)
    ]
    blocks = [block for step in decoded[-1] for block in step.blocks]
    assert len(set(blocks)) == len(blocks) == 8 * 10
    assert max(blocks) < runner.blocks
    assert any(after - block != 1 for block, after in pairwise(blocks)), "scattered"


class Steady:
    def __init__(self, name: str, seconds: float) -> None:
        self.name, self._seconds = name, seconds

    def seconds(self, _case: Case, _steps: int) -> float:
        return self._seconds


def test_each_turn_is_held_against_the_rates_of_its_own_round() -> None:
    reads = iter([1.0, 1.0, 1.0, 1.0, 2.0, 4.0])
    effort = Effort((Case("decode", 1),), rounds=2, steps=2)
    told = list[Case]()
    engines = Steady("pdrt", 1000.0), Steady("other", 500.0)
    found = measure(
        engines, lambda: Rates(next(reads), {1: 1e9}), WORK, "float32", effort, told.append
    )
    read_s = float(WORK.decode_bytes(1, PROMPT + 1))
    assert [series.limits for series in found] == [[read_s, read_s / 2], [read_s, read_s / 4]]
    assert len(told) == 6, "warming up is progress too"
    assert points(found)[1]["engine"] == "other"


def test_a_share_is_the_median_of_the_rounds_shares() -> None:
    series = Series("pdrt", "float32", Case("decode", 8), [2.0, 4.0, 40.0], [1.0, 3.0, 4.0])
    assert series.share == 0.5
    assert (series.per_s, series.limit_per_s) == (2.0, 8 / 3)


def test_a_tiny_model_is_measured_in_both_dtypes(tmp_path: Path) -> None:
    make(tmp_path / "tiny", TINY)
    tables = {"model": {"path": str(tmp_path / "tiny")}, "device": {"kind": "cpu", "threads": 1}}
    effort = Effort((Case("decode", 2), Case("prefill", 20)), rounds=1, steps=2)
    asked = Asked(check(NodeConfig, tables, "test"), ("float32", "bfloat16"), effort)
    out, file = io.StringIO(), tmp_path / "x.json"
    assert engine(asked, Report(str(file)), Console(file=out, width=100)) == 0
    found = json.loads(file.read_text())
    assert [(p["dtype"], p["kind"], p["rows"]) for p in found] == [
        (dtype, *case)
        for dtype in ("float32", "bfloat16")
        for case in (("decode", 2), ("prefill", 20))
    ]
    assert all(p["share"] > 0 and 0 < p["tokens_per_s"] < p["limit_tokens_per_s"] for p in found)
    assert "decode x2" in out.getvalue()


@pytest.mark.parametrize("text", ["", "float16", "float32,int8"])
def test_other_dtypes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="want float32, bfloat16"):
        dtypes_of(text)
    assert dtypes_of(" bfloat16, float32") == ("bfloat16", "float32")


def test_an_unknown_peer_is_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "engine", "--peer", "nobody"])
    assert isinstance(found.exception, ConfigError)
    assert "transformers is the one" in str(found.exception)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
