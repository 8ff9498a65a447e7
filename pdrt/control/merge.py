"""Puts what prefill tells of a prompt (its text, its odds) before decode's answer.

Only answers that ask for it are touched; of a stream, decode's bytes follow as they came. Both
sides name the same request, model and time, so that a client reads one answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdrt.control.generate import GenerateVoice
from pdrt.control.http import Json, parse_object
from pdrt.control.openai import OpenAIVoice
from pdrt.control.order import Order
from pdrt.control.reply import long_event_of, long_json_of
from pdrt.errors import BadRequest, PdrtError

MERGED_ANSWER: Final = 1 << 26  # bytes of an answer that is not streamed


@dataclass(frozen=True, slots=True)
class Merge:
    """For one request; `room` is what its client reads as such."""

    order: Order
    request_id: str
    created: int

    def check(self, told: Json) -> None:
        """Raises PdrtError when prefill's answer lacks its part."""
        if not isinstance(told.get("prompt"), dict) or not isinstance(told.get("model"), str):
            raise PdrtError("prefill told nothing of the prompt")

    def opening(self, told: Json, room: int) -> bytes:
        """The events before decode's."""
        order = self.order
        if order.dialect == "generate":
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

    def whole(self, told: Json, answer: Json) -> bytes:
        """Decode's whole answer with prefill's part in it."""
        if self.order.dialect == "generate":
            return long_json_of({**answer, **told["prompt"]})
        choices = [_joined(told["prompt"], choice) for choice in answer["choices"]]
        return long_json_of({**answer, "choices": choices})


def read_answer(body: bytes) -> Json:
    """Raises PdrtError when it is no JSON object."""
    try:
        return parse_object(body)
    except BadRequest as error:
        raise PdrtError(f"decode's answer cannot be read: {error}") from error


def _joined(prompt: Json, choice: Json) -> Json:
    before, after = prompt["logprobs"], choice["logprobs"]
    odds = after
    if before is not None:
        odds = {name: column + (after or {}).get(name, []) for name, column in before.items()}
    return {**choice, "text": prompt["text"] + choice["text"], "logprobs": odds}


def _none(_token: int) -> bytes:
    raise AssertionError("the router knows no tokens")
