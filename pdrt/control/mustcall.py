"""The grammar of an answer that must call tools: a JSON list of calls, whatever the model's format.

A tool's schema may point into itself, so each becomes a definition of the whole, and what points
into it is made to do so there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdrt.control.structured import of_schema
from pdrt.control.turns import Function
from pdrt.messages import Grammar


def grammar_of(functions: Sequence[Function], *, only_one: bool) -> Grammar:
    """Raises ValueError when their schemas are too large together."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(function.name) for function in functions]},
        "$defs": {function.name: _definition(function) for function in functions},
    }
    return of_schema(schema | {"maxItems": 1} if only_one else schema)


def _call(name: str) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _definition(function: Function) -> Any:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | _moved(function.parameters, f"#/$defs/{function.name}")


def _moved(part: Any, to: str) -> Any:
    """A schema whose root is now elsewhere; it is not deep, for that was checked."""
    if isinstance(part, list):
        return [_moved(each, to) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: to + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, to)
        for key, value in part.items()
    }
