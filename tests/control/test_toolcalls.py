"""Tool calls are read in each model's own format; what is none is text, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.control.toolcalls import Sink, ToolFormat, ToolReader, call_id
from pdrt.control.toolformats import DEEPSEEK, HERMES, LISTED, LLAMA, MISTRAL, format_of

NAMES = frozenset({"f", "g"})
FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL, DEEPSEEK, LISTED)}
BEGIN, END, ONE, ONE_END, SEP = DEEPSEEK.markers
Call = tuple[str, str]


def read(
    form: ToolFormat, pieces: Sequence[str], *, only_one: bool = False
) -> tuple[str, list[Call]]:
    """The text, and (name, arguments) of each call."""
    reader = ToolReader(form, Sink(NAMES, str), only_one=only_one)
    text, calls = "", dict[int, Call]()
    for said, found in [*map(reader.feed, pieces), reader.rest()]:
        text += said
        for piece in found:
            assert bool(piece.id) == (piece.index not in calls), "named once, and at first"
            name, arguments = calls.get(piece.index, (piece.name, ""))
            calls[piece.index] = name, arguments + piece.arguments
    assert list(calls) == list(range(len(calls)))
    assert reader.has_called == bool(calls)
    return text, list(calls.values())


CALLS: list[tuple[str, str, str, list[Call]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": "}\\"{"}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"b": [1]}, "name": "g"}\n</tool_call>\n',
        "Let me see.",
        [("f", '{"a": "}\\"{"}'), ("g", '{"b": [1]}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"id": 3, "x": [{}], "name": "f", "arguments": {}, "y": null}</tool_call>',
        "",
        [("f", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> and so',
        " and so",
        [("f", "{}")],
    ),
    (
        "hermes",
        "a < b <tool <<tool_call>" + '{"name":"f","arguments":{}}',
        "a < b <tool <",
        [("f", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x', "", [("f", '{"a": [1, "x')]),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama", '\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", 'So: [TOOL_CALLS]f{"a": 1}', "So:", [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek",
        f'Hm.{BEGIN}{ONE}function{SEP}f\n```json\n{{"a": 1}}\n```{ONE_END}\n'
        f"{ONE}function{SEP}g\n```json\n{{}}\n```{ONE_END}{END}",
        "Hm.",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek",
        f'{BEGIN}{ONE}f{SEP}{{"a": 1}}{ONE_END}{ONE}g{SEP}{{}}{ONE_END}{END}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "listed",
        '[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":{}}]',
        "",
        [("f", '{"a":1}'), ("g", "{}")],
    ),
]


@pytest.mark.parametrize(("name", "said", "text", "calls"), CALLS)
def test_calls_are_read_in_the_models_own_format(
    name: str, said: str, text: str, calls: list[Call]
) -> None:
    assert read(FORMATS[name], [said]) == (text, calls)
    assert read(FORMATS[name], list(said)) == (text, calls)


NO_CALLS = [
    ("hermes", "just text, with space \n"),
    ("hermes", " \n"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}'),
    ("hermes", "<tool_cal"),
    ("llama", '{"name": "Bob", "parameters": {}}'),
    ("llama", '{"name": "f", "age": 3}'),
    ("llama", '{"name": "f"}'),
    ("llama", '<|python_tag|>print("hi")'),
    ("llama", 'He said {"name": "f", "parameters": {}}'),
    ("llama", "<div>"),
    ("mistral", "[1, 2] and [TOOL_"),
    ("mistral", '[TOOL_CALLS]unknown[ARGS]{"a": 1}'),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek", f"{BEGIN}{ONE}unknown{SEP}{{}}{ONE_END}{END}"),
    ("deepseek", f"{BEGIN}nothing"),
    ("deepseek", f"{BEGIN}{END}"),
    ("mistral", "[TOOL_CALLS] []"),
    ("deepseek", f"{BEGIN}{ONE}" + "x" * 999),
    ("listed", "[]"),
    ("listed", "no list"),
]


@pytest.mark.parametrize(("name", "said"), NO_CALLS)
def test_what_turns_out_to_be_no_call_is_text_every_character_of_it(name: str, said: str) -> None:
    assert read(FORMATS[name], [said]) == (said, [])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_told_does_not_depend_on_how_the_text_was_cut(
    name: str, data: st.DataObject
) -> None:
    form = FORMATS[name]
    own = [said for kind, said, *_ in [*CALLS, *NO_CALLS] if kind == name]
    parts = [
        *form.markers,
        *own,
        '{"name": "f", ',
        '"arguments": {',
        "}",
        '"',
        "\\",
        " ",
        "你",
        "[",
        "]",
    ]
    said = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    text, calls = read(form, pieces)
    assert (text, calls) == read(form, [said])
    assert calls or text == said
    one_text, one = read(form, pieces, only_one=True)
    assert one == calls[:1]
    assert said.startswith(one_text) or calls


def test_a_half_made_call_is_never_told_as_text() -> None:
    reader = ToolReader(HERMES, Sink(NAMES, str))
    told = [reader.feed(char) for char in 'ab <tool_call>{"name": "f", "arguments": {"x": 1}}']
    assert "".join(text for text, _ in told) == "ab"
    begins = [i for i, (_, calls) in enumerate(told) if any(piece.name for piece in calls)]
    assert len(begins) == 1
    assert begins[0] == len('ab <tool_call>{"name": "f", "arguments": '), "with its first argument"
    assert len([calls for _, calls in told if calls]) == len('{"x": 1}'), "as they come"


def test_with_one_call_wanted_nothing_follows_it() -> None:
    said = "a <tool_call>" + json.dumps({"name": "f", "arguments": {}}) + "</tool_call> b <tool_"
    assert read(HERMES, [said], only_one=True) == ("a", [("f", "{}")])


def test_the_format_is_found_in_the_template() -> None:
    assert format_of("... <tool_call>\n{...}") is HERMES
    assert format_of("<tool_call><function=x>") is None
    assert format_of("'[TOOL_CALLS]'") is MISTRAL
    assert format_of(f"{{ '{BEGIN}' }}") is DEEPSEEK
    assert format_of("<|python_tag|>") is LLAMA
    assert format_of('{"name": function name, "parameters": dictionary of') is LLAMA
    assert format_of("{{ tools }}") is None


def test_calls_are_named_alike_wherever_an_answer_is_taken_up() -> None:
    ids = [call_id("r/0", HERMES, 0), call_id("r/0", HERMES, 1), call_id("r/1", HERMES, 0)]
    assert len(set(ids)) == 3
    assert ids[0] == call_id("r/0", HERMES, 0)
    assert all(one.startswith("call_") for one in ids)
    short = call_id("r/0", MISTRAL, 0)
    assert (len(short), short.isalnum()) == (9, True), "as its template wants them"
