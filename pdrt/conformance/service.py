"""The checks of refusals, headers and what is served beside answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import openai

from pdrt.conformance.check import Check, Failed, NotServed, must, same
from pdrt.conformance.endpoint import PROMPT, Endpoint, Json, Raw

ERRORS: Final = "refusals"
SERVICE: Final = "service"
_OVERLONG: Final = 1 << 30
_PATH: Final = re.compile(r"disagg|local|fallback:\w+")
_COMPLETIONS: Final = "/v1/completions"


def checks() -> Iterator[Check]:
    yield Check(ERRORS, "an unknown field is named", unknown_field)
    yield Check(ERRORS, "a field of the wrong kind is named", wrong_kind)
    yield Check(ERRORS, "a value out of bounds is named", out_of_bounds)
    yield Check(ERRORS, "a missing prompt is named", no_prompt)
    yield Check(ERRORS, "an empty conversation is refused", no_messages)
    yield Check(ERRORS, "what is no JSON is refused", no_json)
    yield Check(ERRORS, "a stream is refused before it begins", refused_stream)
    yield Check(ERRORS, "a wrong key is 401", wrong_key)
    yield Check(ERRORS, "another model is 404", wrong_model)
    yield Check(ERRORS, "an unknown path is 404", wrong_path)
    yield Check(ERRORS, "a body without bounds is 413", too_large)
    yield Check(ERRORS, "an answer that cannot fit is 400", too_long)
    yield Check(ERRORS, "a prompt that cannot fit is 400", long_prompt)
    yield Check(SERVICE, "x-request-id is given and kept", request_id)
    yield Check(SERVICE, "x-pd-path says who served", path_header)
    yield Check(SERVICE, "a stream's bytes", stream_bytes)
    yield Check(SERVICE, "models are listed", models)
    yield Check(SERVICE, "a model is told alone", one_model)
    yield Check(SERVICE, "/tokenize and /detokenize", tokenize, is_compared=True)
    yield Check(SERVICE, "/health and /ready", health)
    yield Check(SERVICE, "/generate", generate, is_compared=True)


def refused(answer: Raw, status: int, *names: str) -> Mapping[str, Any]:
    """The typed error. Raises Failed."""
    same(status, answer.status, f"status, with {answer.text[:120]!r}")
    try:
        error: Mapping[str, Any] = answer.json["error"]
        message, _ = str(error["message"]), str(error["type"])
    except (ValueError, KeyError, TypeError):
        raise Failed(
            f'expected {{"error": {{"message", "type", ...}}}}, got {answer.text!r}'
        ) from None
    for name in names:
        must(name in message, f"a message that names {name}", message)
    return error


async def _refused(e: Endpoint, body: Json, *names: str) -> None:
    usual: Json = {"model": e.model, "prompt": PROMPT, "max_tokens": 4}
    refused(await e.post(_COMPLETIONS, usual | body), 400, *names)


async def unknown_field(e: Endpoint) -> None:
    await _refused(e, {"no_such_field": 1}, "no_such_field")


async def wrong_kind(e: Endpoint) -> None:
    await _refused(e, {"temperature": "hot"}, "temperature")


async def out_of_bounds(e: Endpoint) -> None:
    await _refused(e, {"top_p": 2.0}, "top_p")


async def no_prompt(e: Endpoint) -> None:
    answer = await e.post(_COMPLETIONS, {"model": e.model, "max_tokens": 4})
    refused(answer, 400, "prompt")


async def no_messages(e: Endpoint) -> None:
    answer = await e.post("/v1/chat/completions", {"model": e.model, "messages": []})
    refused(answer, 400, "messages")


async def no_json(e: Endpoint) -> None:
    refused(await e.post(_COMPLETIONS, b'{"model": "'), 400)


async def refused_stream(e: Endpoint) -> None:
    await _refused(e, {"stream": True, "temperature": -1}, "temperature")


async def wrong_key(e: Endpoint) -> None:
    if not e.api_key:
        raise NotServed("no --api-key was given, so nothing is told of keys")
    wrong = {"authorization": f"Bearer {e.api_key}x"}
    body: Json = {"model": e.model, "prompt": PROMPT, "max_tokens": 1}
    refused(await e.post(_COMPLETIONS, body, wrong), 401)


async def wrong_model(e: Endpoint) -> None:
    try:
        await e.client.chat.completions.create(
            model="no-such-model", messages=[{"role": "user", "content": "hi"}], max_tokens=1
        )
    except openai.NotFoundError:
        return
    raise Failed("expected openai.NotFoundError for another model, got an answer")


async def wrong_path(e: Endpoint) -> None:
    refused(await e.ask("GET", "/v1/no-such-path"), 404)


async def too_large(e: Endpoint) -> None:
    answer = await e.overlong(_OVERLONG)
    if answer is None:
        raise Failed(
            f"expected 413 for a body of {_OVERLONG} bytes, got no answer in {e.patience_s:g} s"
        )
    refused(answer, 413)


async def too_long(e: Endpoint) -> None:
    answer = await e.post(
        _COMPLETIONS, {"model": e.model, "prompt": PROMPT, "max_tokens": 100_000_000}
    )
    refused(answer, 400, "max_tokens")


async def long_prompt(e: Endpoint) -> None:
    if not e.max_model_len:
        raise NotServed("/v1/models does not tell max_model_len")
    ids = [10] * (e.max_model_len + 1)
    refused(await e.post(_COMPLETIONS, {"model": e.model, "prompt": ids, "max_tokens": 1}), 400)


async def request_id(e: Endpoint) -> None:
    body: Json = {"model": e.model, "prompt": PROMPT, "max_tokens": 1}
    given = await e.post(_COMPLETIONS, body, {"x-request-id": "conformance-1"})
    same(200, given.status, "status")
    same("conformance-1", given.headers.get("x-request-id"), "x-request-id, as it was sent")
    minted = await e.post(_COMPLETIONS, body)
    must(bool(minted.headers.get("x-request-id")), "an x-request-id", dict(minted.headers))
    wrong = await e.post(_COMPLETIONS, {"model": e.model})
    must(bool(wrong.headers.get("x-request-id")), "an x-request-id on a refusal", wrong.status)


async def path_header(e: Endpoint) -> None:
    body: Json = {"model": e.model, "prompt": PROMPT, "max_tokens": 1}
    for stream in (False, True):
        told = (await e.post(_COMPLETIONS, {**body, "stream": stream})).headers.get("x-pd-path")
        if told is None and not stream:
            raise NotServed("no x-pd-path")
        must(bool(_PATH.fullmatch(told or "")), "disagg, local or fallback:REASON", told)


async def stream_bytes(e: Endpoint) -> None:
    body: Json = {"model": e.model, "prompt": PROMPT, "max_tokens": 2, "stream": True}
    answer = await e.post(_COMPLETIONS, body)
    kind = answer.headers.get("content-type", "")
    must(kind.startswith("text/event-stream"), "content-type text/event-stream", kind)
    must(answer.text.endswith("data: [DONE]\n\n"), "data: [DONE] at the end", answer.text[-60:])
    events = [each for each in answer.text.split("\n\n") if each]
    must(all(each.startswith("data: ") for each in events), "data events", events)


async def models(e: Endpoint) -> None:
    found = [model.id async for model in await e.client.models.list()]
    must(e.model in found, f"{e.model} among the models", found)


async def one_model(e: Endpoint) -> None:
    same(e.model, (await e.client.models.retrieve(e.model)).id, "id")


async def tokenize(e: Endpoint) -> object:
    answer = await e.post("/tokenize", {"model": e.model, "prompt": PROMPT})
    if answer.status in (404, 405):
        raise NotServed(f"/tokenize: {answer.status}")
    same(200, answer.status, f"status, with {answer.text[:120]!r}")
    tokens = answer.json["tokens"]
    same(len(tokens), answer.json["count"], "count")
    told = await e.complete(max_tokens=1)
    same(len(tokens), told.usage.prompt_tokens if told.usage else None, "prompt_tokens")
    back = await e.post("/detokenize", {"model": e.model, "tokens": tokens})
    same(200, back.status, f"status of /detokenize, with {back.text[:120]!r}")
    must(PROMPT in str(back.json["prompt"]), PROMPT, back.json)
    return tokens


async def health(e: Endpoint) -> None:
    for path in ("/health", "/ready"):
        answer = await e.ask("GET", path)
        if answer.status in (404, 405):
            raise NotServed(f"{path}: {answer.status}")
        same(200, answer.status, f"status of {path}")


async def generate(e: Endpoint) -> object:
    sampling = {"max_tokens": 8, "temperature": 0}
    answer = await e.post("/generate", {"prompt": PROMPT, "sampling_params": sampling})
    if answer.status in (404, 405):
        raise NotServed(f"/generate: {answer.status}")
    same(200, answer.status, f"status, with {answer.text[:120]!r}")
    told = answer.json
    usage = told["usage"]
    same(len(told["output_ids"]), usage["completion_tokens"], "completion_tokens")
    return [told["output"], told["output_ids"], told["finish_reason"]]
