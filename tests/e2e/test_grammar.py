"""Answers that a grammar binds are valid and the same on every path, whatever the model says."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.shared_params import ResponseFormatJSONSchema

from tests.e2e.cluster import PATIENT, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SETTINGS: Final[Tables] = {
    "scheduler": {"kv_memory": 1 << 20, "max_prefill_tokens": 16},
    **PATIENT,
}
ASK: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Who is it?"}]
PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE: Final[dict[str, Any]] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
                "right": {"$ref": "#/$defs/leaf"},
            },
            "required": ["left", "right"],
            "additionalProperties": False,
        },
        "leaf": {"type": "string", "pattern": "^[a-z]{1,4}$"},
    },
    "$ref": "#/$defs/node",
}
FORMAT: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("grammar")
    cluster = Cluster.make(folder, 1, 1, 0, SETTINGS, router=PATIENT)
    cluster.add_node("hybrid0", "hybrid", SETTINGS)  # asked directly, unknown to the router
    cluster.start()
    yield cluster
    cluster.stop()


def urls(cluster: Cluster) -> tuple[str, str]:
    return cluster.url, cluster.nodes["hybrid0"].url


async def both(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the pair and the hybrid instance say alike, without what differs by nature."""
    found = []
    for url in urls(cluster):
        answer = await cluster.post(path, body, url)
        assert answer.status == 200, answer.body
        for name in ("id", "created", "request_id", "bootstrap_room", "path", "timings_ms"):
            answer.body.pop(name, None)
        found.append(answer.body)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
async def test_a_schemas_answer_is_valid_and_the_same_on_a_pair(
    cluster: Cluster, schema: dict[str, Any], temperature: float
) -> None:
    body = {
        "messages": ASK,
        "max_tokens": 600,
        "temperature": temperature,
        "seed": 4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "it", "schema": schema},
        },
    }
    (choice,) = (await both(cluster, "/v1/chat/completions", body))["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    await cluster.until_baseline()


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"choice": ["ja", "nein", "vielleicht"]}, "ja|nein|vielleicht"),
        ({"grammar": 'start: "<" /[xyz]+/ ">"'}, r"<[xyz]+>"),
        ({"grammar": 'root ::= "a" [b-d] "e"'}, r"a[b-d]e"),
        ({"json": json.dumps({"enum": ["q"]})}, r'"q"'),
        ({"json_object": True}, r"\{[^}]*\}"),
    ],
)
async def test_generate_takes_each_kind_of_grammar(
    cluster: Cluster, wanted: dict[str, Any], pattern: str
) -> None:
    params = {"structured_outputs": wanted, "max_tokens": 300, "seed": 1, "logprobs": 2}
    answer = await both(cluster, "/generate", {"prompt": "Say it:", "sampling_params": params})
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(answer["output"], {"type": "string", "pattern": f"^({pattern})$"})
    assert len(answer["logprobs"]) == len(answer["output_ids"])
    await cluster.until_baseline()


async def test_the_openai_client_streams_several_answers_to_one_schema(cluster: Cluster) -> None:
    """Each ends by itself, with odds beside its tokens, as the whole answer has them."""
    for url in urls(cluster):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            ask: dict[str, Any] = {
                "model": "null",
                "messages": ASK,
                "n": 3,
                "max_tokens": 600,
                "seed": 9,
                "logprobs": True,
                "top_logprobs": 1,
                "frequency_penalty": 0.2,
                "response_format": FORMAT,
            }
            whole = await client.chat.completions.create(**ask)
            texts = [choice.message.content or "" for choice in whole.choices]
            said = ["", "", ""]
            async for chunk in await client.chat.completions.create(stream=True, **ask):
                for piece in chunk.choices:
                    said[piece.index] += piece.delta.content or ""
        assert said == texts
        for text in texts:
            jsonschema.validate(json.loads(text), PERSON)
    await cluster.until_baseline()


