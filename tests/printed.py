"""Pages of docs/ that are printed from the code: every setting, and every state machine.

./run docs      writes them; a test compares
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import pdrt
from pdrt.config import NodeConfig, RouterConfig
from pdrt.machine import Table

DOCS: Final = Path(__file__).parent.parent / "docs"
_SIGNS: Final[Mapping[type, str]] = {
    limits.Ge: "ge",
    limits.Gt: "gt",
    limits.Le: "le",
    limits.Lt: "lt",
}
_WORDS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def settings() -> str:
    """Every key of both kinds of files, with its default and what is allowed."""
    lines = [
        "# Settings",
        "",
        "Printed by `./run docs` from the settings in the code. One is a key in a TOML file, or",
        "`PDRT_<TABLE>_<KEY>` in the environment, which wins. Unknown keys are refused.",
    ]
    for title, kind in (("Nodes", NodeConfig), ("Router", RouterConfig)):
        lines += ["", f"## {title}", *_tables(kind)]
    return "\n".join(lines) + "\n"


def _tables(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            yield from ("", f"`{name}` = `{_default(field)}`")
            continue
        is_list = get_origin(field.annotation) is tuple
        yield from ("", f"### {'[[' if is_list else '['}{name}{']]' if is_list else ']'}", "")
        if section.__doc__ and not section.__doc__.startswith("!!!"):
            yield from (" ".join(section.__doc__.split()), "")
        yield from ("| key | default | allowed |", "|---|---|---|")
        yield from _rows(section)


def _rows(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            yield from _rows(inner, f"{prefix}{key}.")
        else:
            yield f"| {prefix}{key} | `{_default(field)}` | {_allowed(field)} |"


def _section(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined:
        return "(required)"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default)) if isinstance(default, tuple) else repr(default).replace("'", '"')


def _allowed(field: FieldInfo) -> str:
    return _said(field.annotation, field.metadata)


def _said(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    metadata = [m for each in metadata for m in getattr(each, "metadata", [each])]
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_said, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{_toml(each)}`" for each in get_args(annotation))
    bounds = [
        f"{_WORDS[sign]} {getattr(limit, sign):g}"
        for limit in metadata
        for kind, sign in _SIGNS.items()
        if isinstance(limit, kind)
    ]
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    kind = names.get(annotation) if isinstance(annotation, type) else _list_of(annotation)
    return " ".join([str(kind), ", ".join(bounds)]).strip()


def _list_of(annotation: Any) -> str:
    """Settings' lists are of text, or of whole numbers with bounds."""
    has_numbers = int in get_args(get_args(annotation)[0])
    return "list of whole numbers" if has_numbers else "list of text"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def states() -> str:
    """Every transition table as a picture, and what it ignores with the reason."""
    lines = [
        "# State machines",
        "",
        "Printed by `./run docs` from the tables in the code. A cell that is neither an edge nor",
        "ignored is impossible, and raises.",
    ]
    for place, table in sorted(all_tables().items()):
        lines += ["", f"## {table.name}", "", f"`{place}`", "", "```mermaid", "stateDiagram-v2"]
        lines += _edges(table)
        lines += ["```", "", "| state | ignores | because |", "|---|---|---|"]
        lines += sorted(f"| {s} | {e.__name__} | {why} |" for (s, e), why in table.ignored.items())
    return "\n".join(lines) + "\n"


def _edges(table: Table[Any, Any, Any]) -> Iterator[str]:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), edge in table.edges.items():
        arrows.setdefault((str(state), str(edge.to)), []).append(event.__name__)
    for (start, end), events in arrows.items():  # in the order of the table
        yield f"  {start} --> {end}: {', '.join(sorted(events))}"


def all_tables() -> dict[str, Table[Any, Any, Any]]:
    """The tables by the module and name they have; `device` has none and would load torch."""
    found: dict[str, Table[Any, Any, Any]] = {}
    for module in pkgutil.walk_packages(pdrt.__path__, "pdrt."):
        if module.name.startswith("pdrt.device") or module.name == "pdrt.__main__":
            continue
        loaded = importlib.import_module(module.name)
        for name, value in vars(loaded).items():
            if isinstance(value, Table) and f"\n{name}: " in inspect.getsource(loaded):
                found[f"{module.name}.{name}"] = value  # where it is defined, not imported
    return found


PAGES: Final[Mapping[str, Callable[[], str]]] = {"settings.md": settings, "states.md": states}


if __name__ == "__main__":
    for page, text in PAGES.items():
        (DOCS / page).write_text(text(), "utf-8")
