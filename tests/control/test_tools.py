"""Tools through the official client: what is offered, called and answered, hybrid and pair."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from pdrt.messages import Output, Submit
from tests.control.leader_rig import out
from tests.control.pair_rig import TOPOLOGIES, Served, Topology, prompt_text, serving

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "weather?"}]
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def saying(text: str, size: int = 3) -> Sequence[Output]:
    data = text.encode()
    pieces = [out(data[at : at + size]) for at in range(0, len(data), size)]
    return [*pieces, out("", "stop", eos=True)]


@asynccontextmanager
async def talking(topology: Topology) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    async with serving(topology) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            yield served, client


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_conversation_with_a_tool_goes_through_all_its_turns(topology: Topology) -> None:
    async with talking(topology) as (served, client):
        served.worker.script = saying(f"Let me look. {CALL}{NOW}")
        first = await client.chat.completions.create(model="null", messages=ASK, tools=TOOLS)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        calls = choice.message.tool_calls or []
        told = [(c.function.name, c.function.arguments) for c in calls if c.type == "function"]
        assert told == [("weather", ARGUMENTS), ("now", "{}")]
        assert len({call.id for call in calls}) == 2
        assert all(call.id.startswith("call_") for call in calls)
        offered = prompt_text(served.worker.submitted[0])
        assert json.dumps(TOOLS[0]) in offered

        served.worker.submitted.clear()
        served.worker.script = saying("Sunny.")
        answers: list[ChatCompletionMessageParam] = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
            for i, call in enumerate(calls)
        ]
        said = choice.message.model_dump()
        again: list[Any] = [*ASK, said, *answers]
        second = await client.chat.completions.create(model="null", messages=again, tools=TOOLS)
        assert second.choices[0].message.content == "Sunny."
        assert second.choices[0].finish_reason == "stop"
        assert second.choices[0].message.tool_calls is None
        prompt = prompt_text(served.worker.submitted[0])
        assert "tool: result 0\ntool: result 1\nassistant: " in prompt
        assert "assistant: Let me look.<tool_call>" in prompt


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_stream_says_text_at_once_and_calls_as_they_come(topology: Topology) -> None:
    async with talking(topology) as (served, client):
        served.worker.script = saying(f"Let me look. {CALL}{NOW}")
        stream = await client.chat.completions.create(
            model="null",
            messages=ASK,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Let me look."
        found: dict[int, dict[str, str]] = {}
        for piece in (piece for delta in deltas for piece in delta.tool_calls or ()):
            assert piece.function is not None
            call = found.setdefault(piece.index, {"arguments": ""})
            if piece.id is not None:
                assert "id" not in call
                call |= {"id": piece.id, "name": piece.function.name or ""}
            call["arguments"] += piece.function.arguments or ""
        assert [(c["name"], c["arguments"]) for c in found.values()] == [
            ("weather", ARGUMENTS),
            ("now", "{}"),
        ]
        finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert [finish for finish in finishes if finish] == ["tool_calls"]
        assert chunks[-1].usage is not None


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_the_clients_own_helper_reads_the_stream(topology: Topology) -> None:
    async with talking(topology) as (served, client):
        served.worker.script = saying(f"{NOW}\n{CALL}", size=50)
        async with client.chat.completions.stream(
            model="null", messages=ASK, tools=TOOLS
        ) as stream:
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls or []
        assert [c.function.arguments for c in calls] == ["{}", ARGUMENTS]
        assert final.choices[0].message.content in (None, "")


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_a_time_ends_the_answer_and_the_work(
    topology: Topology, stream: bool
) -> None:
    async with talking(topology) as (served, client):
        served.worker.script = saying(f"{CALL}{NOW}")[:-1]  # it would go on
        asked: Any = await client.chat.completions.create(
            model="null", messages=ASK, tools=TOOLS, parallel_tool_calls=False, stream=stream
        )
        if stream:
            chunks = [chunk async for chunk in asked]
            finish = chunks[-1].choices[0].finish_reason
        else:
            (choice,) = asked.choices
            finish = choice.finish_reason
            assert len(choice.message.tool_calls) == 1
            assert choice.message.content is None
        assert finish == "tool_calls"
        await served.at_rest()
        assert [reason for _, reason in served.worker.aborted] == ["stop"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_each_of_n_answers_has_calls_of_its_own(topology: Topology) -> None:
    async with talking(topology) as (served, client):
        served.worker.script = [
            out(CALL, index=0),
            out("No call.", index=1),
            out("", "stop", eos=True, index=1),
            out("", "stop", eos=True, index=0),
        ]
        told = await client.chat.completions.create(
            model="null", messages=ASK, tools=TOOLS, n=2, logprobs=None
        )
        assert [c.finish_reason for c in told.choices] == ["tool_calls", "stop"]
        assert told.choices[1].message.content == "No call."
        assert told.choices[1].message.tool_calls is None


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_with_tool_choice_none_what_looks_like_a_call_is_text(topology: Topology) -> None:
    async with talking(topology) as (served, client):
        served.worker.script = saying(CALL)
        told = await client.chat.completions.create(
            model="null", messages=ASK, tools=TOOLS, tool_choice="none"
        )
        assert told.choices[0].message.content == CALL
        assert told.choices[0].finish_reason == "stop"
        assert "weather?" in prompt_text(served.worker.submitted[0])
        assert "of a city" not in prompt_text(served.worker.submitted[0])


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_an_answer_that_must_call_is_drawn_by_a_grammar_and_read_as_calls(
    topology: Topology,
) -> None:
    def answers(submit: Submit) -> Sequence[Output]:
        grammar = submit.sampling.grammar
        assert grammar is not None
        assert grammar.kind == "json"
        return saying('[{"name": "now", "arguments": {}}]')

    async with talking(topology) as (served, client):
        served.worker.answers = answers
        told = await client.chat.completions.create(
            model="null", messages=ASK, tools=TOOLS, tool_choice="required"
        )
        (call,) = told.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("now", "{}")
        assert told.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_what_the_client_sends_wrongly_is_named(topology: Topology) -> None:
    async with talking(topology) as (_served, client):
        bad: Any = [*ASK, {"role": "tool", "content": "x"}]
        with pytest.raises(openai.BadRequestError, match="tool_call_id"):
            await client.chat.completions.create(model="null", messages=bad, tools=TOOLS)
