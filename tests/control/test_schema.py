"""Every field of a client's body is honoured, or refused by its name; legs get an allow-list."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt.config import Role
from pdrt.control.order import (
    Calling,
    Chat,
    Dialect,
    Pin,
    leg_body,
    parse,
    parse_prefill_again,
    parse_rebind,
    split_leg,
)
from pdrt.control.schema import (
    IGNORED,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Drawing,
    GenerateDrawing,
    GenerateRequest,
    LegFields,
)
from pdrt.control.turns import MAX_TURNS
from pdrt.errors import BadRequest, TooLong
from pdrt.messages import Grammar, Sampling

Body = dict[str, Any]
LEAST: dict[Dialect, Body] = {
    "generate": {"prompt": "a"},
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
}
CALL: Body = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SIDES: tuple[Role, ...] = ("prefill", "decode", "hybrid")
DIALECTS: tuple[Dialect, ...] = ("generate", "completions", "chat")
LEG = LegFields(
    bootstrap_room=7,
    attempt=65536,
    time_left_s=9.5,
    transfer_token="token",
    request_id="id-1",
    client_room=3,
    bootstrap_host="10.0.0.1",
    bootstrap_port=18800,
    disagg_prefill_dp_rank=1,
)


def body_of(dialect: Dialect, **fields: Any) -> Body:
    """The least body of a dialect, with fields where that dialect has them."""
    drawing = {k: v for k, v in fields.items() if k in Drawing.model_fields}
    if dialect == "generate" and drawing:
        rest = {k: v for k, v in fields.items() if k not in drawing}
        return {**LEAST[dialect], **rest, "sampling_params": drawing}
    return {**LEAST[dialect], **fields}


def refusal(dialect: Dialect, body: Body) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(dialect, body)
    return str(caught.value)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("field", "value", "drawn"),
    [
        ("temperature", 0, {"temperature": 0.0}),
        ("temperature", 0.7, {"temperature": 0.7}),
        ("top_p", 0.9, {"top_p": 0.9}),
        ("top_k", 5, {"top_k": 5}),
        ("top_k", -1, {"top_k": 0}),
        ("min_p", 0.1, {"min_p": 0.1}),
        ("repetition_penalty", 1.2, {"repetition_penalty": 1.2}),
        ("presence_penalty", -1, {"presence_penalty": -1.0}),
        ("frequency_penalty", 2.0, {"frequency_penalty": 2.0}),
        ("stop_token_ids", [3, 4], {"stop_token_ids": (3, 4)}),
        ("ignore_eos", True, {"ignore_eos": True}),
        ("seed", 5, {"seed": 5}),
        ("seed", -1, {"seed": (1 << 63) - 1}),
        ("max_tokens", 9, {"max_tokens": 9}),
        ("n", 3, {"n": 3}),
        (
            "logit_bias",
            {"7": 1, "0": -100},
            {"logit_bias": ((7, 1), (0, -100))},
        ),
        ("logit_bias", {}, {}),
        ("structured_outputs", {"regex": "a+"}, {"grammar": Grammar(kind="regex", text="a+")}),
        ("temperature", None, {}),
    ],
)
def test_each_sampling_field_is_honoured(
    dialect: Dialect, field: str, value: object, drawn: Body
) -> None:
    order = parse(dialect, body_of(dialect, **{"max_tokens": 8, "seed": 1, field: value}))
    want = Sampling(**{"max_tokens": 8, "seed": 1, **drawn})
    assert order.settle(prompt_tokens=3, limit=100, seed=99) == want


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "8"),
        ("max_tokens", 8.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("stop", ""),
        ("stop", [""]),
        ("stop", 3),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 65),
        ("ignore_eos", "yes"),
        ("seed", 1.5),
        ("logit_bias", {"7": 100.5}),
        ("logit_bias", {"7": math.nan}),
        ("logit_bias", {"7": "1"}),
        ("logit_bias", {"07": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"2147483648": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", [7, 1]),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("logprobs", "yes"),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_bad_or_unsupported_sampling_field_is_named(
    dialect: Dialect, field: str, value: object
) -> None:
    fields = {**LEAST[dialect], field: value}
    if dialect == "generate":
        fields = {**LEAST[dialect], "sampling_params": {field: value}}
    assert field in refusal(dialect, fields)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temprature", 1),
        ("stream", "yes"),
        ("timeout_s", 0),
        ("timeout_s", 1e9),
        ("request_id", "with space"),
        ("request_id", ""),
        ("cache_salt", ""),
        ("cache_salt", "x" * 513),
        ("cache_salt", "\ud800"),
        ("priority", 1001),
        ("priority", -1001),
        ("priority", 0.5),
        ("bootstrap_room", -1),
        ("bootstrap_room", 1 << 63),
        ("bootstrap_host", "only"),
        ("bootstrap_port", 18800),
        ("attempt", 0),
        ("disagg_prefill_dp_rank", 0),
        ("time_left_s", 1.0),
        ("transfer_token", "x"),
    ],
)
def test_an_unknown_or_bad_field_is_named_also_the_legs_own(
    dialect: Dialect, field: str, value: object
) -> None:
    """CASES 82: what only the router may say is not a client's to say."""
    assert field in refusal(dialect, body_of(dialect, **{field: value}))


