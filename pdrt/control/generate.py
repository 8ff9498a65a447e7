"""The words of POST /generate: text and token ids together, and which path served them.

With n > 1 an answer has a list `outputs`, and each chunk of a stream says which one it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrt.control.answer import Answer, Choice, Delta
from pdrt.control.http import Json
from pdrt.control.likely import BytesOf, Odds, PromptPart, for_generate


@dataclass(frozen=True, slots=True)
class GenerateVoice:
    request_id: str
    room: int
    path: str
    bytes_of: BytesOf
    with_odds: bool = False

    def opening(self, answer: Answer) -> Sequence[Json]:
        """The prompt's odds come in a chunk of their own."""
        return () if answer.prompt is None else (self.first(self.prompt(answer.prompt)),)

    def first(self, prompt: Json) -> Json:
        return {**self._head(), "output": "", "output_ids": [], "finish_reason": None, **prompt}

    def prompt(self, part: PromptPart) -> Json:
        return {"prompt_logprobs": for_generate(part.odds, self.bytes_of)}

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]:
        if not delta.ids and not delta.finish:
            return ()
        which = {"index": delta.index} if len(answer.choices) > 1 else {}
        said = {
            **self._head(),
            **which,
            **self._said(delta.text, delta.ids, delta.finish, delta.odds),
        }
        return (said | self._end(answer) if delta.finish and answer.is_over else said,)

    def whole(self, answer: Answer) -> Json:
        prompt = {} if answer.prompt is None else self.prompt(answer.prompt)
        choices = [self._choice(choice) for choice in answer.told]
        if len(choices) == 1:
            return {**self._head(), **choices[0], **prompt, **self._end(answer)}
        outputs = [{"index": index, **choice} for index, choice in enumerate(choices)]
        return {**self._head(), "outputs": outputs, **prompt, **self._end(answer)}

    def _head(self) -> Json:
        return {"request_id": self.request_id, "bootstrap_room": self.room}

    def _choice(self, choice: Choice) -> Json:
        return self._said(choice.text, choice.ids, choice.finish, choice.odds)

    def _said(
        self, text: str, ids: Sequence[int], finish: str | None, odds: Sequence[Odds]
    ) -> Json:
        said: Json = {"output": text, "output_ids": list(ids), "finish_reason": finish}
        if self.with_odds:
            said["logprobs"] = for_generate(odds, self.bytes_of)
        return said

    def _end(self, answer: Answer) -> Json:
        return {"usage": answer.usage(), "path": self.path, "timings_ms": answer.times.json()}
