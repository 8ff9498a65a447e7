"""A prompt of token ids that is echoed becomes text beside the event loop, however long it is."""

from __future__ import annotations

import threading
from collections.abc import Collection

from pdrt.control import order
from pdrt.control.answer import Times
from pdrt.control.call import Call
from pdrt.control.detokenize import Pieces
from pdrt.control.prompted import choices_of, prompt_of
from pdrt.control.text import ByteText, TextPool
from pdrt.messages import Output, Sampling, Submit, pack_ids, pack_odds

IDS = list(b"echoed")
BODY = {"prompt": IDS, "echo": True, "logprobs": 0}
CALL = Call(
    order=order.parse("completions", BODY),
    leg=None,
    request_id="r",
    room=1,
    attempt=0,
    deadline=9.0,
    times=Times(0.0),
)
SUBMIT = Submit(
    room=1,
    attempt=0,
    request_id="r",
    tokens=pack_ids(IDS),
    prompt_tokens=len(IDS),
    sampling=Sampling(max_tokens=1),
    time_left=9.0,
)


class Watched(ByteText):
    """Remembers the threads in which its tokens became text."""

    def __init__(self) -> None:
        self.threads = set[threading.Thread]()

    def pieces(self, shown: Collection[str] = ()) -> Pieces:
        return WatchedPieces(super().pieces(shown), self.threads)


class WatchedPieces:
    def __init__(self, pieces: Pieces, threads: set[threading.Thread]) -> None:
        self._pieces, self._threads = pieces, threads

    def push(self, token: int) -> str:
        self._threads.add(threading.current_thread())
        return self._pieces.push(token)

    def flush(self) -> str:
        return self._pieces.flush()


async def test_the_prompt_becomes_text_in_no_thread_that_has_a_loop() -> None:
    words = Watched()
    text = TextPool(words)
    (choice,) = await choices_of(CALL, SUBMIT, text)
    assert choice.reached == len("echoed")
    scored = pack_odds([-0.5] * (len(IDS) - 1), [()] * (len(IDS) - 1))
    part = await prompt_of(CALL, SUBMIT, Output(room=1, scored=scored), text)
    assert (part.text, len(part.odds)) == ("echoed", len(IDS))
    assert words.threads
    assert threading.current_thread() not in words.threads
    text.close()
