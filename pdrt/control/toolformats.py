"""How models write tool calls: a reader for each format, and which one a chat template has.

A reader is sent one character at a time and tells its sink what it finds: a half-made call is
told only once it can be nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from pdrt.control.toolcalls import SPACE, Asking, Ended, Reading, Sink, ToolFormat, Trying

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_MAX_NAME: Final = 256  # characters of what stands where a name should

# Pieces that formats have in common.


def _until(sink: Sink, marker: str) -> Reading:
    """Text, up to a marker, whose first character is nowhere else in it."""
    matched = 0
    while matched < len(marker):
        char = yield
        if not char:
            raise Ended
        if char == marker[matched]:
            sink.held.append(char)
            matched += 1
        elif char in SPACE and not matched:
            sink.held.append(char)  # it belongs to the text only if more text follows
        else:
            is_first = char == marker[0]
            if not is_first:
                sink.held.append(char)
            sink.is_text()
            if is_first or char in SPACE:
                sink.held = [char] if is_first else []
            matched = int(is_first)


def _plain(sink: Sink) -> Reading:
    """Nothing but text."""
    while True:
        sink.is_text()
        yield from sink.read()


def _string(sink: Sink) -> Asking:
    """What a JSON string says whose quote was read; empty when it says nothing."""
    raw = '"'
    while (char := (yield from sink.read())) != '"':
        raw += char
        if char == "\\":
            raw += yield from sink.read()
    try:
        return str(json.loads(raw + '"', strict=False))
    except ValueError:
        return ""


def _nested(sink: Sink, first: str, say: Callable[[str], None]) -> Reading:
    """An object or a list that begins with `first`, character by character."""
    say(first)
    depth, is_string = 1, False
    while depth:
        char = yield from sink.read()
        say(char)
        if is_string:
            if char == "\\":
                say((yield from sink.read()))
            is_string = char != '"'
        elif char == '"':
            is_string = True
        else:
            depth += (char in "{[") - (char in "}]")


def _call(sink: Sink, first: str, *, is_bare: bool = False) -> Trying:
    """A call as an object with a name and arguments; False, with all of it held, when it is none.

    A bare one, without a marker before it, must have arguments. Other fields are passed over.
    """
    name, early, char = "", "", first
    while char in ("{", ","):
        key = yield from _key(sink)
        char = yield from sink.read_solid()
        if key == "name" and not name:
            name = yield from _offered(sink, char)
            if not name:
                return False
            char = yield from sink.read_solid()
        elif key in _ARGUMENTS and not early:
            early = yield from _arguments(sink, name, char)
            if not early:
                return False
            char = yield from sink.read_solid()
        elif key:
            char = yield from _after(sink, char)
        else:
            break
        if name and early:
            sink.tell(name, early)
    if char == "}" and name and not is_bare:
        sink.tell(name, "{}")
    return sink.end()


def _offered(sink: Sink, first: str) -> Asking:
    """A name, when it is that of a tool."""
    name = (yield from _string(sink)) if first == '"' else ""
    return name if name in sink.names else ""


def _key(sink: Sink) -> Asking:
    """The next key of an object, up to its colon; empty when there is none."""
    if (yield from sink.read_solid()) != '"':
        return ""
    key = yield from _string(sink)
    return key if (yield from sink.read_solid()) == ":" else ""


def _arguments(sink: Sink, name: str, first: str) -> Asking:
    """What a call is given: told as it comes where the name is known, else all of it.

    Some models write it as a string that holds an object. Empty when it is nothing of the kind.
    """
    if first == '"':
        return (yield from _string(sink)) or "{}"
    if first != "{":
        return ""
    if name:
        sink.begin(name)
        yield from _nested(sink, first, sink.argue)
        return "{"
    found: list[str] = []
    yield from _nested(sink, first, found.append)
    return "".join(found)


def _after(sink: Sink, first: str) -> Asking:
    """What follows any other value, which is passed over."""
    if first == '"':
        yield from _string(sink)
    elif first in "{[":
        yield from _nested(sink, first, _nowhere)
    else:
        char = first
        while char not in ",}":
            char = yield from sink.read()
        return char
    return (yield from sink.read_solid())


def _nowhere(_text: str) -> None:
    pass


# The formats.


def _hermes(sink: Sink) -> Reading:
    """<tool_call>{...}</tool_call>, once or more, with text around."""
    begin, end = "<tool_call>", "</tool_call>"
    while True:
        yield from _until(sink, begin)
        is_call = yield from _call(sink, (yield from sink.read_solid()))
        if is_call:
            yield from _closing(sink, end)
        else:
            sink.is_text()


def _closing(sink: Sink, marker: str) -> Reading:
    """Pass over a marker that follows at once; anything else that does is text."""
    char = yield from sink.read_solid()
    for at, want in enumerate(marker):
        if char != want:
            sink.is_text()
            return
        if at + 1 < len(marker):
            char = yield from sink.read()
    sink.held.clear()


def _llama(sink: Sink) -> Reading:
    """An answer that is {"name": ..., "parameters": {...}}, or more of them after semicolons."""
    tag = "<|python_tag|>"
    char = yield from sink.read_solid()
    while True:
        is_tagged = char == tag[0]
        if is_tagged:
            for want in tag[1:]:
                if (yield from sink.read()) != want:
                    yield from _plain(sink)
            char = yield from sink.read_solid()
        if char != "{" or not (yield from _call(sink, char, is_bare=True)):
            yield from _plain(sink)
        while (char := (yield from sink.read_solid())) in ";,":
            pass


def _mistral(sink: Sink) -> Reading:
    """[TOOL_CALLS] and a list of calls, or, once a call, its name, [ARGS] and its arguments."""
    while True:
        yield from _until(sink, "[TOOL_CALLS]")
        char = yield from sink.read_solid()
        if char == "[":
            yield from _list(sink)
        else:
            yield from _named(sink, char)
        sink.is_text()


def _list(sink: Sink) -> Reading:
    """Calls up to the list's end."""
    char = ","
    while char == ",":
        if not (yield from _call(sink, (yield from sink.read_solid()))):
            return
        char = yield from sink.read_solid()
    if char == "]":
        sink.held.clear()


