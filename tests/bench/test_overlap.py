"""A tiny run of `pdrt bench overlap`: two real workers, a random model, and their own clocks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pdrt.bench.overlap import Prompt, overlap, prompt_of, show, too_short
from pdrt.bench.random_model import LLAMA_100M, TINY, make, prepared
from pdrt.bench.shell import Report
from pdrt.bench.timed_worker import Step
from pdrt.config import NodeConfig, check
from pdrt.errors import TransferFailed
from pdrt.modelspec import ModelSpec


def settings(model: Path | str = "null") -> NodeConfig:
    tables = {
        "model": {"path": str(model), "dtype": "float32"},
        "device": {"threads": 1, "step_ms": 0.0 if model != "null" else 2.0},
        "scheduler": {"kv_memory": 1 << 20},
    }
    return check(NodeConfig, tables, "test")


def test_the_share_is_of_the_time_from_the_first_chunk_to_the_last() -> None:
    prefill = [Step(10.0, 10.5, 512), Step(10.6, 11.0, 100)]
    decode = [Step(11.02, 11.03, 1), Step(11.04, 11.05, 1)]
    prompt = prompt_of(prefill, decode)
    assert (prompt.tokens, prompt.compute_s) == (612, 1.0)
    assert prompt.share == pytest.approx(0.02)


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["null", pytest.param("tiny", marks=pytest.mark.slow)])
def test_a_prompt_in_chunks_is_measured_from_the_workers_own_steps(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out, file = io.StringIO(), tmp_path / "x.json"
    if name == "tiny":
        make(tmp_path / name, TINY)
    config = settings(tmp_path / name if name == "tiny" else name)
    assert overlap(config, 1100, 2, Report(str(file)), Console(file=out, width=100)) == 0
    points = json.loads(file.read_text())
    assert [point["tokens"] for point in points] == [1100, 1100]
    assert all(point["compute_s"] > 0 and point["after_s"] > 0 for point in points)
    assert all(point["share"] == point["after_s"] / point["compute_s"] for point in points)
    assert "the share means little here" in out.getvalue()
    assert "take a larger --model or more --tokens" in capfd.readouterr().err


@pytest.mark.parametrize(("compute_s", "is_told"), [(0.049, False), (0.05, True), (1.0, True)])
def test_a_share_is_told_only_of_a_time_worth_comparing_with(
    compute_s: float, is_told: bool
) -> None:
    out, found = io.StringIO(), [Prompt(8, compute_s, 0.003)] * 3
    show(Console(file=out, width=100), found)
    assert ("of the time it took to compute the prompt" in out.getvalue()) is is_told
    assert (not too_short(found)) is is_told


@pytest.mark.e2e
def test_a_prompt_that_no_pool_holds_is_an_error_and_no_figure() -> None:
    with pytest.raises(TransferFailed, match="worker: "):
        overlap(settings(), 100_000, 1, Report(is_quiet=True), Console(file=io.StringIO()))


def test_a_random_model_is_made_once_and_has_its_size(tmp_path: Path) -> None:
    directory = prepared(tmp_path, "tiny", TINY)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert prepared(tmp_path, "tiny", TINY) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]
    spec = ModelSpec.read(directory, 0)
    assert (spec.layers, spec.hidden, spec.kv_heads) == (3, 64, 2)


def test_llama_100m_has_a_hundred_million_parameters() -> None:
    layer = 768 * (768 * 2 + 256 * 2) + 3 * 768 * 2048 + 2 * 768
    assert LLAMA_100M["num_hidden_layers"] * layer + 2 * 4096 * 768 + 768 == 100_687_104
    assert Prompt(1, 2.0, 1.0).share == 0.5