@pytest.mark.parametrize(
    ("dialect", "field", "said"),
    [
        ("generate", {"max_tokens": 8}, "max_tokens ...; did you mean sampling_params.max_tokens?"),
        (
            "generate",
            {"max_new_tokens": 8},
            "max_new_tokens ...; did you mean sampling_params.max_tokens?",
        ),
        ("generate", {"text": "b"}, "text ...; did you mean prompt?"),
        ("generate", {"strem": True}, "strem ...; did you mean stream?"),
        ("generate", {"sampling_params": {"colour": 1}}, "sampling_params.colour ..."),
        (
            "generate",
            {"sampling_params": {"temprature": 1}},
            "sampling_params.temprature ...; did you mean sampling_params.temperature?",
        ),
        (
            "generate",
            {"sampling_params": {"stream": True}},
            "sampling_params.stream ...; did you mean stream?",
        ),
        ("completions", {"max_new_tokens": 8}, "max_new_tokens ...; did you mean max_tokens?"),
        ("generate", {"colour": "red"}, "colour ..."),
        ("chat", {"stream_options": {"include_usge": True}}, "stream_options.include_usge ..."),
        ("generate", {"max_token" + 99 * "s": 8}, "max_token" + 99 * "s" + " ..."),
    ],
)
def test_an_unknown_field_is_named_and_so_is_the_one_that_was_meant(
    dialect: Dialect, field: Body, said: str
) -> None:
    want = said.replace("...", "is not a known field")
    assert refusal(dialect, body_of(dialect) | field) == want


@pytest.mark.parametrize("dialect", ["completions", "chat"])
@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("suffix", "", "end"),
        ("functions", [], [{"name": "f"}]),
        ("modalities", ["text"], ["audio"]),
        ("reasoning_effort", None, "low"),
    ],
)
def test_openai_fields_not_served_are_refused_only_when_they_ask_for_something(
    dialect: Dialect, field: str, neutral: object, asking: object
) -> None:
    parse(dialect, body_of(dialect, **{field: neutral}))
    parse(dialect, body_of(dialect, **{field: None}))
    assert refusal(dialect, body_of(dialect, **{field: asking})) == (
        f"{field} is not supported in this version"
    )


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", {"best_of": 2}),
        ("chat", {"echo": True}),
        ("chat", {"prompt_logprobs": 1}),
        ("chat", {"top_logprobs": 3}),
        ("chat", {"logprobs": False, "top_logprobs": 3}),
        ("chat", {"logprobs": True, "top_logprobs": 21}),
        ("chat", {"logprobs": 1}),
        ("completions", {"stream": True, "best_of": 2}),
        ("completions", {"n": 2, "best_of": 1}),
        ("completions", {"best_of": 129}),
        ("completions", {"top_logprobs": 3}),
        ("completions", {"prompt_logprobs": 1}),
        ("completions", {"logprobs": True}),
        ("completions", {"max_tokens": 0}),
        ("completions", {"echo": "yes"}),
        ("generate", {"sampling_params": {"echo": True}}),
        ("generate", {"sampling_params": {"top_logprobs": 2}}),
        ("generate", {"stream": True, "sampling_params": {"best_of": 2}}),
        ("generate", {"sampling_params": {"logprobs": True}}),
        ("generate", {"sampling_params": {"prompt_logprobs": 21}}),
        ("generate", {"logprobs": 1}),
    ],
)
def test_what_asks_for_odds_or_choices_in_a_way_that_is_not_served_is_named(
    dialect: Dialect, fields: Body
) -> None:
    name = next(reversed(fields.get("sampling_params", fields)))
    said = refusal(dialect, {**LEAST[dialect], **fields})
    assert name in said or "best_of" in said


