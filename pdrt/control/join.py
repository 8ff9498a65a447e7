"""Makes one answer of a batch's: its prompts are answered one by one, and read as one answer.

The promise: choices are indexed by prompt, then by sequence; usage is the sum; a stream has one
usage and one `[DONE]`; after an error event it says nothing more. Bytes in, bytes out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pdrt.control.http import Json
from pdrt.control.longjson import parse_long
from pdrt.control.order import Order
from pdrt.control.reply import event_of, long_json_of
from pdrt.control.sse import DONE, END, ERROR, MAX_EVENT
from pdrt.errors import BadRequest, PdrtError

_SHORT: Final = 1 << 15
_OF_ALL: Final = ("usage", "path", "timings_ms")  # said once, of all prompts
_TIMES: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {
    "tokenise": max,
    "first_token": min,
    "total": max,
}


@dataclass(slots=True)
class Joiner:
    """For one client; a part is a prompt's answer, named by the prompt's place."""

    order: Order
    has_failed: bool = False  # the stream has ended with an error event
    _rests: dict[int, bytes] = field(default_factory=dict)  # of each part, an event half here
    _ends: dict[int, Json] = field(default_factory=dict)  # what each part said of itself
    _done: set[int] = field(default_factory=set)
    _head: Json = field(default_factory=dict)  # what all chunks of OpenAI's have in common

    @property
    def count(self) -> int:
        return len(self.order.prompts)

    @property
    def _is_generate(self) -> bool:
        return self.order.dialect == "generate"

    # A stream.

    def feed(self, part: int, data: bytes) -> bytes:
        """The events of a part that are whole now, in the words of the one answer.

        Raises PdrtError for what is no event of ours.
        """
        *events, rest = (self._rests.pop(part, b"") + data).split(END)
        if len(rest) > MAX_EVENT:
            raise PdrtError(f"prompt {part} was answered with an event of over {MAX_EVENT} bytes")
        self._rests[part] = rest
        return b"".join([self._event(part, event) for event in events])

    def _event(self, part: int, event: bytes) -> bytes:
        if self.has_failed:
            return b""
        if event.startswith(ERROR):
            self.has_failed = True
            return event + END
        if event + END == DONE:
            self._done.add(part)
            return self._tail() if len(self._done) == self.count else b""
        chunk = _chunk(part, event)
        said = self._generated(part, chunk) if self._is_generate else self._completed(part, chunk)
        return b"" if said is None else event_of(said)

    def _generated(self, part: int, chunk: Json) -> Json:
        chunk["index"] = part * self.order.n + chunk.get("index", 0)
        if "usage" in chunk:
            self._ends[part] = {name: chunk.pop(name) for name in _OF_ALL}
            if len(self._ends) == self.count:
                chunk |= _of_all(list(self._ends.values()))
        return chunk

    def _completed(self, part: int, chunk: Json) -> Json | None:
        self._head = self._head or {n: chunk[n] for n in ("id", "object", "created", "model")}
        if chunk.get("usage"):
            self._ends[part] = chunk["usage"]
            chunk["usage"] = _sum(list(self._ends.values()))
        if not chunk["choices"]:
            return None
        return {**chunk, **self._head, "choices": self._shifted(part, chunk["choices"])}

    def _tail(self) -> bytes:
        if self._is_generate or not (self.order.include_usage or self.order.usage_always):
            return DONE
        usage = _sum(list(self._ends.values()))
        return event_of({**self._head, "choices": [], "usage": usage}) + DONE

    # A whole answer.

    async def whole(self, bodies: Sequence[bytes]) -> bytes:
        """All parts' answers as one. Raises PdrtError when they are none."""
        if sum(map(len, bodies)) <= _SHORT:
            return self._whole(bodies)
        return await asyncio.to_thread(self._whole, bodies)

    def _whole(self, bodies: Sequence[bytes]) -> bytes:
        try:
            answers = [parse_long(body) for body in bodies]
            return long_json_of(self._outputs(answers) if self._is_generate else self._of(answers))
        except (BadRequest, KeyError, TypeError, ValueError) as error:
            raise PdrtError(f"a prompt of the batch was not answered in our words: {error}") from (
                error
            )

    def _of(self, answers: Sequence[Json]) -> Json:
        choices = [
            choice
            for part, answer in enumerate(answers)
            for choice in self._shifted(part, answer["choices"])
        ]
        usage = _sum([answer["usage"] for answer in answers])
        return {**answers[0], "choices": choices, "usage": usage}

    def _outputs(self, answers: Sequence[Json]) -> Json:
        outputs: list[Json] = []
        for part, answer in enumerate(answers):
            told = {name: answer[name] for name in ("bootstrap_room", "path")}
            for index, one in enumerate(_each(answer), start=part * self.order.n):
                outputs.append({**one, "index": index, **told})
        head = {name: answers[0][name] for name in ("request_id", "bootstrap_room")}
        return {**head, "outputs": outputs, **_of_all(answers)}

    def _shifted(self, part: int, choices: Sequence[Json]) -> list[Json]:
        by = part * self.order.n
        return [{**choice, "index": choice["index"] + by} for choice in choices]


def _chunk(part: int, event: bytes) -> Json:
    try:
        chunk = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        chunk = None
    match chunk:
        case {"choices": list()} | {"output": str()}:
            return dict(chunk)
        case _:
            raise PdrtError(f"prompt {part} was answered with no event of ours: {event[:200]!r}")


def _each(answer: Json) -> list[Json]:
    """The sequences of a /generate answer; what it tells of the prompt goes to the first."""
    of_prompt = {name: answer[name] for name in ("prompt_logprobs",) if name in answer}
    if "outputs" in answer:
        first, *others = answer["outputs"]
        return [{**first, **of_prompt}, *others]
    names = ("output", "output_ids", "finish_reason", "logprobs")
    return [{"index": 0, **{n: answer[n] for n in names if n in answer}, **of_prompt}]


def _of_all(ends: Sequence[Json]) -> Json:
    """What is said once: the sum of the counts, and from the first to the last moment."""
    paths = {end["path"] for end in ends}
    times = {
        name: choose(found)
        for name, choose in _TIMES.items()
        if (found := [end["timings_ms"][name] for end in ends if name in end["timings_ms"]])
    }
    return {
        "usage": _sum([end["usage"] for end in ends]),
        "path": paths.pop() if len(paths) == 1 else "mixed",
        "timings_ms": times,
    }


def _sum(usages: Sequence[Mapping[str, Any]]) -> Json:
    """Of counts, and of counts in objects among them."""
    found: Json = {}
    for name, value in usages[0].items():
        column = [usage[name] for usage in usages]
        found[name] = _sum(column) if isinstance(value, dict) else sum(column)
    return found
