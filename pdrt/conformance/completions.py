"""The checks of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pdrt.conformance.check import Check, NotServed, must, same
from pdrt.conformance.endpoint import PROMPT, SHORT, Endpoint

if TYPE_CHECKING:
    from openai.types import Completion, CompletionUsage

GROUP: Final = "completions"
IDS: Final = list(range(10, 26))  # in every vocabulary
WARM: Final = {"temperature": 1.0, "seed": 7}
_BANNED: Final = 65


def checks() -> Iterator[Check]:
    yield Check(GROUP, "completion", whole, is_compared=True)
    yield Check(GROUP, "streamed text is the whole text", streamed)
    yield Check(GROUP, "token-id prompt", ids, is_compared=True)
    yield Check(GROUP, "batch of strings", batch_of_strings, is_compared=True)
    yield Check(GROUP, "batch of token-id lists", batch_of_ids, is_compared=True)
    yield Check(GROUP, "batch, n = 2", batch_of_many)
    yield Check(GROUP, "batch, streamed", batch_streamed)
    yield Check(GROUP, "n = 4", several, is_compared=True)
    yield Check(GROUP, "n = 4, streamed", several_streamed)
    yield Check(GROUP, "best_of", best_of)
    yield Check(GROUP, "logprobs", logprobs, is_compared=True)
    yield Check(GROUP, "logprobs, streamed", logprobs_streamed)
    yield Check(GROUP, "echo", echo, is_compared=True)
    yield Check(GROUP, "echo with logprobs", echo_logprobs, is_compared=True)
    yield Check(GROUP, "echo of the prompt alone", echo_alone)
    yield Check(GROUP, "stop string", stop, is_compared=True)
    yield Check(GROUP, "several stop strings", stops)
    yield Check(GROUP, "stop string over two tokens", stop_across)
    yield Check(GROUP, "stop string, streamed", stop_streamed)
    yield Check(GROUP, "a seed repeats an answer", seeded, is_compared=True)
    yield Check(GROUP, "another seed, another answer", unseeded)
    yield Check(GROUP, "logit_bias", logit_bias, is_compared=True)
    yield Check(GROUP, "max_tokens = 1", one_token)
    yield Check(GROUP, "top_p and penalties", penalties, is_compared=True)
    yield Check(GROUP, "include_usage", include_usage)


def count(usage: CompletionUsage | None) -> CompletionUsage:
    """The counts, which must add up."""
    must(usage is not None, "usage", usage)
    assert usage is not None
    total = usage.prompt_tokens + usage.completion_tokens
    same(total, usage.total_tokens, "usage.total_tokens = prompt + completion")
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    must(cached <= usage.prompt_tokens, "cached_tokens <= prompt_tokens", usage)
    return usage


def ended(reason: str | None) -> None:
    must(reason in ("stop", "length"), "finish_reason stop or length", reason)


def joined(chunks: Sequence[Completion], index: int = 0) -> str:
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def last_reason(chunks: Sequence[Completion], index: int = 0) -> str | None:
    reasons: list[str | None] = [
        c.finish_reason for chunk in chunks for c in chunk.choices if c.index == index
    ]
    must(bool(reasons), f"chunks of choice {index}", reasons)
    early = [reason for reason in reasons[:-1] if reason is not None]
    same([], early, "finish_reason before the last chunk")
    return reasons[-1]


async def whole(e: Endpoint) -> object:
    told = await e.complete()
    same("text_completion", told.object, "object")
    same(e.model, told.model, "model")
    same([0], [c.index for c in told.choices], "indices")
    choice = told.choices[0]
    ended(choice.finish_reason)
    usage = count(told.usage)
    must(1 <= usage.completion_tokens <= SHORT, f"1 to {SHORT} completion tokens", usage)
    if choice.finish_reason == "length":
        same(SHORT, usage.completion_tokens, "completion_tokens at finish_reason length")
    return {"text": choice.text, "reason": choice.finish_reason, "usage": usage.model_dump()}


async def streamed(e: Endpoint) -> None:
    told, chunks = await e.complete(), await e.completing()
    same(told.choices[0].text, joined(chunks), "text")
    same(told.choices[0].finish_reason, last_reason(chunks), "finish_reason")
    same(1, len({chunk.id for chunk in chunks}), "ids of the chunks")
    same({"text_completion"}, {chunk.object for chunk in chunks}, "object")


async def ids(e: Endpoint) -> object:
    told = await e.complete(prompt=IDS)
    same(len(IDS), count(told.usage).prompt_tokens, "prompt_tokens")
    return told.choices[0].text


async def _batch(e: Endpoint, prompts: Sequence[object]) -> list[str]:
    told = await e.complete(prompt=prompts)
    alone = [await e.complete(prompt=prompt) for prompt in prompts]
    same(list(range(len(prompts))), [c.index for c in told.choices], "indices")
    texts = [c.text for c in told.choices]
    same([one.choices[0].text for one in alone], texts, "texts, each as if alone")
    sums = [sum(getattr(count(o.usage), name) for o in alone) for name in _COUNTS]
    same(sums, [getattr(count(told.usage), name) for name in _COUNTS], "usage, the sum")
    return texts


_COUNTS: Final = ("prompt_tokens", "completion_tokens")


async def batch_of_strings(e: Endpoint) -> object:
    return await _batch(e, [PROMPT, "One, two, three", "No"])


async def batch_of_ids(e: Endpoint) -> object:
    return await _batch(e, [IDS, IDS[:3], [30, 31]])


async def batch_of_many(e: Endpoint) -> None:
    prompts = [PROMPT, "One, two, three"]
    told = await e.complete(prompt=prompts, n=2, **WARM)
    same([0, 1, 2, 3], [c.index for c in told.choices], "indices, prompt by prompt")
    for number, prompt in enumerate(prompts):
        alone = await e.complete(prompt=prompt, n=2, **WARM)
        texts = [c.text for c in alone.choices]
        mine = [c.text for c in told.choices[2 * number : 2 * number + 2]]
        same(texts, mine, f"choices {2 * number} and {2 * number + 1}")


async def batch_streamed(e: Endpoint) -> None:
    prompts = [PROMPT, "One, two, three"]
    told = await e.complete(prompt=prompts)
    chunks = await e.completing(prompt=prompts)
    for number in range(2):
        same(told.choices[number].text, joined(chunks, number), f"text of choice {number}")
        ended(last_reason(chunks, number))


async def several(e: Endpoint) -> object:
    told = await e.complete(n=4, **WARM)
    same([0, 1, 2, 3], [c.index for c in told.choices], "indices")
    usage = count(told.usage)
    if all(c.finish_reason == "length" for c in told.choices):
        same(4 * SHORT, usage.completion_tokens, "completion_tokens of all four")
    texts = [c.text for c in told.choices]
    must(len(set(texts)) > 1, "answers that differ", texts)
    return texts


async def several_streamed(e: Endpoint) -> None:
    told, chunks = await e.complete(n=4, **WARM), await e.completing(n=4, **WARM)
    for index in range(4):
        same(told.choices[index].text, joined(chunks, index), f"text of choice {index}")
        same(told.choices[index].finish_reason, last_reason(chunks, index), "finish_reason")


async def best_of(e: Endpoint) -> None:
    told = await e.complete(best_of=3, **WARM)
    same([0], [c.index for c in told.choices], "indices")
    more = count(told.usage).completion_tokens
    must(more > SHORT or told.choices[0].finish_reason == "stop", "usage of all three", more)


def _columns(told: Completion, index: int = 0) -> dict[str, list[Any]]:
    odds = told.choices[index].logprobs
    must(odds is not None, "logprobs", odds)
    assert odds is not None
    columns = odds.model_dump(include={"tokens", "token_logprobs", "top_logprobs", "text_offset"})
    sizes = {name: len(column or ()) for name, column in columns.items()}
    same(1, len(set(sizes.values())), f"lengths of the columns {sizes}")
    return columns


async def logprobs(e: Endpoint) -> object:
    told = await e.complete(logprobs=2)
    columns = _columns(told)
    same(count(told.usage).completion_tokens, len(columns["tokens"]), "entries, one a token")
    must(all(p <= 0 for p in columns["token_logprobs"]), "log-probabilities", columns)
    must(all(len(top) >= 2 for top in columns["top_logprobs"]), "two alternatives", columns)
    return columns


async def logprobs_streamed(e: Endpoint) -> None:
    expected = _columns(await e.complete(logprobs=2))
    got: dict[str, list[Any]] = {name: [] for name in expected}
    for chunk in await e.completing(logprobs=2):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                for name in got:
                    got[name] += getattr(choice.logprobs, name) or []
    same(expected["tokens"], got["tokens"], "tokens")
    same(expected["token_logprobs"], got["token_logprobs"], "token_logprobs")
    same(expected["text_offset"], got["text_offset"], "text_offset")


async def echo(e: Endpoint) -> object:
    plain, told = await e.complete(), await e.complete(echo=True)
    same(PROMPT + plain.choices[0].text, told.choices[0].text, "prompt and answer")
    return told.choices[0].text


async def echo_logprobs(e: Endpoint) -> object:
    told = await e.complete(echo=True, logprobs=1)
    columns, usage = _columns(told), count(told.usage)
    same(usage.total_tokens, len(columns["tokens"]), "entries, one a token of both")
    same(None, columns["token_logprobs"][0], "the first token's log-probability")
    must(all(p <= 0 for p in columns["token_logprobs"][1:]), "log-probabilities", columns)
    return columns


async def echo_alone(e: Endpoint) -> None:
    told = await e.complete(echo=True, max_tokens=0)
    same(PROMPT, told.choices[0].text, "the prompt alone")


def middle(text: str, size: int) -> str:
    """A piece of an answer that is whole characters and not there before."""
    for at in range(len(text) // 3, len(text) - size + 1):
        piece = text[at : at + size]
        if "\ufffd" not in piece and piece.strip() and text.find(piece) == at:
            return piece
    raise NotServed("the model's answer has no piece that could stop it: try another model")


async def stop(e: Endpoint) -> object:
    text = (await e.complete(max_tokens=48)).choices[0].text
    piece = middle(text, 1)
    told = await e.complete(max_tokens=48, stop=piece)
    same(text[: text.find(piece)], told.choices[0].text, f"text before {piece!r}")
    same("stop", told.choices[0].finish_reason, "finish_reason")
    return told.choices[0].text


async def stops(e: Endpoint) -> None:
    text = (await e.complete(max_tokens=48)).choices[0].text
    piece = middle(text, 1)
    told = await e.complete(max_tokens=48, stop=["\x00never\x00", piece, piece + "\x00"])
    same(text[: text.find(piece)], told.choices[0].text, f"text before {piece!r}")
    same("stop", told.choices[0].finish_reason, "finish_reason")


async def _across(e: Endpoint) -> tuple[str, str]:
    """An answer, and a piece of it that begins in one chunk and ends in another."""
    chunks = [c.choices[0].text for c in await e.completing(max_tokens=48) if c.choices]
    text = "".join(chunks)
    at = 0
    for chunk in chunks[:-1]:
        at += len(chunk)
        piece = text[at - 1 : at + 1]
        if at and len(piece) == 2 and "\ufffd" not in piece and text.find(piece) == at - 1:
            return text, piece
    raise NotServed("the model's answer has no piece over two tokens: try another model")


async def stop_across(e: Endpoint) -> None:
    text, piece = await _across(e)
    told = await e.complete(max_tokens=48, stop=piece)
    same(text[: text.find(piece)], told.choices[0].text, f"text before {piece!r}")
    same("stop", told.choices[0].finish_reason, "finish_reason")


async def stop_streamed(e: Endpoint) -> None:
    text, piece = await _across(e)
    chunks = await e.completing(max_tokens=48, stop=piece)
    same(text[: text.find(piece)], joined(chunks), f"text before {piece!r}, no part of it")
    same("stop", last_reason(chunks), "finish_reason")


async def seeded(e: Endpoint) -> object:
    first, again = await e.complete(**WARM), await e.complete(**WARM)
    same(first.choices[0].text, again.choices[0].text, "the same answer")
    return first.choices[0].text


async def unseeded(e: Endpoint) -> None:
    texts = {(await e.complete(temperature=1.0, seed=s)).choices[0].text for s in range(4)}
    must(len(texts) > 1, "answers that differ", texts)


async def logit_bias(e: Endpoint) -> object:
    forced = await e.complete(logit_bias={str(_BANNED): 100}, logprobs=0, max_tokens=4)
    tokens = _columns(forced)["tokens"]
    same(1, len(set(tokens)), f"one token again and again in {json.dumps(tokens)}")
    banned = await e.complete(logit_bias={str(_BANNED): -100}, logprobs=0, max_tokens=4)
    must(tokens[0] not in _columns(banned)["tokens"], f"no {tokens[0]!r}", banned.choices[0].text)
    return [tokens, _columns(banned)["tokens"]]


async def one_token(e: Endpoint) -> None:
    told = await e.complete(max_tokens=1)
    same(1, count(told.usage).completion_tokens, "completion_tokens")
    ended(told.choices[0].finish_reason)


async def penalties(e: Endpoint) -> object:
    fields = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "user": "someone"}
    told = await e.complete(**WARM, **fields)
    ended(told.choices[0].finish_reason)
    return told.choices[0].text


async def include_usage(e: Endpoint) -> None:
    expected = count((await e.complete()).usage)
    chunks = await e.completing(stream_options={"include_usage": True})
    same([], chunks[-1].choices, "choices of the last chunk")
    usage = count(chunks[-1].usage)
    same(expected.completion_tokens, usage.completion_tokens, "completion_tokens")
    same(expected.prompt_tokens, usage.prompt_tokens, "prompt_tokens")
    same([], [c.usage for c in chunks[:-1] if c.usage], "usage before the last chunk")
    plain = await e.completing()
    must(all(c.choices for c in plain), "no usage chunk unless it is asked for", plain[-1])
