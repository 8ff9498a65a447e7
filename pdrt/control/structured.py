"""What an answer must be: OpenAI's `response_format` and pdrt's `structured_outputs`, as a grammar.

Only the form is checked here, for the router has no library for grammars: sizes and depths, so
that what is refused costs nothing. Leaders compile it before they admit the request.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pdrt.control.strict import Strict
from pdrt.messages import Grammar

MAX_BYTES: Final = 1 << 16  # of a schema, regular expression or grammar
MAX_DEPTH: Final = 64
MAX_CHOICES: Final = 1024
ANY_OBJECT: Final = Grammar(kind="json", text='{"type":"object"}')


def _schema(value: object) -> object:
    """A schema, which may come as its text. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = json.loads(_short(value))
        except RecursionError:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from None
    check_size(value)
    return value


def check_size(schema: object) -> None:
    """Raises ValueError when it is too deep or too large, soon whatever its size."""
    todo, left = [(schema, 1)], MAX_BYTES
    while todo:
        part, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
        left -= len(part) + 2 if isinstance(part, str | dict | list) else 1
        if left < 0:
            raise ValueError(f"is larger than {MAX_BYTES} bytes")
        if isinstance(part, dict):
            todo += [(each, depth + 1) for pair in part.items() for each in pair]
        elif isinstance(part, list):
            todo += [(each, depth + 1) for each in part]


def _short(text: str) -> str:
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    return text


Schema: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_schema)]
Formal: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_short)]
Choice: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096)]
Choices: TypeAlias = Annotated[
    list[Choice], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)
]


def of_schema(schema: object) -> Grammar:
    """Raises ValueError when it is too large as it travels, written without spaces."""
    return Grammar(kind="json", text=_written(schema))


def _written(value: object) -> str:
    return _short(json.dumps(value, separators=(",", ":")))


class JsonSchema(Strict):
    """`strict` changes nothing: an answer always is what the schema says."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("type json_schema and the field json_schema come together")
        self.grammar()  # raises ValueError
        return self

    def grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return of_schema(self.json_schema.schema_)
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """One of these; vLLM's names."""

    json_: Schema | None = Field(None, alias="json")
    regex: Formal | None = None
    choice: Choices | None = None
    grammar_: Formal | None = Field(None, alias="grammar")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1 or self.grammar() is None:
            raise ValueError("has one of json, regex, choice, grammar and json_object")
        return self

    def grammar(self) -> Grammar | None:
        if self.json_ is not None:
            return of_schema(self.json_)
        if self.regex is not None:
            return Grammar(kind="regex", text=self.regex)
        if self.choice is not None:
            return Grammar(kind="choice", text=_written(self.choice))
        if self.grammar_ is not None:
            return Grammar(kind="lark", text=self.grammar_)
        return ANY_OBJECT if self.json_object else None
