"""OpenAI's words: answers and chunks of chat and text completions, as its client reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrt.control.answer import Answer, Choice, Delta
from pdrt.control.http import Json
from pdrt.control.likely import BytesOf, Odds, PromptPart, for_chat, for_completion
from pdrt.control.toolcalls import CallPiece, joined


@dataclass(frozen=True, slots=True)
class OpenAIVoice:
    """What stays the same in all chunks of one answer."""

    request_id: str
    model: str
    created: int
    is_chat: bool
    bytes_of: BytesOf
    with_odds: bool = False
    with_usage: bool = False  # one more chunk at the end
    with_usage_always: bool = False  # and in each chunk before

    def opening(self, answer: Answer) -> Sequence[Json]:
        """What is said of each choice when the first output is here, before it."""
        n = len(answer.choices)
        if self.is_chat:
            role: Json = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            return [self._chunk([_choice(index, None, **role)], None) for index in range(n)]
        if answer.prompt is None:
            return ()
        return self.first(self.prompt(answer.prompt), n, answer.usage())

    def first(self, prompt: Json, n: int, usage: Json) -> Sequence[Json]:
        """A chunk for each choice with what it begins with."""
        told = _usage(usage) if self.with_usage_always else None
        return [self._chunk([_choice(index, None, **prompt)], told) for index in range(n)]

    def prompt(self, part: PromptPart) -> Json:
        """What each choice begins with."""
        return {"text": part.text, "logprobs": self._odds(part.odds)}

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]:
        usage = _usage(answer.usage()) if self.with_usage_always else None
        said: list[Json] = []
        if delta.text or delta.finish or delta.odds or delta.calls:
            what: Json = {"delta": _content(delta)} if self.is_chat else {"text": delta.text}
            what["logprobs"] = self._odds(delta.odds)
            said.append(self._chunk([_choice(delta.index, delta.finish, **what)], usage))
        is_last = delta.finish and answer.is_over
        if is_last and (self.with_usage or self.with_usage_always):
            said.append(self._chunk([], _usage(answer.usage())))
        return said

    def whole(self, answer: Answer) -> Json:
        choices = [
            _choice(index, choice.finish, **self._whole(choice, answer.prompt))
            for index, choice in enumerate(answer.told)
        ]
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": choices,
            "usage": _usage(answer.usage()),
        }

    def _whole(self, choice: Choice, prompt: PromptPart | None) -> Json:
        if self.is_chat:
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                calls = [_call(piece) for piece in joined(choice.calls)]
                message |= {"content": choice.text or None, "tool_calls": calls}
            return {"message": message, "logprobs": self._odds(choice.odds)}
        before = prompt or PromptPart("")
        odds = self._odds([*before.odds, *choice.odds])
        return {"text": before.text + choice.text, "logprobs": odds}

    def _odds(self, odds: Sequence[Odds]) -> Json | None:
        if not self.with_odds or not odds:
            return None
        return (for_chat if self.is_chat else for_completion)(odds, self.bytes_of)

    def _chunk(self, choices: list[Json], usage: Json | None) -> Json:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        chunk = {**head, "choices": choices}
        if self.with_usage or self.with_usage_always:
            chunk["usage"] = usage
        return chunk

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def _content(delta: Delta) -> Json:
    content: Json = {"content": delta.text} if delta.text else {}
    if delta.calls:
        content["tool_calls"] = [{"index": piece.index, **_call(piece)} for piece in delta.calls]
    return content


def _call(piece: CallPiece) -> Json:
    """A call, or what it gains in a stream."""
    if not piece.id:
        return {"function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.id, "type": "function", "function": function}


def _choice(index: int, finish: str | None, **what: object) -> Json:
    return {"index": index, **what, "finish_reason": finish}


def _usage(counts: Json) -> Json:
    prompt, completion = counts["prompt_tokens"], counts["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counts["cached_tokens"]},
    }


def models(told: Sequence[Json]) -> Json:
    """The list for /v1/models."""
    return {"object": "list", "data": list(told)}


def model(name: str, created: int, max_model_len: int) -> Json:
    """Of a length that is not known (0) nothing is said."""
    told: Json = {"id": name, "object": "model", "created": created, "owned_by": "pdrt"}
    return told | ({"max_model_len": max_model_len} if max_model_len else {})
