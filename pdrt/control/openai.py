"""OpenAI's words: answers and chunks of chat and text completions, as its client reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrt.control.answer import Answer, Delta
from pdrt.control.http import Json


@dataclass(frozen=True, slots=True)
class OpenAIVoice:
    """What stays the same in all chunks of one answer."""

    request_id: str
    model: str
    created: int
    is_chat: bool
    with_usage: bool = False  # one more chunk at the end
    with_usage_always: bool = False  # and in each chunk before

    def opening(self) -> Sequence[Json]:
        """What is said when the first output is here, before it."""
        if not self.is_chat:
            return ()
        return (self._chunk([_choice(None, delta={"role": "assistant", "content": ""})], None),)

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]:
        usage = _usage(answer) if self.with_usage_always else None
        said: list[Json] = []
        if delta.text or delta.finish:
            content = {"content": delta.text} if delta.text else {}
            what: Json = {"delta": content} if self.is_chat else {"text": delta.text}
            said.append(self._chunk([_choice(delta.finish, **what)], usage))
        if delta.finish and (self.with_usage or self.with_usage_always):
            said.append(self._chunk([], _usage(answer)))
        return said

    def whole(self, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        what: Json = {"message": message} if self.is_chat else {"text": answer.text}
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": [_choice(answer.finish, **what)],
            "usage": _usage(answer),
        }

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


def _choice(finish: str | None, **what: object) -> Json:
    return {"index": 0, **what, "logprobs": None, "finish_reason": finish}


def _usage(answer: Answer) -> Json:
    counts = answer.usage()
    cached = counts.pop("cached_tokens")
    return {
        **counts,
        "total_tokens": counts["prompt_tokens"] + counts["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def models(name: str, created: int, max_model_len: int) -> Json:
    """The list for /v1/models: an instance serves one model."""
    return {"object": "list", "data": [model(name, created, max_model_len)]}


def model(name: str, created: int, max_model_len: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pdrt",
        "max_model_len": max_model_len,
    }
