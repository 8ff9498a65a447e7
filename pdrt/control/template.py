"""A model's chat template: jinja2, sandboxed, with the few extras that models' templates use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdrt.control.http import Json, no_constant
from pdrt.control.order import Chat
from pdrt.control.toolcalls import ToolFormat
from pdrt.control.toolformats import format_of
from pdrt.errors import BadRequest, ConfigError

_GIVEN: Final = frozenset({"messages", "tools", "documents"})
_ASKS_FOR_NONE: Final = re.compile(r"(\[['\"]content['\"]\]|\.content)\s+is\s+(not\s+)?none")
_JOINS_ARGUMENTS: Final = re.compile(r"\+\s*[\w.\[\]'\"]*arguments(['\"]\])?\s*(\+|-?\}\}|-?%\})")
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
    """Made of a source, and of another for conversations with tools where the model has two."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        now: Callable[[], datetime],
        with_tools: str | None = None,
    ) -> None:
        """`tokens` are the special ones by name (bos_token, ...). Raises jinja2.TemplateError."""
        environment = _environment(now)
        self._tokens = tokens
        self._plain = _Source(environment, source)
        self._tooled = self._plain if with_tools is None else _Source(environment, with_tools)

    @staticmethod
    def read(directory: Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """The template in a model's directory, or None. Raises ConfigError when it is broken."""
        config = directory / "tokenizer_config.json"
        fields = _object(config)
        file = directory / "chat_template.jinja"
        try:
            named = _named(fields.get("chat_template")) | _files(directory)
            if "default" not in named:
                return None
            return ChatTemplate(named["default"], _tokens(fields), now, named.get("tool_use"))
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            where = file if file.exists() else config
            raise ConfigError(f"{where}: the chat template cannot be used: {error}") from error

    @property
    def tool_format(self) -> ToolFormat | None:
        return self._tooled.tool_format

    def render(self, chat: Chat) -> str:
        """The prompt of a conversation. Raises BadRequest when the template refuses it."""
        taken = chat.options.keys() & (_GIVEN | self._tokens.keys())
        if taken:
            raise BadRequest(f"chat_template_kwargs.{min(taken)} is not yours to set")
        source = self._tooled if chat.tools else self._plain
        if chat.tools:
            source.check_tools()
        turns = source.turns(chat.turns)
        given: dict[str, Any] = {
            "messages": turns,
            "tools": list(chat.tools) or None,
            "documents": None,
            "add_generation_prompt": chat.begins_answer,
        }
        try:
            text = source.template.render(**given, **self._tokens, **chat.options)
        except _RENDER_ERRORS as error:
            raise BadRequest(f"messages: the chat template refuses them: {error}"[:500]) from error
        return continued(text, turns[-1]["content"]) if chat.continues_last else text


class _Source:
    """One template, and what its text tells of what it expects."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, text: str) -> None:
        self.template = environment.from_string(text)
        self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(text))
        self._knows_developers = "developer" in text
        self._knows_none = _ASKS_FOR_NONE.search(text) is not None
        self._joins_arguments = _JOINS_ARGUMENTS.search(text) is not None
        self.tool_format = format_of(text) if self._takes_tools else None

    def check_tools(self) -> None:
        """Raises BadRequest when it has no place for tools, or asks for calls in unknown words."""
        if not self._takes_tools:
            raise BadRequest("tools: not supported, for this model's chat template takes none")
        if self.tool_format is None:
            raise BadRequest(
                "tools: not supported, for the format of this chat template is not known here"
            )

    def turns(self, turns: Sequence[Json]) -> list[Json]:
        """As this template expects them. Raises BadRequest for arguments that are no JSON."""
        return [self._turn(turn, f"messages.{index}") for index, turn in enumerate(turns)]

    def _turn(self, turn: Json, where: str) -> Json:
        role = turn["role"]
        said = dict(turn)
        if role == "developer" and not self._knows_developers:
            said["role"] = "system"
        calls = turn.get("tool_calls")
        if turn["content"] is None and not (calls and self._knows_none):
            said["content"] = ""
        if calls and not self._joins_arguments:
            said["tool_calls"] = [
                _with_object(call, f"{where}.tool_calls.{index}.function.arguments")
                for index, call in enumerate(calls)
            ]
        return said


def _with_object(call: Json, where: str) -> Json:
    """Most templates write a call's arguments themselves."""
    function = call["function"]
    try:
        found = json.loads(function["arguments"] or "{}", parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where}: no JSON: {error}"[:300]) from error
    return {**call, "function": {**function, "arguments": found}}


def continued(text: str, last: str) -> str:
    """A prompt up to the end of what its last turn says. Raises BadRequest."""
    at = text.rfind(last.strip())
    if at < 0 or not last.strip():
        raise BadRequest(
            "continue_final_message: the chat template does not write the last message"
        )
    begin = at - (len(last) - len(last.lstrip()))
    if begin >= 0 and text.startswith(last, begin):
        return text[: begin + len(last)]
    return text[: at + len(last.strip())]


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


def _named(found: object) -> dict[str, str]:
    """A template is the one named `default`; there may be a list of them."""
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict)}
    else:
        named = {"default": found}
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


def _files(directory: Path) -> dict[str, str]:
    """Templates in files of their own, which win."""
    names = {
        "default": directory / "chat_template.jinja",
        "tool_use": directory / "additional_chat_templates" / "tool_use.jinja",
    }
    return {name: file.read_text("utf-8") for name, file in names.items() if file.exists()}


def _tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like: strings, or objects with `content`."""
    found: dict[str, str] = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
