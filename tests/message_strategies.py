"""Hypothesis strategies for messages, read from their own field types and bounds."""

from __future__ import annotations

import types
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types as limits
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

Strategy = st.SearchStrategy[Any]


def words(most: int = 20) -> Strategy:
    return st.text(st.characters(codec="utf-8"), max_size=min(20, most))


@cache
def message(kind: type) -> Strategy:
    """Any valid message of this class."""
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{f.name: value(hints[f.name]) for f in fields(kind)})


def any_of(union: object) -> Strategy:
    """Any message of a direction, such as `messages.FromDecode`."""
    kinds, _discriminator = get_args(union)
    return st.one_of([message(kind) for kind in get_args(kinds)])


def kinds_of(union: object) -> tuple[type, ...]:
    kinds, _discriminator = get_args(union)
    return get_args(kinds)


def value(hint: Any, bounds: dict[str, Any] | None = None) -> Strategy:
    bounds = bounds or {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        is_union = any("discriminator" in repr(each) for each in arguments[1:])
        return any_of(hint) if is_union else value(arguments[0], bounds | _bounds(arguments[1:]))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([value(argument) for argument in arguments])
    if origin is tuple:
        return _tuple(arguments, bounds)
    if origin is dict:
        return st.dictionaries(words(), value(arguments[1]), max_size=3)
    return _plain(hint, bounds)


def _tuple(arguments: tuple[Any, ...], bounds: dict[str, Any]) -> Strategy:
    if arguments[-1] is not ...:
        return st.tuples(*map(value, arguments))
    return st.lists(value(arguments[0]), max_size=min(3, bounds.get("max_length", 3))).map(tuple)


def _plain(hint: Any, bounds: dict[str, Any]) -> Strategy:
    if hint is int:
        least, most = bounds.get("ge", -(1 << 63)), bounds.get("le", bounds.get("lt", 1 << 63) - 1)
        return st.sampled_from([least, most]) | st.integers(least, most)
    if hint is float:
        least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le")
        return st.floats(
            least, most, allow_nan=False, allow_infinity=False, exclude_min="gt" in bounds
        )
    if hint is bytes:
        return st.binary(max_size=min(40, bounds.get("max_length", 40)))
    if hint is str:
        return words(bounds.get("max_length", 20))
    simple = {type(None): st.none(), bool: st.booleans()}
    return simple[hint] if hint in simple else message(hint)


def _bounds(metadata: tuple[Any, ...]) -> dict[str, Any]:
    """The limits that pydantic keeps as annotated_types: their one field is the name."""
    found: dict[str, Any] = {}
    for item in metadata:
        for limit in item.metadata if isinstance(item, FieldInfo) else ():
            if isinstance(limit, limits.Ge | limits.Gt | limits.Le | limits.Lt | limits.MaxLen):
                found |= {f.name: getattr(limit, f.name) for f in fields(limit)}
    return found