def _named(sink: Sink, first: str) -> Reading:
    name, char = "", first
    while char not in "[{" and len(name) < _MAX_NAME:
        name += char
        char = yield from sink.read()
    while char == "[":  # [CALL_ID] and an id, [ARGS]
        while char != "]":
            char = yield from sink.read()
        while char not in "[{":
            char = yield from sink.read()
    yield from _given(sink, name.strip(), char)


def _given(sink: Sink, name: str, first: str) -> Trying:
    """A call whose name came before its arguments."""
    if first != "{" or name not in sink.names:
        return False
    yield from _arguments(sink, name, first)
    return sink.end()


_DEEPSEEK: Final = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_END: Final = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_ONE: Final = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_ONE_END: Final = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"


def _deepseek(sink: Sink) -> Reading:
    """Within markers, each call as `function`, separator, name and a fenced object (V3, R1), or as
    name, separator and object (V3.1)."""
    while True:
        yield from _until(sink, _DEEPSEEK)
        has_called = False
        while (marker := (yield from _marked(sink))) == _ONE:
            if not (yield from _separated(sink)):
                break
            has_called = True
            yield from _up_to(sink, _ONE_END)
            sink.held.clear()
        if has_called and marker == _DEEPSEEK_END:
            sink.held.clear()
        sink.is_text()


def _marked(sink: Sink) -> Asking:
    """The marker that follows."""
    found = yield from sink.read_solid()
    while any(each.startswith(found) and each != found for each in (_ONE, _DEEPSEEK_END)):
        found += yield from sink.read()
    return found


def _separated(sink: Sink) -> Trying:
    name = yield from _up_to(sink, _SEPARATOR)
    if name.strip() == "function":
        name = yield from _up_to(sink, "\n")
    char = yield from sink.read_solid()
    while char in "`json" or char in SPACE:
        char = yield from sink.read()
    return (yield from _given(sink, name.strip(), char))


def _up_to(sink: Sink, marker: str) -> Asking:
    """What stands before a marker, if it comes soon."""
    found = ""
    while not found.endswith(marker) and len(found) < _MAX_NAME + len(marker):
        found += yield from sink.read()
    return found.removesuffix(marker)


def _listed(sink: Sink) -> Reading:
    """A list of calls and nothing else: what a grammar makes of an answer that must call."""
    if (yield from sink.read_solid()) == "[":
        yield from _list(sink)
    yield from _plain(sink)


HERMES: Final = ToolFormat("hermes", _hermes, ("<tool_call>", "</tool_call>"))
LLAMA: Final = ToolFormat("llama", _llama, ("<|python_tag|>",))
MISTRAL: Final = ToolFormat(
    "mistral", _mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), has_short_ids=True
)
DEEPSEEK: Final = ToolFormat(
    "deepseek", _deepseek, (_DEEPSEEK, _DEEPSEEK_END, _ONE, _ONE_END, _SEPARATOR)
)
LISTED: Final = ToolFormat("listed", _listed)


def format_of(template: str) -> ToolFormat | None:
    """The format in which a chat template tells its model to call, if it is one of these."""
    if _DEEPSEEK in template:
        return DEEPSEEK
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA
    return None
