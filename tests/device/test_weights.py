"""Checkpoints are read with progress, in the dtype asked for, or refused with their fault named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdrt.device.shard import Run
from pdrt.device.weights import INDEX, Checkpoint
from pdrt.errors import ConfigError


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


def save(directory: Path) -> None:
    """`a` and `b` in one file, `c` in another."""
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, directory / "1.safetensors")
    save_file({"c": torch.full((4,), 3.0)}, directory / "2.safetensors")


def index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_of_all_shards_are_there(tmp_path: Path) -> None:
    save(tmp_path)
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    weights = Checkpoint(tmp_path, quiet)
    out = torch.empty(4)
    weights.copy("c", out)
    assert out.tolist() == [3.0] * 4


def test_a_tensor_changes_its_dtype_on_the_way(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 2.5], dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    out = torch.empty(2, dtype=torch.float32)
    Checkpoint(tmp_path, quiet).copy("w", out)
    assert out.tolist() == [1.0, 2.5]


def test_progress_rises_to_its_total(tmp_path: Path) -> None:
    save(tmp_path)
    told = list[tuple[str, int, int]]()
    weights = Checkpoint(tmp_path, lambda *step: told.append(step))
    weights.copy("a", torch.empty(2, 3))
    weights.copy("c", torch.empty(4))
    weights.finish()
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert [done for _, done, _ in told] == [24, 40, total]
    assert {(stage, whole) for stage, _, whole in told} == {("weights", total)}


def _nothing(_directory: Path) -> None:
    pass


def _only_pickle(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _cut(directory: Path) -> None:
    save(directory)
    path = directory / "2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _shard_missing(directory: Path) -> None:
    save(directory)
    index(directory, {"c": "3.safetensors"})


def _shard_elsewhere(directory: Path) -> None:
    (directory / "inside").mkdir()
    save(directory / "inside")
    index(directory, {"c": "inside/2.safetensors"})


def _no_map(directory: Path) -> None:
    index(directory, ["a"])


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (_nothing, "no \\*.safetensors"),
        (_only_pickle, "other formats are not read"),
        (_cut, "2.safetensors: not a whole safetensors file"),
        (_shard_missing, "names 3.safetensors, which is not in"),
        (_shard_elsewhere, "which is not in"),
        (_no_map, "weight_map must map"),
    ],
)
def test_a_broken_directory_is_refused(
    tmp_path: Path, break_it: Callable[[Path], None], says: str
) -> None:
    break_it(tmp_path)
    with pytest.raises(ConfigError, match=says):
        Checkpoint(tmp_path, quiet)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("d", (1,), "the weights lack d"),
        ("a", (3, 2), r"a has shape \[2, 3\], config.json asks for \[3, 2\]"),
        ("b", (1,), r"b has shape \[2\]"),  # never broadcast
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], says: str
) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=says):
        Checkpoint(tmp_path, quiet).copy(name, torch.empty(shape))


def test_a_part_of_a_tensor_is_copied_by_rows_and_columns(tmp_path: Path) -> None:
    save(tmp_path)
    weights = Checkpoint(tmp_path, quiet)
    row, columns = torch.empty(1, 3), torch.empty(2, 2)
    weights.copy("a", row, (Run(1, 2, 2), Run.all_of(3)))
    weights.copy("a", columns, (Run.all_of(2), Run(1, 3, 3)))
    assert row.tolist() == [[3, 4, 5]]
    assert columns.tolist() == [[1, 2], [4, 5]]


def test_a_tensor_of_which_a_part_is_wanted_must_have_the_whole_shape(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=r"a has shape \[2, 3\], config.json asks for \[4, 3\]"):
        Checkpoint(tmp_path, quiet).copy("a", torch.empty(1, 3), (Run(1, 2, 4), Run.all_of(3)))


def test_what_other_ranks_read_counts_as_done(tmp_path: Path) -> None:
    save(tmp_path)
    told = list[int]()
    weights = Checkpoint(tmp_path, lambda _stage, done, _total: told.append(done))
    weights.copy("a", torch.empty(1, 3), (Run(1, 2, 2), Run.all_of(3)))
    assert told == [24]
