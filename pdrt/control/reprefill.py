"""How a decode leader has a retracted room computed again by the prefill side that it came from.

The promise: each request is remembered from its Submit to its end and no longer, and asking
ends with an answer or a PdrtError, at the latest with its request; then the worker computes the
room itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout
from pydantic import TypeAdapter

from pdrt.control.bootstrap_client import BootstrapClient
from pdrt.control.heartbeat import Time
from pdrt.control.http import Json, error_from_answer, error_of_client
from pdrt.device.chance import of_sequence
from pdrt.errors import Conflict, NotFound, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import (
    AbortRoom,
    AskPrefill,
    Rank,
    Rebind,
    Sampling,
    Source,
    Submit,
    ToWorker,
    unpack_ids,
)

_SAMPLING: Final = TypeAdapter(Sampling)
_MAX_ANSWER_BYTES: Final = 1 << 16
_SETTLE_S: Final = 2.0
_SETTLE_STEP_S: Final = 0.02


@dataclass(slots=True)
class Origin:
    """Where a room's prompt was computed, what its request was, and which worker answers it."""

    rank: Rank
    submit: Submit
    source: Source
    deadline: float
    asks: set[asyncio.Timeout] = field(default_factory=set)  # in flight

    def end(self) -> None:
        """Nobody wants an answer any more: leaving the other leader makes it stop computing."""
        for ask in self.asks:
            ask.reschedule(asyncio.get_running_loop().time())


class Reprefill:
    """`told` sees all that workers are told, `over` each room's end, `lost` each worker's."""

    def __init__(
        self,
        session: ClientSession,
        key: ClusterKey,
        connect_s: float,
        time: Time,
        wall: Callable[[], float],
    ) -> None:
        self._session, self._key, self._connect_s = session, key, connect_s
        self._time, self._wall = time, wall
        self._origins: dict[int, Origin] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def told(self, rank: Rank, message: ToWorker) -> None:
        match message:
            case Submit(source=Source() as source):
                self._forget(message.room)  # an older attempt, whose place this one takes
                deadline = self._time.clock() + message.time_left
                self._origins[message.room] = Origin(rank, message, source, deadline)
            case Rebind() if origin := self._origins.get(message.room):
                origin.source = message.source
            case AbortRoom(index=-1):
                self._forget(message.room)
            case _:
                pass

    def over(self, room: int, attempt: int) -> None:
        """A worker said the room's last output; of an older attempt it means nothing now."""
        origin = self._origins.get(room)
        if origin is not None and not 0 <= attempt < origin.submit.attempt:
            self._forget(room)

    def lost(self, rank: Rank) -> None:
        """All that this worker answered is over."""
        for room in [room for room, origin in self._origins.items() if origin.rank == rank]:
            self._forget(room)

    def _forget(self, room: int) -> None:
        if origin := self._origins.pop(room, None):
            origin.end()

    async def ask(self, wanted: AskPrefill) -> None:
        """Until decode's memory holds the room's tokens. Raises PdrtError.

        A sequence of a group is computed in a room of its own; its origin is the group's.
        """
        origin = self._origins.get(wanted.room if wanted.of_room < 0 else wanted.of_room)
        if origin is None:
            raise NotFound(f"room {wanted.room} is not in flight")
        limit = asyncio.timeout(None)
        try:
            async with limit:
                origin.asks.add(limit)
                await self._ask(wanted, origin)
        except TimeoutError:
            raise NotFound(f"room {wanted.room} has ended") from None
        finally:
            origin.asks.discard(limit)

    async def _ask(self, wanted: AskPrefill, origin: Origin) -> None:
        client = BootstrapClient(
            self._session, origin.source.host, origin.source.port, self._key, self._connect_s
        )
        leader = (await client.health()).http
        if not leader:
            raise Unavailable(f"{client.where} does not say where its leader is")
        patience = self._time.clock() + _SETTLE_S
        while True:
            left = max(origin.deadline - self._time.clock(), 0.001)
            try:
                await self._post(
                    f"{leader}/internal/prefill", self._body(wanted, origin, left), left
                )
            except Conflict:  # the attempt before is being wound up there
                if self._time.clock() > patience:
                    raise
                await self._time.sleep(_SETTLE_STEP_S)
            else:
                return

    def _body(self, wanted: AskPrefill, origin: Origin, left: float) -> Json:
        submit = origin.submit
        sampling = of_sequence(submit.sampling, wanted.index)
        expires = self._wall() + left
        return {
            "bootstrap_room": wanted.room,
            "attempt": wanted.attempt,
            "request_id": submit.request_id,
            "cache_salt": submit.salt,
            "input_ids": unpack_ids(wanted.tokens),
            "prompt_tokens": submit.prompt_tokens,
            "sampling": _SAMPLING.dump_python(sampling, mode="json"),
            "priority": submit.priority,
            "time_left_s": left,
            "disagg_prefill_dp_rank": origin.source.dp_rank,
            "transfer_token": self._key.room_token(wanted.room, wanted.attempt, expires),
        }

    async def _post(self, url: str, body: Json, left: float) -> None:
        headers = {"authorization": f"Bearer {self._key.bearer()}"}
        timeout = ClientTimeout(total=left, connect=self._connect_s)
        try:
            async with self._session.post(
                url, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.content.read(_MAX_ANSWER_BYTES)
                status = response.status
        except (ClientError, TimeoutError, OSError) as error:
            raise error_of_client(error, url) from error
        if status != 200:
            raise error_from_answer(status, answer, url)
