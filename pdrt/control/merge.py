"""Puts what prefill tells of a prompt (its text, its odds) before decode's answer.

Only answers that ask for it are touched; of a stream, decode's bytes follow as they came. Both
sides name the same request, model and time, so that a client reads one answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdrt.control.generate import GenerateVoice
from pdrt.control.http import Json
from pdrt.control.longjson import read_long
from pdrt.control.openai import OpenAIVoice
from pdrt.control.order import Order
from pdrt.control.reply import RawList, long_event_of, long_json_of
from pdrt.errors import BadRequest, PdrtError

MERGED_ANSWER: Final = 1 << 26  # bytes of an answer that is not streamed


@dataclass(frozen=True, slots=True)
class Merge:
    """For one request; `room` is what its client reads as such."""

    order: Order
    request_id: str
    created: int

    @property
    def _is_generate(self) -> bool:
        return self.order.dialect == "generate"

    def check(self, told: Json) -> None:
        """Raises PdrtError when prefill's answer lacks its part."""
        match told:
            case {
                "model": str(),
                "prompt": dict() as prompt,
                "usage": {"prompt_tokens": int(), "cached_tokens": int()},
            } if self._is_generate or _is_said(prompt):
                return
        raise PdrtError("prefill told nothing of the prompt that goes before an answer")

    def opening(self, told: Json, room: int) -> bytes:
        """The events before decode's."""
        order = self.order
        if self._is_generate:
            generate = GenerateVoice(self.request_id, room, "disagg", _none)
            return long_event_of(generate.first(told["prompt"]))
        voice = OpenAIVoice(
            self.request_id,
            told["model"],
            self.created,
            is_chat=False,
            bytes_of=_none,
            with_usage=order.include_usage,
            with_usage_always=order.usage_always,
        )
        usage = {"completion_tokens": 0, **told["usage"]}
        return b"".join(map(long_event_of, voice.first(told["prompt"], order.n, usage)))

    async def read(self, body: bytes) -> Json:
        """Decode's whole answer. Raises PdrtError when nothing can be put before it."""
        try:
            answer = await read_long(body)
        except BadRequest as error:
            raise PdrtError(f"decode's answer cannot be read: {error}") from error
        if self._is_generate:
            return answer
        match answer:
            case {"choices": [_, *_] as choices} if all(map(_is_said, choices)):
                return answer
        raise PdrtError("decode's answer has no choices with a text")

    def whole(self, told: Json, answer: Json) -> bytes:
        """Decode's whole answer with prefill's part in it."""
        if self._is_generate:
            return long_json_of({**answer, **told["prompt"]})
        choices = [_joined(told["prompt"], choice) for choice in answer["choices"]]
        return long_json_of({**answer, "choices": choices})


def _is_said(part: object) -> bool:
    """Whether it has a text, and odds or null for them, as a choice and its prompt do."""
    match part:
        case {"text": str(), "logprobs": None}:
            return True
        case {"text": str(), "logprobs": dict() as odds}:
            return all(isinstance(column, RawList) for column in odds.values())
        case _:
            return False


def _joined(prompt: Json, choice: Json) -> Json:
    before, after = prompt["logprobs"], choice["logprobs"]
    odds = after
    if before is not None:
        odds = {
            name: RawList([*column, *(after or {}).get(name, [])])
            for name, column in before.items()
        }
    return {**choice, "text": prompt["text"] + choice["text"], "logprobs": odds}


def _none(_token: int) -> bytes:
    raise AssertionError("the router knows no tokens")
