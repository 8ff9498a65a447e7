"""The checks of /v1/chat/completions, but for tools and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pdrt.conformance.check import Check, must, same
from pdrt.conformance.completions import WARM, count, ended, middle
from pdrt.conformance.endpoint import ASK, SHORT, Endpoint

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

GROUP: Final = "chat"
_TALK: Final = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name a fish."}]},
    {"role": "assistant", "content": "Cod."},
    {"role": "user", "content": "Another one."},
]


def checks() -> Iterator[Check]:
    yield Check(GROUP, "chat", whole, is_compared=True)
    yield Check(GROUP, "streamed text is the whole text", streamed)
    yield Check(GROUP, "system, turns and content parts", talk, is_compared=True)
    yield Check(GROUP, "max_completion_tokens", limit)
    yield Check(GROUP, "n = 4", several, is_compared=True)
    yield Check(GROUP, "n = 4, streamed", several_streamed)
    yield Check(GROUP, "logprobs", logprobs, is_compared=True)
    yield Check(GROUP, "logprobs, streamed", logprobs_streamed)
    yield Check(GROUP, "stop string", stop, is_compared=True)
    yield Check(GROUP, "a seed repeats an answer", seeded, is_compared=True)
    yield Check(GROUP, "logit_bias", logit_bias, is_compared=True)
    yield Check(GROUP, "include_usage", include_usage)


def said(told: ChatCompletion, index: int = 0) -> str:
    message = told.choices[index].message
    same("assistant", message.role, "role")
    must(isinstance(message.content, str), "content", message.content)
    return message.content or ""


def joined(chunks: Sequence[ChatCompletionChunk], index: int = 0) -> str:
    mine = (c for chunk in chunks for c in chunk.choices if c.index == index)
    return "".join(c.delta.content or "" for c in mine)


def last_reason(chunks: Sequence[ChatCompletionChunk], index: int = 0) -> str | None:
    reasons: list[str | None] = [
        c.finish_reason for chunk in chunks for c in chunk.choices if c.index == index
    ]
    must(bool(reasons), f"chunks of choice {index}", reasons)
    same([], [reason for reason in reasons[:-1] if reason], "finish_reason before the last chunk")
    return reasons[-1]


async def whole(e: Endpoint) -> object:
    told = await e.chat()
    same("chat.completion", told.object, "object")
    same([0], [c.index for c in told.choices], "indices")
    ended(told.choices[0].finish_reason)
    usage = count(told.usage)
    must(1 <= usage.completion_tokens <= SHORT, f"1 to {SHORT} completion tokens", usage)
    return {"text": said(told), "usage": usage.model_dump()}


async def streamed(e: Endpoint) -> None:
    told, chunks = await e.chat(), await e.chatting()
    same("assistant", chunks[0].choices[0].delta.role, "role of the first chunk")
    same(said(told), joined(chunks), "text")
    same(told.choices[0].finish_reason, last_reason(chunks), "finish_reason")
    same({"chat.completion.chunk"}, {chunk.object for chunk in chunks}, "object")
    same(1, len({chunk.id for chunk in chunks}), "ids of the chunks")


async def talk(e: Endpoint) -> object:
    return said(await e.chat(messages=_TALK))


async def limit(e: Endpoint) -> None:
    asked = {"messages": ASK, "temperature": 0, "max_tokens": None, "max_completion_tokens": 3}
    told = await e.chat(**asked)
    must(1 <= count(told.usage).completion_tokens <= 3, "at most 3 tokens", told.usage)


async def several(e: Endpoint) -> object:
    told = await e.chat(n=4, **WARM)
    same([0, 1, 2, 3], [c.index for c in told.choices], "indices")
    if all(c.finish_reason == "length" for c in told.choices):
        same(4 * SHORT, count(told.usage).completion_tokens, "completion_tokens of all four")
    texts = [said(told, index) for index in range(4)]
    must(len(set(texts)) > 1, "answers that differ", texts)
    return texts


async def several_streamed(e: Endpoint) -> None:
    told, chunks = await e.chat(n=4, **WARM), await e.chatting(n=4, **WARM)
    for index in range(4):
        same(said(told, index), joined(chunks, index), f"text of choice {index}")
        same(told.choices[index].finish_reason, last_reason(chunks, index), "finish_reason")


_ODDS: Final = {"logprobs": True, "top_logprobs": 2}


def _entries(odds: Any) -> list[dict[str, Any]]:
    return [entry.model_dump() for entry in odds.content or ()] if odds is not None else []


async def logprobs(e: Endpoint) -> object:
    told = await e.chat(**_ODDS)
    entries = _entries(told.choices[0].logprobs)
    same(count(told.usage).completion_tokens, len(entries), "entries, one a token")
    must(all(entry["logprob"] <= 0 for entry in entries), "log-probabilities", entries)
    same({2}, {len(entry["top_logprobs"]) for entry in entries}, "alternatives")
    if all(entry["bytes"] is not None for entry in entries):
        text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
        must(text.startswith(said(told)), f"bytes of {said(told)!r}", text)
    return entries


async def logprobs_streamed(e: Endpoint) -> None:
    expected = _entries((await e.chat(**_ODDS)).choices[0].logprobs)
    chunks = await e.chatting(**_ODDS)
    got = [entry for chunk in chunks for c in chunk.choices for entry in _entries(c.logprobs)]
    same([entry["token"] for entry in expected], [entry["token"] for entry in got], "tokens")
    same([entry["logprob"] for entry in expected], [entry["logprob"] for entry in got], "logprobs")


async def stop(e: Endpoint) -> object:
    text = said(await e.chat(max_tokens=48))
    piece = middle(text, 1)
    told = await e.chat(max_tokens=48, stop=[piece])
    same(text[: text.find(piece)], said(told), f"text before {piece!r}")
    same("stop", told.choices[0].finish_reason, "finish_reason")
    return said(told)


async def seeded(e: Endpoint) -> object:
    first, again = said(await e.chat(**WARM)), said(await e.chat(**WARM))
    same(first, again, "the same answer")
    return first


async def logit_bias(e: Endpoint) -> object:
    told = await e.chat(logit_bias={"65": 100}, max_tokens=4, logprobs=True)
    tokens = [entry["token"] for entry in _entries(told.choices[0].logprobs)]
    same(1, len(set(tokens)), f"one token again and again in {tokens}")
    return tokens


async def include_usage(e: Endpoint) -> None:
    expected = count((await e.chat()).usage)
    chunks = await e.chatting(stream_options={"include_usage": True})
    same([], chunks[-1].choices, "choices of the last chunk")
    usage = count(chunks[-1].usage)
    same(expected.completion_tokens, usage.completion_tokens, "completion_tokens")
    same(expected.prompt_tokens, usage.prompt_tokens, "prompt_tokens")
    same([], [c.usage for c in chunks[:-1] if c.usage], "usage before the last chunk")
