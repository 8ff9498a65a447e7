"""A conversation: each turn's prompt is all that was said before, and a new question.

What was said before is the server's own answer: ids where it tells them, else text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from pdrt.bench.heard import Record, said_in
from pdrt.bench.prompts import Ask

ToBody: TypeAlias = Callable[[Ask], bytes]
LOST: Final = "turn_lost"


class Talk:
    """One turn or several; `body` is the request that is next, made before it is due."""

    def __init__(self, to_body: ToBody, asks: Sequence[Ask]) -> None:
        self._to_body, self._asked, self._left = to_body, asks[0], deque(asks[1:])
        self.body: bytes | None = to_body(asks[0])

    @property
    def turns(self) -> int:
        """Those that are still to come."""
        return len(self._left) + (self.body is not None)

    def hear(self, record: Record) -> list[Record]:
        """An answer. The turns that cannot be asked any more, because it has failed."""
        self.body = None
        if not self._left:
            return []
        said = said_in(record)
        if said is None:
            lost = [Record(record.ended, record.ended) for _ in self._left]
            for each in lost:
                each.fail(LOST, "an earlier turn of its conversation failed")
            self._left.clear()
            return lost
        self._asked = followed(self._asked, said.text, said.ids, self._left.popleft())
        self.body = self._to_body(self._asked)
        return []


def followed(asked: Ask, text: str, ids: Sequence[int], question: Ask) -> Ask:
    """The prompt of the turn after this answer."""
    match asked.prompt, question.prompt:
        case str(before), str(new):
            return Ask(f"{before}{text} {new}", question.max_tokens)
        case tuple(before), tuple(new):
            return Ask((*before, *ids, *new), question.max_tokens)
        case _:
            raise AssertionError("all prompts of a load are of one kind")