async def test_stop_strings_and_biases_hold_beside_a_grammar(cluster: Cluster) -> None:
    body = {
        "prompt": "a",
        "structured_outputs": {"regex": "[ab]{40}"},
        "logit_bias": {"98": 3},
        "stop": ["bb"],
        "max_tokens": 64,
    }
    (choice,) = (await both(cluster, "/v1/completions", body))["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(choice["text"]) <= {"a", "b"}
    assert "bb" not in choice["text"]
    cut = {**body, "stop": [], "max_tokens": 7}
    (choice,) = (await both(cluster, "/v1/completions", cut))["choices"]
    assert (choice["finish_reason"], len(choice["text"])) == ("length", 7)
    await cluster.until_baseline()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": {"json": {"type": "strang"}}}, "Invalid type: strang"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "nothing matches"),
        ({"structured_outputs": {"regex": "("}}, "regular expression"),
        ({"structured_outputs": {"json": {"a": "x" * 70_000}}}, "larger than 65536"),
        ({"structured_outputs": {"json": "[" * 500 + "]" * 500}}, "deeper than 64"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": {"300": 1}}, "logit_bias: token 300"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
    ],
)
async def test_what_cannot_be_is_refused_by_name_before_any_work(
    cluster: Cluster, fields: dict[str, Any], said: str
) -> None:
    for url in urls(cluster):
        answer = await cluster.post("/v1/completions", {"prompt": "a", **fields}, url)
        assert (answer.status, answer.code) == (400, "bad_request")
        assert said in answer.body["error"]["message"]
    await cluster.until_baseline()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_model_of_random_weights_says_what_schemas_say_on_every_path(
    tmp_path: Path,
) -> None:
    """Alone, in a batch, in a pool that is too small, and on a pair: the same valid answers."""
    from tests.device.worded import write_model

    write_model(model := tmp_path / "model")
    device: Tables = {
        "model": {"path": str(model), "dtype": "float32"},
        "device": {"kind": "cpu", "threads": 1, "kernels": "torch"},
        **PATIENT,
    }
    block = 3 * 2 * 2 * 16 * 8 * 4  # bytes of one

    def sized(blocks: int) -> Tables:
        return {
            "scheduler": {"block_size": 8, "max_prefill_tokens": 32, "kv_memory": blocks * block}
        }

    large, small = sized(1000), sized(40)
    roles = {"prefill": large, "decode": small}
    cluster = Cluster.make(tmp_path, 1, 1, 0, device, per_role=roles, router=PATIENT)
    cluster.add_node("hybrid0", "hybrid", device, large)
    cluster.add_node("hybrid1", "hybrid", device, small)
    cluster.startup_s = cluster.answer_s = 240.0
    rng = random.Random(1)
    asked = [
        {
            "prompt": [rng.randrange(250) for _ in range(rng.randrange(1, 40))],
            "sampling_params": {
                "structured_outputs": {"json": rng.choice([PERSON, TREE])},
                "temperature": rng.choice([0, 0.7, 1.3]),
                "seed": number,
                "max_tokens": 250,
            },
        }
        for number in range(24)
    ]

    async def answers(url: str) -> list[list[int]]:
        got = await asyncio.gather(*(cluster.post("/generate", body, url) for body in asked))
        for body, answer in zip(asked, got, strict=True):
            assert answer.status == 200, answer.body
            if answer.body["finish_reason"] == "stop":
                params: Any = body["sampling_params"]
                schema = params["structured_outputs"]["json"]
                jsonschema.validate(json.loads(answer.body["output"]), schema)
        assert sum(answer.body["finish_reason"] == "stop" for answer in got) > 20
        return [answer.ids for answer in got]

    async with cluster.running():
        first, second = (cluster.nodes[f"hybrid{i}"].url for i in range(2))
        alone = [(await cluster.post("/generate", body, first)).ids for body in asked]
        assert await answers(first) == alone, "in a batch"
        assert await answers(second) == alone, "in a small pool"
        assert await answers(cluster.url) == alone, "disaggregated"
        assert await cluster.counted("retractions") > 0
        await cluster.until_baseline(10.0)