@pytest.mark.parametrize(
    ("dialect", "fields", "odds", "scoring", "echo"),
    [
        ("generate", {}, None, -1, False),
        ("generate", {"logprobs": 0}, 0, -1, False),
        ("generate", {"logprobs": 3, "prompt_logprobs": 0}, 3, 0, False),
        ("generate", {"prompt_logprobs": 5}, None, 5, False),
        ("completions", {"logprobs": 2}, 2, -1, False),
        ("completions", {"logprobs": 0, "echo": False, "best_of": 1}, 0, -1, False),
        ("completions", {"logprobs": False}, None, -1, False),
        ("completions", {"echo": True}, None, -1, True),
        ("completions", {"echo": True, "logprobs": 4, "n": 2, "best_of": 2}, 4, 4, True),
        ("chat", {"logprobs": True}, 0, -1, False),
        ("chat", {"logprobs": True, "top_logprobs": 20}, 20, -1, False),
        ("chat", {"logprobs": False, "top_logprobs": 0, "best_of": 1, "echo": False}, None, -1, 0),
    ],
)
def test_odds_and_echo_are_read_in_each_dialects_words(
    dialect: Dialect, fields: Body, odds: int | None, scoring: int, echo: bool
) -> None:
    body = {"sampling_params": fields} if dialect == "generate" else fields
    order = parse(dialect, {**LEAST[dialect], **body})
    assert (order.odds, order.scoring, order.echo) == (odds, scoring, echo)
    assert order.settle(3, 100, 0).top_logprobs == (odds or 0)
    assert order.is_prompt_told == (scoring >= 0 or bool(echo))


def test_with_echo_the_prompt_alone_may_be_asked_for() -> None:
    order = parse("completions", {"prompt": "a", "echo": True, "max_tokens": 0})
    assert order.is_silent
    assert order.settle(3, 100, 0).max_tokens == 1  # one is drawn, and dropped
    there, leg = split_leg(leg_body("decode", order, LEG, seed=1))
    assert parse("completions", there, leg).is_silent


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("completions", {"echo": True, "logprobs": 2, "n": 2}),
        ("generate", {"sampling_params": {"logprobs": 2, "prompt_logprobs": 1, "n": 2}}),
    ],
)
def test_decode_never_hears_of_what_only_prefill_can_tell(dialect: Dialect, fields: Body) -> None:
    """CASES 90: and both legs draw alike, each with what it needs."""
    order = parse(dialect, {**LEAST[dialect], **fields})
    bodies = {side: leg_body(side, order, LEG, seed=1) for side in SIDES}
    assert not {"echo", "prompt_logprobs"} & set(json.dumps(bodies["decode"]).split('"'))
    legs = {side: split_leg(body) for side, body in bodies.items()}
    orders = {side: parse(dialect, fields, leg) for side, (fields, leg) in legs.items()}
    assert [orders[side].is_prompt_told for side in SIDES] == [True, False, True]
    assert [orders[side].odds for side in SIDES] == [2, 2, 2]
    assert len({repr(orders[side].settle(3, 100, 0)) for side in SIDES}) == 1
    told = {side: leg.text_starts_after_prompt for side, (_, leg) in legs.items() if leg}
    assert told == {"prefill": False, "decode": order.echo, "hybrid": False}


