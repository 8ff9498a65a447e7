"""Settings for any tables: a TOML file, PDRT_<TABLE>_<KEY> over it, and what is wrong in words.

The promise: what is not exactly right is a ConfigError that names file, key, value and what is
allowed, and shows no secret (a field with repr=False).
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdrt.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists, no tuples


class Section(BaseModel):
    """A table: unknown keys and wrong types are refused, and nobody changes it later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


S = TypeVar("S", bound=Section)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables in a file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # a number may have too many digits
        raise ConfigError(f"{path}: not TOML: {error}") from error


def check(kind: type[S], tables: Mapping[str, Any], where: str) -> S:
    """The settings in these tables. Raises ConfigError that says what is wrong `where`."""
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        lines = [_explain(kind, dict(problem)) for problem in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from error


def _explain(kind: type[Section], problem: Mapping[str, Any]) -> str:
    """One problem as `[table] key = value: what is wrong and what is allowed`."""
    table, key, section = _place(kind, problem["loc"])
    place = f"{table} {key}".strip() or "the file"
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(key, section.model_fields, 1)
        known = (
            f"did you mean {near[0]}?" if near else f"known are {', '.join(section.model_fields)}"
        )
        return f"{place}: unknown key; {known}"
    field = section.model_fields.get(key.partition(".")[0])
    is_secret = field is not None and not field.repr
    value = problem["input"]
    shown = "" if is_secret or isinstance(value, dict | BaseModel) else f" = {value!r:.80}"
    return f"{place}{shown}: {problem['msg'].removeprefix('Value error, ')}"


def _place(kind: type[Section], loc: Sequence[int | str]) -> tuple[str, str, type[Section]]:
    """(table as in the file, key, what may stand in that table) of a pydantic location."""
    parts, names, number, section = list(loc), list[str](), "", kind
    while parts and (inner := _inner(section, str(parts[0]))):
        section = inner
        names.append(str(parts.pop(0)))
        if parts and isinstance(parts[0], int):
            number = f" number {int(parts.pop(0)) + 1}"
    table = f"[[{'.'.join(names)}]]{number}" if number else f"[{'.'.join(names)}]"
    return table if names else "", ".".join(map(str, parts)), section


def _inner(section: type[Section], name: str) -> type[Section] | None:
    """The type of a table, of a table that may be missing, or of each of a list of tables."""
    field = section.model_fields.get(name)
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def override(
    kind: type[Section],
    tables: dict[str, Any],
    environ: Mapping[str, str],
    known: Collection[str],
) -> list[str]:
    """Put PDRT_<TABLE>_<KEY> into the tables; the names of those that were used.

    `known` are the tables of any process of ours: the environment may be shared with others, so
    what is not ours is left alone, unless it looks like one of them misspelt.
    """
    used = []
    for name, text in environ.items():
        key = name.removeprefix("PDRT_").lower()
        if key == name.lower():
            continue
        if _override_one(kind, tables, name, key, text):
            used.append(name)
        else:
            _refuse_if_misspelt(name, key.partition("_")[0], known)
    return used


def _override_one(
    kind: type[Section], tables: dict[str, Any], name: str, key: str, text: str
) -> bool:
    table, _, rest = key.partition("_")
    inner = _inner(kind, table)
    if key in kind.model_fields and not _inner(kind, key):  # the router's local_ip is in no table
        tables[key] = _value(text, kind, key)
        return True
    if inner is None or not rest:
        return False
    if isinstance(kind.model_fields[table].default, tuple):
        raise ConfigError(f"{name}: [[{table}]] is a list of targets: name them in a file")
    _put(tables.setdefault(table, {}), inner, rest, text)
    return True


def _put(tables: Any, section: type[Section], key: str, text: str) -> None:
    """Set the key, in a table within the table where it names one (faults_delay_s)."""
    for name in section.model_fields:
        inner = _inner(section, name)
        if inner is not None and key.startswith(f"{name}_") and isinstance(tables, dict):
            tables, section, key = tables.setdefault(name, {}), inner, key.removeprefix(f"{name}_")
            break
    if isinstance(tables, dict):  # else `check` refuses it
        tables[key] = _value(text, section, key)


def _refuse_if_misspelt(name: str, table: str, known: Collection[str]) -> None:
    near = get_close_matches(table, known, 1, cutoff=0.8)
    if near and near[0] != table:
        raise ConfigError(f"{name}: there is no table [{table}]; did you mean [{near[0]}]?")


def _value(text: str, section: type[Section], key: str) -> Any:
    """A TOML value, or the text itself when it is none, or when a text is wanted.

    A cluster key of digits is a text; a list of texts may be written with commas.
    """
    try:
        tables = tomllib.loads(f"value = {text}")
        value: object = tables["value"] if len(tables) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    field = section.model_fields.get(key)
    if field is not None and field.annotation is str and not isinstance(value, str):
        return text
    if (
        field is not None
        and get_args(field.annotation)[:1] == (str,)
        and not isinstance(value, list)
    ):
        return [part.strip() for part in text.split(",") if part.strip()]
    return value
