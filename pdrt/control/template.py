"""A model's chat template: jinja2, sandboxed, with the few extras that models' templates use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdrt.control.order import Chat
from pdrt.errors import BadRequest, ConfigError

_GIVEN: Final = frozenset({"messages", "tools", "documents"})
_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    def __init__(self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """`tokens` are the special ones by name (bos_token, ...). Raises jinja2.TemplateError."""
        self._tokens = tokens
        self._template = _environment(now).from_string(source)

    @staticmethod
    def read(directory: Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """The template in a model's directory, or None. Raises ConfigError when it is broken."""
        config = directory / "tokenizer_config.json"
        fields = _object(config)
        file = directory / "chat_template.jinja"
        try:
            source = (
                file.read_text("utf-8") if file.exists() else _default(fields.get("chat_template"))
            )
            return ChatTemplate(source, _tokens(fields), now) if source else None
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            where = file if file.exists() else config
            raise ConfigError(f"{where}: the chat template cannot be used: {error}") from error

    def render(self, chat: Chat) -> str:
        """The prompt of a conversation. Raises BadRequest when the template refuses it."""
        taken = chat.options.keys() & (_GIVEN | self._tokens.keys())
        if taken:
            raise BadRequest(f"chat_template_kwargs.{min(taken)} is not yours to set")
        given: dict[str, Any] = {
            "messages": [dict(turn) for turn in chat.turns],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(**given, **self._tokens, **chat.options)
        except _RENDER_ERRORS as error:
            raise BadRequest(f"messages: the chat template refuses them: {error}"[:500]) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 - the base class says a plain set

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's own escapes for HTML; the arguments are those that templates expect."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _object(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return fields


def _default(found: object) -> str:
    """A template, or that named `default` in a list of them."""
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like: strings, or objects with `content`."""
    found: dict[str, str] = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