@pytest.mark.parametrize("dialect", ["completions", "chat"])
def test_harmless_openai_fields_are_accepted_and_go_nowhere(dialect: Dialect) -> None:
    order = parse(dialect, body_of(dialect, user="u", store=True, metadata={"a": "b"}, model="m"))
    assert order.model == "m"
    assert order.body.keys() == {*LEAST[dialect], "model"}


@pytest.mark.parametrize(
    ("dialect", "prompt", "want"),
    [
        ("generate", "text", "text"),
        ("generate", [1, 2], [1, 2]),
        ("completions", "text", "text"),
        ("completions", ["text"], "text"),
        ("completions", [[1, 2]], [1, 2]),
    ],
)
def test_a_prompt_is_text_or_ids(dialect: Dialect, prompt: object, want: object) -> None:
    assert parse(dialect, {"prompt": prompt}).prompt == want


@pytest.mark.parametrize("dialect", ["generate", "completions"])
@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2, 3]]])
def test_a_batch_is_an_order_a_prompt(dialect: Dialect, prompts: list[object]) -> None:
    parts = parse(dialect, {"prompt": prompts, "cache_salt": "x"}).parts()
    assert [part.prompt for part in parts] == prompts
    assert [part.body["prompt"] for part in parts] == prompts
    assert all(leg_body("decode", part, LEG, 1)["prompt"] == part.prompt for part in parts)


@pytest.mark.parametrize("dialect", ["generate", "completions"])
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([[]], "prompt.0"),
        ([""], "prompt.0"),
        (["a"] * 129, "prompt: List should have at most 128 items"),
        ([[1]] * 129, "prompt: List should have at most 128 items"),
        (["a", [1]], "prompt.1"),
        ([[1], "a"], "prompt.1"),
        (3, "prompt"),
        (None, "prompt"),
        ({}, "prompt"),
        ([1, "a"], "prompt.1"),
        ([1, -1], "prompt.1"),
        ([1, 1 << 31], "prompt.1"),
        ([1.5], "prompt.0"),
        ([True], "prompt.0"),
    ],
)
def test_other_prompts_are_refused(dialect: Dialect, prompt: object, said: str) -> None:
    assert said in refusal(dialect, {"prompt": prompt})


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        ("generate", "prompt", [1, *[""] * 50]),
        ("generate", "prompt", [""] * 50),
        ("generate", "prompt", [[]] * 50),
        ("generate", "prompt", [[1, *[""] * 50]]),
        ("generate", "sampling_params", {"stop": [1] * 50}),
        ("completions", "stop_token_ids", [-1] * 50),
        ("chat", "messages", [{}] * 50),
        ("chat", "messages", [{"role": "user", "content": [1] * 50}]),
    ],
)
def test_only_the_first_fault_of_a_list_is_explained(
    dialect: Dialect, field: str, value: object
) -> None:
    """A million faults in eight megabytes would be minutes of explaining."""
    said = refusal(dialect, {**LEAST[dialect], field: value})
    assert len({fault.split(":")[0].split()[0] for fault in said.split("; ")}) <= 2, said
    assert "2" not in said, said


def test_a_prompt_must_be_there() -> None:
    assert refusal("generate", {}) == "prompt is missing"


@pytest.mark.parametrize("dialect", ["completions", "chat"])
def test_stream_options_are_honoured_and_only_for_streams(dialect: Dialect) -> None:
    options = {"include_usage": True}
    order = parse(dialect, body_of(dialect, stream=True, stream_options=options))
    assert (order.stream, order.include_usage, order.usage_always) == (True, True, False)
    assert "stream_options" in refusal(dialect, body_of(dialect, stream_options=options))


