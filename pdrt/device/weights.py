"""Safetensors on disk, sharded or not: memory-mapped, checked, copied into place with progress.

A tensor goes straight into its (often fused) destination and changes its dtype on the way, so
no second copy of the model is ever in memory. Of a matrix that ranks share, only the rank's own
rows or columns are read. No pickle: other weight formats are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from pdrt.device.shard import Run
from pdrt.errors import ConfigError
from pdrt.footprint import trim

Progress: TypeAlias = Callable[[str, int, int], None]  # stage, done, total

INDEX = "model.safetensors.index.json"


class _Slice(Protocol):
    """A tensor on disk; indexing maps it, and only what is then touched is read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class _File(Protocol):
    """What we use of safetensors' untyped handle."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...


class Checkpoint:
    """The tensors of a model directory by name. Raises ConfigError, naming file and tensor."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self._where = directory
        self.progress = progress
        paths = _files(directory)
        self._total = sum(path.stat().st_size for path in paths)
        self._done, self._counted = 0, set[str]()
        handles = {path: _open(path) for path in paths}
        self._home = {
            name: handle
            for handle in handles.values()
            for name in handle.keys()  # noqa: SIM118 - a handle is no mapping
        }

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def copy(self, name: str, out: torch.Tensor, runs: Sequence[Run] = ()) -> None:
        """Fill `out` with the tensor `name`, or with the part that `runs` cut from its dimensions.

        The whole tensor must have the shape of `out`, or the one that `runs` say.
        """
        if name not in self._home:
            raise ConfigError(f"{self._where}: the weights lack {name}")
        runs = runs or [Run.all_of(count) for count in out.shape]
        try:
            whole = self._home[name].get_slice(name)
            shape, wanted = whole.get_shape(), [run.whole for run in runs]
            if shape != wanted:
                raise ConfigError(
                    f"{self._where}: {name} has shape {shape}, config.json asks for {wanted}"
                )
            found = whole[tuple(slice(run.first, run.end) for run in runs)]
        except SafetensorError as error:
            raise ConfigError(f"{self._where}: {name} cannot be read: {error}") from error
        out.copy_(found)
        if name not in self._counted:  # what other ranks, or later calls, read counts as done
            self._counted.add(name)
            self._done += math.prod(shape) * found.itemsize
        self.progress("weights", min(self._done, self._total), self._total)

    def finish(self) -> None:
        """Tell that all is there: headers and tensors that nobody asked for count as done."""
        trim()  # of a 100M model 43 MB
        self.progress("weights", self._total, self._total)


def _files(directory: Path) -> list[Path]:
    """The files named by the index, else every safetensors file."""
    index = directory / INDEX
    if not index.exists():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{directory}: no *.safetensors; other formats are not read")
        return found
    try:
        names = set(_weight_map(json.loads(index.read_bytes())).values())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{index}: {error}") from error
    paths = [directory / name for name in sorted(names)]
    for path in paths:
        if path.parent != directory or not path.is_file():
            raise ConfigError(f"{index}: names {path.name}, which is not in {directory}")
    return paths


def _weight_map(index: object) -> Mapping[str, str]:
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError("weight_map must map tensor names to file names")
    return files


def _open(path: Path) -> _File:
    try:
        handle: _File = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file: {error}") from error
    return handle
