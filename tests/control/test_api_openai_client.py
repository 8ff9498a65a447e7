"""The official `openai` client, unchanged, against a leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.control.leader_rig import Rig, failing, out, rigged

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
