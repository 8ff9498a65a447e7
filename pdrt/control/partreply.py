"""How a leader answers one prompt of a batch: to a client that joins the parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pdrt.control.answer import Answer, Delta
from pdrt.control.batch import ClientGone, Reader
from pdrt.control.order import Order
from pdrt.control.reply import EVENTS, Voice, beside, event_of, long_json_of, opening_of
from pdrt.control.sse import DONE
from pdrt.errors import Cancelled, PdrtError


class PartReply:
    """Nothing is said before the first output, so an error before it is raised."""

    def __init__(self, client: Reader, voice: Voice, order: Order) -> None:
        self._client, self._voice, self._is_streamed = client, voice, order.stream
        self._has_begun = False

    async def say(self, delta: Delta, answer: Answer) -> None:
        if not self._is_streamed:
            return
        events = list(map(event_of, self._voice.chunks(delta, answer)))
        if not self._has_begun:
            await self._begin(EVENTS)
            opening = partial(opening_of, self._voice, answer)
            events = [*await beside(opening, answer), *events]
        if events:
            await self._write(b"".join(events))

    async def end(self, answer: Answer) -> None:
        if self._is_streamed:
            await self._write(DONE)
        else:
            await self._begin({"content-type": "application/json"})
            await self._write(await beside(lambda: long_json_of(self._voice.whole(answer)), answer))
        await self._client.finish()

    async def fail(self, error: PdrtError) -> None:
        if not self._has_begun:
            raise error
        await self._client.break_off(error)

    async def _begin(self, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        await self._client.start(200, headers)

    async def _write(self, data: bytes) -> None:
        """Raises Cancelled when the client is gone."""
        try:
            await self._client.write(data)
        except ClientGone as error:
            raise Cancelled("the client is gone") from error
