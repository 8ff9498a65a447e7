"""How answers are said to whoever reads them: once, and never an error behind a half answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from pdrt.control.answer import Answer, Delta
from pdrt.control.http import Json
from pdrt.control.reader import ClientGone
from pdrt.control.reply import Reply, StreamReply, WholeReply
from pdrt.control.times import Times
from pdrt.errors import Cancelled, DeadlinePassed, PdrtError

DELTA = Delta(index=0, text="a", ids=(97,))


class FakeReader:
    """Writes down what it is told; leaves at `leaves`."""

    def __init__(self, leaves: str = "") -> None:
        self.told: list[str] = []
        self._leaves = leaves

    def _tell(self, what: str) -> None:
        if what == self._leaves:
            raise ClientGone
        self.told.append(what)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._tell("start")

    async def write(self, chunk: bytes) -> None:
        self._tell("write")

    async def finish(self) -> None:
        self._tell("finish")

    async def break_off(self, error: PdrtError) -> None:
        self._tell("break off")


class OneWord:
    """A voice, which has nothing to say of tokens without text."""

    def opening(self, answer: Answer) -> Sequence[Json]:
        return ()

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]:
        return ({},) if delta.text else ()

    def whole(self, answer: Answer) -> Json:
        return {}


def reply_to(reader: FakeReader, *, stream: bool) -> Reply:
    return StreamReply(reader, OneWord()) if stream else WholeReply(reader, OneWord())


async def all_of(reply: Reply, answer: Answer) -> None:
    await reply.say(DELTA, answer)
    await reply.end(answer)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_word_is_raised(stream: bool) -> None:
    reader = FakeReader()
    with pytest.raises(DeadlinePassed):
        await reply_to(reader, stream=stream).fail(DeadlinePassed("late"))
    assert reader.told == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leaves", ["start", "write", "finish"])
async def test_a_reader_that_leaves_cancels_the_answer_and_gets_no_second_one(
    leaves: str, stream: bool
) -> None:
    reader, answer = FakeReader(leaves), Answer(1, [], Times(0.0))
    reply = reply_to(reader, stream=stream)
    with pytest.raises(Cancelled):
        await all_of(reply, answer)
    await reply.fail(Cancelled("the client is gone"))
    assert reader.told[-1] == "break off"
    assert reader.told.count("start") <= 1


async def test_a_stream_begins_with_its_first_event_and_not_with_tokens_that_are_held_back() -> (
    None
):
    reader, answer = FakeReader(), Answer(1, [], Times(0.0))
    reply = reply_to(reader, stream=True)
    await reply.say(Delta(index=0, text="", ids=(97,)), answer)
    assert reader.told == []
    with pytest.raises(DeadlinePassed):
        await reply.fail(DeadlinePassed("late"))
    await reply.say(DELTA, answer)
    assert reader.told == ["start", "write"]
