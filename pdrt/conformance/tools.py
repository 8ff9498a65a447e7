"""The checks of tools and of answers that must be JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pdrt.conformance.chats import joined, last_reason, said
from pdrt.conformance.check import Check, Failed, NotServed, must, same
from pdrt.conformance.endpoint import Endpoint

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

GROUP: Final = "tools and JSON"
_LONG: Final = 200
_ASK: Final = [{"role": "user", "content": "How is the weather in Oslo? Use the tool."}]
_UNITS: Final = ["celsius", "fahrenheit"]
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"unit": {"enum": _UNITS}, "now": {"type": "boolean"}},
    "required": ["unit", "now"],
    "additionalProperties": False,
}
_TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": name, "description": what, "parameters": _SCHEMA},
    }
    for name, what in (("weather", "tells the weather"), ("tides", "tells high and low water"))
]
_STRICT: Final = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True},
}
_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"unit": "celsius", "now": true}'},
}


def checks() -> Iterator[Check]:
    yield Check(GROUP, "tools, auto", auto)
    yield Check(GROUP, "tools, required", required, is_compared=True)
    yield Check(GROUP, "tools, required, streamed", required_streamed)
    yield Check(GROUP, "tools, one by name", named, is_compared=True)
    yield Check(GROUP, "tools, none", none)
    yield Check(GROUP, "a tool's result in the talk", result, is_compared=True)
    yield Check(GROUP, "response_format json_object", json_object, is_compared=True)
    yield Check(GROUP, "response_format json_schema", json_schema, is_compared=True)
    yield Check(GROUP, "json_schema, streamed", json_streamed)
    yield Check(GROUP, "json_schema with a seed", json_seeded, is_compared=True)
    yield Check(GROUP, "a schema that is none is refused", bad_schema)


def fits(text: str) -> dict[str, Any]:
    """What the schema asks for. Raises Failed."""
    try:
        told = json.loads(text)
    except ValueError:
        raise Failed(f"expected JSON, got {text!r}") from None
    must(isinstance(told, dict), "an object", told)
    same({"unit", "now"}, set(told), "keys")
    must(told["unit"] in _UNITS, f"one of {_UNITS}", told["unit"])
    must(isinstance(told["now"], bool), "true or false", told["now"])
    return dict(told)


def _calls(told: ChatCompletion) -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    for call in told.choices[0].message.tool_calls or ():
        same("function", call.type, "type of a call")
        must(bool(call.id), "an id of a call", call)
        if call.type == "function":
            found.append((call.function.name, call.function.arguments))
    return found


def _right(calls: Sequence[tuple[str, str]], names: Sequence[str]) -> object:
    must(bool(calls), "tool_calls", calls)
    must(all(name in names for name, _ in calls), f"calls of {names}", calls)
    return [[name, fits(arguments)] for name, arguments in calls]


async def auto(e: Endpoint) -> None:
    told = await e.chat(messages=_ASK, tools=_TOOLS, max_tokens=_LONG)
    if calls := _calls(told):
        same("tool_calls", told.choices[0].finish_reason, "finish_reason")
        must(all(name in ("weather", "tides") for name, _ in calls), "calls of a tool", calls)
    else:
        said(told)


async def required(e: Endpoint) -> object:
    told = await e.chat(messages=_ASK, tools=_TOOLS, tool_choice="required", max_tokens=_LONG)
    found = _right(_calls(told), ("weather", "tides"))
    same("tool_calls", told.choices[0].finish_reason, "finish_reason")
    return found


async def required_streamed(e: Endpoint) -> None:
    more = {"messages": _ASK, "tools": _TOOLS, "tool_choice": "required", "max_tokens": _LONG}
    told, chunks = await e.chat(**more), await e.chatting(**more)
    names, arguments = dict[int, str](), dict[int, str]()
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                function = call.function
                if function is not None and function.name:
                    same(None, names.get(call.index), f"a second name of call {call.index}")
                    names[call.index] = function.name
                if function is not None:
                    said_before = arguments.get(call.index, "")
                    arguments[call.index] = said_before + (function.arguments or "")
    calls = [(names[index], arguments[index]) for index in sorted(names)]
    same(_calls(told), calls, "the calls")
    same("tool_calls", last_reason(chunks), "finish_reason")


async def named(e: Endpoint) -> object:
    choice = {"type": "function", "function": {"name": "tides"}}
    told = await e.chat(messages=_ASK, tools=_TOOLS, tool_choice=choice, max_tokens=_LONG)
    reason = told.choices[0].finish_reason
    must(reason in ("stop", "tool_calls"), "finish_reason stop or tool_calls", reason)
    return _right(_calls(told), ("tides",))


async def none(e: Endpoint) -> None:
    told = await e.chat(messages=_ASK, tools=_TOOLS, tool_choice="none")
    same([], _calls(told), "tool_calls")
    said(told)


async def result(e: Endpoint) -> object:
    turns = [
        *_ASK,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    return said(await e.chat(messages=turns, tools=_TOOLS, tool_choice="none"))


async def json_object(e: Endpoint) -> object:
    told = await e.chat(response_format={"type": "json_object"}, max_tokens=_LONG)
    text = said(told)
    if told.choices[0].finish_reason == "length":  # cut: it is the beginning of one
        must(text.lstrip()[:1] in ("", "{"), "the beginning of an object", text)
        return text
    try:
        must(isinstance(json.loads(text), dict), "an object", text)
    except ValueError:
        raise Failed(f"expected JSON, got {text!r}") from None
    return text


async def json_schema(e: Endpoint) -> object:
    told = await e.chat(response_format=_STRICT, max_tokens=_LONG)
    same("stop", told.choices[0].finish_reason, "finish_reason")
    fits(said(told))
    return said(told)


async def json_streamed(e: Endpoint) -> None:
    told = said(await e.chat(response_format=_STRICT, max_tokens=_LONG))
    chunks = await e.chatting(response_format=_STRICT, max_tokens=_LONG)
    same(told, joined(chunks), "text")
    fits(joined(chunks))


async def json_seeded(e: Endpoint) -> object:
    more = {"response_format": _STRICT, "max_tokens": _LONG, "temperature": 1.0, "seed": 11}
    first, again = said(await e.chat(**more)), said(await e.chat(**more))
    fits(first)
    same(first, again, "the same answer")
    return first


async def bad_schema(e: Endpoint) -> None:
    schema = {"name": "answer", "schema": {"type": "no such type"}, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = await e.post(
        "/v1/chat/completions",
        {"model": e.model, "messages": _ASK, "max_tokens": 8, "response_format": form},
    )
    if "not supported" in answer.text:
        raise NotServed(answer.text)
    must(answer.status == 400, "status 400", (answer.status, answer.text))
