"""The official `openai` client, unchanged: against a leader, and the same in every topology."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from pdrt.messages import Output, Submit
from tests.control.leader_rig import Rig, failing, odd, out, rigged
from tests.control.pair_rig import TOPOLOGIES, Topology, prompt_text, serving

TEXT = "Hellö, 你好"
SCRIPT = [out(TEXT.encode()[i : i + 1]) for i in range(len(TEXT.encode()))]
SCRIPT += [out("", "stop", eos=True)]
ASK: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def talking(**changes: Any) -> AsyncIterator[tuple[Rig, openai.AsyncOpenAI]]:
    async with rigged(**changes) as rig:
        url = f"{rig.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            yield rig, client


async def test_chat_whole_and_streamed_say_the_same() -> None:
    async with talking() as (rig, client):
        rig.worker.script = SCRIPT
        whole = await client.chat.completions.create(
            model="null", messages=ASK, max_completion_tokens=50, seed=3, user="someone"
        )
        stream = await client.chat.completions.create(
            model="null", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert whole.choices[0].message.content == said == TEXT
        assert whole.choices[0].finish_reason == "stop"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert whole.usage is not None
        assert chunks[-1].usage == whole.usage
        assert whole.usage.completion_tokens == len(TEXT.encode()) + 1
        assert rig.worker.submitted[0].sampling.max_tokens == 50


async def test_completions_whole_and_streamed_say_the_same() -> None:
    async with talking() as (rig, client):
        rig.worker.script = SCRIPT
        whole = await client.completions.create(
            model="null", prompt="abc", stop=["好"], temperature=0, extra_body={"top_k": 5}
        )
        stream = await client.completions.create(
            model="null", prompt=[1, 2, 3], stop="好", stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text == TEXT[:-1]
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        assert rig.worker.submitted[0].sampling.top_k == 5


async def test_the_client_reads_our_errors() -> None:
    async with talking() as (rig, client):
        with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
            await client.completions.create(model="null", prompt="a", suffix="b")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=ASK)
        rig.worker.script = [failing("overloaded")]
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="null", messages=ASK)


async def test_the_client_raises_for_an_error_in_a_stream() -> None:
    async with talking() as (rig, client):
        asked = asyncio.ensure_future(
            client.completions.create(model="null", prompt="abc", stream=True)
        )
        submit = await rig.worker.next_submit()
        rig.worker.say(submit.room, out("a"))
        stream = await asked
        rig.worker.say(submit.room, failing("peer_lost", "worker died"))
        with pytest.raises(openai.APIError, match="worker died"):
            async for _ in stream:
                pass


async def test_a_client_that_closes_its_stream_ends_the_request() -> None:
    async with talking() as (rig, client):
        asked = asyncio.ensure_future(
            client.chat.completions.create(model="null", messages=ASK, stream=True)
        )
        submit = await rig.worker.next_submit()
        rig.worker.say(submit.room, out("a"))
        stream = await asked
        await stream.close()
        await rig.worker.until(lambda worker: worker.aborted)
        assert rig.worker.aborted == [(submit.room, "client_gone")]


async def test_models_are_listed() -> None:
    async with talking() as (_rig, client):
        assert [model.id async for model in await client.models.list()] == ["null"]
        assert (await client.models.retrieve("null")).owned_by == "pdrt"


async def test_a_client_key_is_checked() -> None:
    async with talking(api_keys=("right",)) as (_rig, client):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


# The same, asked of a hybrid instance and of a pair behind the router.


def answers(submit: Submit) -> Sequence[Output]:
    """Each sequence says its prompt's first letter, which one it is, and an end."""
    letter, top = prompt_text(submit)[-1], submit.sampling.top_logprobs
    count = submit.sampling.n
    return [
        one
        for index in range(count)
        for one in (
            odd(f"{letter}{index} END", 0, None, top, count - 1 - index),
            odd(" more", 6, "length", top, count - 1 - index),
        )
    ]


COMPLETIONS: dict[str, dict[str, Any]] = {
    "n": {"prompt": "abc", "n": 4, "logprobs": 2},
    "stop": {"prompt": "abc", "n": 4, "stop": [" END", "x"]},
    "batch": {"prompt": ["abc", "d", "ef"], "n": 2, "logprobs": 0},
    "ids": {"prompt": [[97, 98], [99]], "max_tokens": 50},
    "best of": {"prompt": "abc", "n": 2, "best_of": 4, "logprobs": 1},
    "batch, best of": {"prompt": ["abc", "d"], "n": 1, "best_of": 3},
    "echo": {"prompt": "abc", "echo": True, "n": 2},
}
CHATS: dict[str, dict[str, Any]] = {
    "n": {"n": 4, "logprobs": True, "top_logprobs": 2},
    "stop": {"n": 2, "stop": "END"},
    "continued": {
        "messages": [*ASK, {"role": "assistant", "content": "So I"}],
        "extra_body": {"continue_final_message": True},
    },
}


def known(told: Any) -> Any:
    """Without what differs by nature."""
    if isinstance(told, list):
        return [known(each) for each in told]
    return {k: v for k, v in told.model_dump().items() if k not in ("id", "created")}


async def told_by(topology: Topology, kind: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """Whole, and streamed unless that is refused."""
    async with serving(topology) as served:
        served.worker.answers = answers
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            api = client.chat.completions if kind == "chat" else client.completions
            ask: Any = api.create
            whole = await ask(model="null", **fields)
            if "best_of" in fields:
                with pytest.raises(openai.BadRequestError, match="best_of"):
                    await ask(model="null", stream=True, **fields)
                return known(whole), None
            usage = {"stream_options": {"include_usage": True}}
            stream = await ask(model="null", stream=True, **usage, **fields)
            return known(whole), [chunk async for chunk in stream]


def text_of(kind: str, chunks: Any, index: int) -> str:
    own = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(c.delta.content or "" if kind == "chat" else c.text for c in own)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(("text", each) for each in COMPLETIONS.values()),
        *(("chat", {"messages": ASK, **each}) for each in CHATS.values()),
    ],
    ids=[*COMPLETIONS, *(f"chat {name}" for name in CHATS)],
)
async def test_what_a_pair_says_is_what_a_hybrid_instance_says(
    kind: str, fields: dict[str, Any]
) -> None:
    hybrid, pair = [await told_by(topology, kind, fields) for topology in TOPOLOGIES]
    assert hybrid[0] == pair[0]
    choices = pair[0]["choices"]
    prompts = fields.get("prompt", "")
    count = len(prompts) if isinstance(prompts, list) else 1
    assert [choice["index"] for choice in choices] == list(range(count * fields.get("n", 1)))
    for _, chunks in (hybrid, pair):
        if chunks is None:
            continue
        for choice in choices:
            whole = choice["text"] if kind == "text" else choice["message"]["content"]
            assert text_of(kind, chunks, choice["index"]) == whole
        assert chunks[-1].usage.model_dump() == pair[0]["usage"]
