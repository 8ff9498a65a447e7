"""A cost as the TOML text that `--cost` reads, with what each number means beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from pdrt.errors import ConfigError
from pdrt.sim.cost import Cost

_WHAT: Final = {
    "instance": "one worker",
    "step": "one device step takes base + prompt part + decode part",
    "request": "beside the steps; cpu: of router, nodes and client, from the cores below",
    "transfer": "bytes of a write, GB/s, avg us, p99 us",
    "machine": "workers that the cores have time for at once; crowd: steps at once, times slower",
}


def text(cost: Cost) -> str:
    """A JSON number, string, bool or list is a TOML one too."""
    return "\n".join(_lines(cost)) + "\n"


def _lines(cost: Cost) -> Iterator[str]:
    yield f"name = {json.dumps(cost.name)}"
    yield f"about = {json.dumps(cost.about)}"
    for name in type(cost).model_fields:
        table = getattr(cost, name)
        if isinstance(table, BaseModel):
            what = f"  # {_WHAT[name]}" if name in _WHAT else ""
            yield f"\n[{name}]{what}"
            yield from (f"{key} = {value}" for key, value in _values(table))


def _values(table: BaseModel) -> Iterator[tuple[str, str]]:
    """Those that are not what they would be without being written."""
    for key, field in type(table).model_fields.items():
        value = getattr(table, key)
        if field.is_required() or value != field.default:
            yield key, json.dumps(value)


def write(cost: Cost, file: Path) -> None:
    """Raises ConfigError."""
    try:
        file.write_text(text(cost), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written: {error.strerror or error}") from error
