"""How far a rounded model is from float32 is told by what it says after the same tokens."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pdrt.bench.accuracy import PROMPTS, TOKENS, WAYS, Accuracy, Way, accuracy, compare, said
from pdrt.bench.limits import Work
from pdrt.bench.random_model import TINY, make
from pdrt.bench.shell import Report
from pdrt.config import NodeConfig
from pdrt.device.torchrunner import TorchRunner
from pdrt.modelspec import ModelSpec
from pdrt.settings import check
from tests.device import tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    make(found, TINY)
    return found


def test_the_figures_are_those_of_their_definitions() -> None:
    exact = torch.tensor([[0.0, math.log(3)], [0.0, 1.0]])
    found = Accuracy.of(("bfloat16", "int8"), torch.tensor([[0.0, 0.0], [0.0, 1.0]]), exact)
    assert (found.dtype, found.quantize, found.tokens) == ("bfloat16", "int8", 2)
    assert found.mean_error == pytest.approx(math.log(3) / 4)
    assert found.max_error == pytest.approx(math.log(3))
    assert found.equal == 0.5
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert found.kl == pytest.approx(kl / 2)


def test_the_same_model_is_at_no_distance_and_a_rounded_one_is(directory: Path) -> None:
    prompts, opened = [[5, 6, 7], [9]], list[Way]()

    def same(_way: Way) -> TorchRunner:
        return tiny.runner(directory)

    for each in compare(same, prompts, opened.append, tokens=6):
        assert (each.tokens, each.max_error, each.kl, each.equal) == (12, 0, 0, 1)
    assert opened == [("float32", "none"), *WAYS]

    def real(way: Way) -> TorchRunner:
        return tiny.runner(directory, way[0], quantize=way[1])

    for each in compare(real, prompts, opened.append, tokens=6):
        assert 0 < each.mean_error < each.max_error < 1
        assert each.kl > 0


def test_other_ways_go_on_from_the_tokens_that_float32_says(directory: Path) -> None:
    prompts, runner = [[5, 6, 7]], tiny.runner(directory)
    logits, taken = said(runner, prompts, 4)
    assert [[best] for best in logits.argmax(-1).tolist()] == taken
    others = [[(token + 1) % 300] for [token] in taken]
    forced, _ = said(runner, prompts, 4, others)
    assert torch.equal(forced[0], logits[0])
    assert not torch.equal(forced[1], logits[1])


def test_a_table_and_a_file_tell_of_each_way(directory: Path, tmp_path: Path) -> None:
    tables = {"model": {"path": str(directory)}, "device": {"kind": "cpu", "threads": 1}}
    out, file = io.StringIO(), tmp_path / "x.json"
    settings = check(NodeConfig, tables, "test")
    assert accuracy(settings, Report(str(file)), Console(file=out, width=100)) == 0
    found = json.loads(file.read_text())
    assert [(each["dtype"], each["quantize"]) for each in found] == list(WAYS)
    assert all(each["tokens"] == len(PROMPTS) * TOKENS for each in found)
    assert "int8 in bfloat16" in out.getvalue()


def test_a_step_reads_a_byte_for_each_value_in_int8_but_for_a_tied_head(directory: Path) -> None:
    spec = ModelSpec.read(directory)
    plain, int8 = (Work.of(spec, torch.bfloat16, each) for each in ("none", "int8"))
    values = plain.layer_values + plain.head_values
    assert plain.decode_bytes(0, 0) == 2 * values
    assert int8.decode_bytes(0, 0) == values
    assert int8.kv_bytes == plain.kv_bytes
    tied = Work.of(replace(spec, tied=True), torch.bfloat16, "int8")
    assert tied.decode_bytes(0, 0) == values + plain.head_values