def test_a_conversation_becomes_plain_turns() -> None:
    turns = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]
    order = parse("chat", {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}})
    assert order.prompt == Chat(
        turns=(
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": "a\nb", "name": "x"},
            {"role": "assistant", "content": None},
        ),
        options={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "nobody", "content": "x"}, "messages.0.role"),
        ({"role": "tool", "content": "x"}, "messages.0: tool_call_id is for the role tool"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages.0: tool_call_id"),
        ({"role": "user", "tool_calls": [CALL]}, "messages.0: tool_calls are the assistant's"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": ""}]}, "messages.0.tool_calls.0.id"),
        ({"role": "assistant", "tool_calls": [CALL | {"x": 1}]}, "messages.0.tool_calls.0.x"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user"}, "messages.0: content is missing"),
        ({"role": "system", "content": None}, "messages.0: content is missing"),
        ({"role": "tool", "tool_call_id": "c"}, "messages.0: content is missing"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0.type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text is missing"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls"),
        ({"role": "user", "contents": "x"}, "messages.0.contents"),
        ("hi", "messages.0"),
    ],
)
def test_a_turn_that_cannot_be_served_is_named(turn: object, said: str) -> None:
    assert said in refusal("chat", {"messages": [turn]})


TOOL: Body = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/x"}}}},
}
OTHER: Body = {"type": "function", "function": {"name": "g"}}


def with_tools(**fields: object) -> Body:
    return {**LEAST["chat"], "tools": [TOOL, OTHER], **fields}


def test_tools_are_offered_as_they_were_written_unless_none_may_be_called() -> None:
    order = parse("chat", with_tools())
    assert isinstance(order.prompt, Chat)
    assert order.prompt.tools == (TOOL, OTHER)
    assert order.calling == Calling(frozenset({"f", "g"}))
    one = parse("chat", with_tools(parallel_tool_calls=False, tool_choice="auto"))
    assert one.calling == Calling(frozenset({"f", "g"}), only_one=True)
    none = parse("chat", with_tools(tool_choice="none"))
    assert isinstance(none.prompt, Chat)
    assert (none.prompt.tools, none.calling) == ((), None)


@pytest.mark.parametrize("side", SIDES)
def test_all_legs_know_the_tools(side: Role) -> None:
    sent = with_tools(tool_choice="auto", parallel_tool_calls=False)
    body = leg_body(side, parse("chat", sent), LEG, 1)
    assert all(body[name] == sent[name] for name in ("tools", "tool_choice", "parallel_tool_calls"))


def test_an_answer_that_must_call_is_a_list_of_calls_of_tools_that_it_may() -> None:
    def schema_of(**fields: object) -> Body:
        order = parse("chat", with_tools(**fields))
        assert order.calling is not None
        assert order.calling.must
        assert order.grammar is not None
        found: Body = json.loads(order.grammar.text)
        assert order.settle(3, 100, 1).grammar == order.grammar
        return found

    required = schema_of(tool_choice="required")
    assert [one["properties"]["name"] for one in required["items"]["anyOf"]] == [
        {"const": "f"},
        {"const": "g"},
    ]
    assert required["$defs"]["f"] == {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/f/$defs/x"}},
    }
    assert (required["minItems"], "maxItems" in required) == (1, False)
    named = schema_of(tool_choice={"type": "function", "function": {"name": "g"}})
    assert [one["properties"]["name"] for one in named["items"]["anyOf"]] == [{"const": "g"}]
    assert named["maxItems"] == 1
    assert schema_of(tool_choice="required", parallel_tool_calls=False)["maxItems"] == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [TOOL] * 2}, "tools: f is there twice"),
        ({"tools": [TOOL] * 129}, "tools: List should have at most 128"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: required is only for"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice: h is not among the tools",
        ),
        ({"response_format": {"type": "json_object"}}, "tools: an answer that has a grammar"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message: the last message is no"),
        ({"chat_template_kwargs": {"a": "x" * 70000}}, "chat_template_kwargs: is larger than"),
    ],
)
def test_what_a_conversation_cannot_have_is_named(fields: Body, said: str) -> None:
    assert said in refusal("chat", with_tools(**fields))


