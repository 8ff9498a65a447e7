"""A JSON object of settings whose values are checked where they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pdrt.errors import ConfigError

_T = TypeVar("_T", int, float, str, bool)


class Fields:
    """Of one file; errors name it and the key."""

    def __init__(self, where: Path, data: Mapping[str, object]) -> None:
        self.where, self._data = where, data

    def refuse(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} = {self._data.get(key)!r}: {why}")

    def raw(self, key: str) -> object:
        return self._data.get(key)

    def keys(self) -> Iterable[str]:
        return self._data.keys()

    def over(self, other: Fields) -> Fields:
        """These, and those of `other` that are absent or null here."""
        mine = {key: value for key, value in self._data.items() if value is not None}
        return Fields(self.where, {**other._data, **mine})

    def get(self, key: str, default: _T) -> _T:
        """The value, or `default` where it is absent or null. Raises ConfigError: wrong type."""
        value = self._data.get(key)
        if value is None:
            return default
        kind = type(default)
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            return kind(value)
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
            raise self.refuse(key, f"must be {kind.__name__}")
        return value

    def size(self, key: str, default: int = 0) -> int:
        """A positive integer that must be there unless a default is."""
        value = self.get(key, default)
        if value < 1:
            raise self.refuse(key, "must be a positive integer")
        return value

    def table(self, *keys: str) -> Fields:
        """The first of these sub-objects that is there; an empty one when none is."""
        for key in keys:
            value = self._data.get(key)
            if isinstance(value, dict):
                return Fields(self.where, value)
            if value is not None:
                raise self.refuse(key, "must be an object")
        return Fields(self.where, {})


def read_json(path: Path) -> Mapping[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"[model] path: no Hugging Face model directory: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return data
