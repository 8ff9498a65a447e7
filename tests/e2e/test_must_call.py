"""An answer that must call tools does, whatever the weights: a pair and a hybrid alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SETTINGS: Tables = {"scheduler": {"kv_memory": 1 << 20, "max_prefill_tokens": 16}}
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
UNIT: dict[str, Any] = {"enum": ["C", "F"]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "dry": {"type": "boolean"}},
    "required": ["unit", "dry"],
    "additionalProperties": False,
    "$defs": {"unit": UNIT},
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("must"), 1, 1, 0, SETTINGS)
    cluster.add_node("hybrid0", "hybrid", SETTINGS)  # asked directly, unknown to the router
    cluster.start()
    yield cluster
    cluster.stop()


async def told_by(url: str, **fields: Any) -> list[tuple[str, str]]:
    """What is called with what, whole and, which must be the same, streamed."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "null", "messages": ASK, "tools": TOOLS, **fields}
        whole = await client.chat.completions.create(**asked)
        (choice,) = whole.choices
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        again = final.choices[0].message.tool_calls or []
        told = [(c.function.name, c.function.arguments) for c in calls if c.type == "function"]
        assert [(c.function.name, c.function.arguments) for c in again] == told
        return told


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "now"}),
        ({"tool_choice": NAMED}, {"weather"}),
    ],
)
async def test_an_answer_that_must_call_calls_what_it_may_as_it_should(
    cluster: Cluster, seed: int, fields: dict[str, Any], names: set[str]
) -> None:
    fields = {**fields, "seed": seed, "temperature": 1.0}
    pair = await told_by(cluster.url, **fields)
    assert pair == await told_by(cluster.nodes["hybrid0"].url, **fields)
    ((name, arguments),) = pair
    assert name in names
    if name == "weather":
        jsonschema.validate(json.loads(arguments), SCHEMA)
    else:
        assert json.loads(arguments) == {}
    await cluster.until_baseline()