@pytest.mark.parametrize(
    ("fields", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_the_prompt_ends_as_it_was_asked_for(fields: Body, begins: bool, continues: bool) -> None:
    turns = [*LEAST["chat"]["messages"], {"role": "assistant", "content": "So"}]
    prompt = parse("chat", {"messages": turns, **fields}).prompt
    assert isinstance(prompt, Chat)
    assert (prompt.begins_answer, prompt.continues_last) == (begins, continues)


def test_an_empty_conversation_is_refused() -> None:
    assert refusal("chat", {"messages": []}) == "messages is empty"


def test_max_completion_tokens_is_max_tokens() -> None:
    assert parse("chat", body_of("chat", max_completion_tokens=5)).max_tokens == 5
    both = body_of("chat", max_completion_tokens=5, max_tokens=6)
    assert "max_completion_tokens" in refusal("chat", both)


@pytest.mark.parametrize(
    ("dialect", "prompt_tokens", "asked", "want"),
    [
        ("generate", 10, None, 128),
        ("completions", 10, None, 16),
        ("chat", 10, None, 990),  # all that fits
        ("generate", 990, None, 10),  # a default is cut to what fits
        ("generate", 990, 10, 10),  # the limit itself
        ("chat", 999, None, 1),
    ],
)
def test_the_answers_length_is_settled_by_the_limit(
    dialect: Dialect, prompt_tokens: int, asked: int | None, want: int
) -> None:
    order = parse(dialect, body_of(dialect, max_tokens=asked))
    assert order.settle(prompt_tokens, 1000, 0).max_tokens == want


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("prompt_tokens", "asked"), [(990, 11), (1000, 1), (1000, None)])
def test_one_token_over_the_limit_is_refused(
    dialect: Dialect, prompt_tokens: int, asked: int | None
) -> None:
    """CASES 2, 55."""
    order = parse(dialect, body_of(dialect, max_tokens=asked))
    with pytest.raises(TooLong, match=str(prompt_tokens)):
        order.settle(prompt_tokens, 1000, 0)


def test_a_client_may_name_its_key_and_a_prefill_instance() -> None:
    fields = {"bootstrap_room": 5, "bootstrap_host": "10.0.0.1", "bootstrap_port": 18800}
    order = parse("generate", {"prompt": "a", **fields})
    assert (order.client_room, order.pin) == (5, Pin("10.0.0.1", 18800))


# Legs.


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("side", ["prefill", "decode", "hybrid"])
def test_a_leg_reads_what_the_router_wrote(dialect: Dialect, side: Role) -> None:
    order = parse(dialect, body_of(dialect, stream=True, stop="END", temperature=0, timeout_s=3))
    sent = json.loads(json.dumps(leg_body(side, order, LEG, seed=42)))
    fields, leg = split_leg(sent)
    there = parse(dialect, fields)
    assert leg is not None
    assert leg.model_dump(exclude={"disagg_prefill_dp_rank"}) == LEG.model_dump(
        exclude={"disagg_prefill_dp_rank"}
    )
    assert leg.disagg_prefill_dp_rank == (-1 if side == "hybrid" else 1)
    assert there.prompt == order.prompt
    assert there.settle(3, 100, 0) == order.settle(3, 100, 42)  # both legs draw alike
    assert there.stream == (side != "prefill")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("side", SIDES)
def test_all_legs_know_whose_prefixes_may_be_shared(dialect: Dialect, side: Role) -> None:
    order = parse(dialect, body_of(dialect, cache_salt="tenant"))
    fields, _ = split_leg(leg_body(side, order, LEG, seed=42))
    assert parse(dialect, fields).salt == order.salt == "tenant"
    assert parse(dialect, body_of(dialect)).salt == ""


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("side", SIDES)
def test_all_legs_know_the_priority(dialect: Dialect, side: Role) -> None:
    order = parse(dialect, body_of(dialect, priority=-7))
    fields, _ = split_leg(leg_body(side, order, LEG, seed=42))
    assert parse(dialect, fields).priority == order.priority == -7
    assert parse(dialect, body_of(dialect)).priority == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_clients_own_seed_is_kept(dialect: Dialect) -> None:
    order = parse(dialect, body_of(dialect, seed=5))
    fields, _ = split_leg(leg_body("decode", order, LEG, seed=42))
    assert parse(dialect, fields).seed == 5


ALLOWED: dict[Dialect, set[str]] = {
    "generate": set(GenerateRequest.model_fields),
    "completions": set(CompletionRequest.model_fields),
    "chat": set(ChatRequest.model_fields),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 40) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
NAMES = st.sampled_from(
    sorted(set().union(*ALLOWED.values()) | {"n", "user", "tools", "min_tokens", "logit_bias"})
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no bug
@given(dialect=st.sampled_from(DIALECTS), fields=st.dictionaries(NAMES, ANYTHING, max_size=4))
def test_whatever_is_sent_is_an_order_or_a_bad_request(dialect: Dialect, fields: Body) -> None:
    """CASES 82: and a prefill leg never carries more than the allow-list."""
    try:
        order = parse(dialect, {**LEAST[dialect], **fields})
    except BadRequest:
        return
    sent = leg_body("prefill", order, LEG, seed=1).keys() - LegFields.model_fields.keys()
    assert sent <= ALLOWED[dialect] - {"stream", "stream_options", "timeout_s", "request_id"}


@pytest.mark.parametrize("missing", ["bootstrap_room", "attempt", "time_left_s", "request_id"])
def test_a_leg_that_is_not_whole_is_refused(missing: str) -> None:
    body = leg_body("decode", parse("generate", {"prompt": "a"}), LEG, seed=1)
    del body[missing]
    with pytest.raises(BadRequest, match=missing):
        split_leg(body)


def test_a_clients_body_is_no_leg() -> None:
    body = {"prompt": "a", "bootstrap_room": 5}
    assert split_leg(body) == (body, None)


def test_internal_bodies_are_checked_too() -> None:
    again = {
        "bootstrap_room": 1,
        "attempt": 2,
        "input_ids": [1, 2, 3],
        "prompt_tokens": 2,
        "sampling": {"max_tokens": 5, "stop_token_ids": [7]},
        "time_left_s": 3.5,
        "transfer_token": "t",
    }
    assert parse_prefill_again(again).sampling == Sampling(max_tokens=5, stop_token_ids=(7,))
    with pytest.raises(BadRequest, match="input_ids"):
        parse_prefill_again(again | {"input_ids": []})
    rebind = {
        "bootstrap_room": 1,
        "attempt": 65536,
        "bootstrap_host": "h",
        "bootstrap_port": 1,
        "transfer_token": "t",
    }
    assert parse_rebind(rebind).disagg_prefill_dp_rank == -1
    with pytest.raises(BadRequest, match="bootstrap_port"):
        parse_rebind(rebind | {"bootstrap_port": 0})


def test_every_field_is_in_the_reference_and_so_is_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    kinds = (ChatRequest, CompletionRequest, GenerateRequest, GenerateDrawing)
    names = {name for kind in kinds for name in kind.model_fields} | UNSUPPORTED.keys() | IGNORED
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_a_chat_of_too_many_turns_is_told_their_number_whatever_is_in_them() -> None:
    turn: Body = {"role": "user", "content": "a", "refusal": None, "annotations": []}
    said = refusal("chat", {"messages": [turn] * (MAX_TURNS + 1)})
    assert said == f"messages: {MAX_TURNS + 1} of them; the limit is {MAX_TURNS}"
