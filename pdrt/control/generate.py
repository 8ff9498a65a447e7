"""The words of POST /generate: text and token ids together, and which path served them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrt.control.answer import Answer, Delta
from pdrt.control.http import Json


@dataclass(frozen=True, slots=True)
class GenerateVoice:
    request_id: str
    room: int
    path: str

    def opening(self) -> Sequence[Json]:
        return ()

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]:
        if not delta.ids and not delta.finish:
            return ()
        said = self._said(delta.text, delta.ids, delta.finish)
        return (said | self._end(answer) if delta.finish else said,)

    def whole(self, answer: Answer) -> Json:
        return self._said(answer.text, answer.ids, answer.finish) | self._end(answer)

    def _said(self, text: str, ids: Sequence[int], finish: str | None) -> Json:
        return {
            "request_id": self.request_id,
            "bootstrap_room": self.room,
            "output": text,
            "output_ids": list(ids),
            "finish_reason": finish,
        }

    def _end(self, answer: Answer) -> Json:
        return {"usage": answer.usage(), "path": self.path, "timings_ms": answer.times.json()}
