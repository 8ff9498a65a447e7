"""A device worker as its node has it, without a process: the test says what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdrt.control.heartbeat import Time
from pdrt.control.parts import Heard
from pdrt.control.worker_handle import Lost
from pdrt.errors import Overloaded, PeerLost
from pdrt.messages import (
    KvLayout,
    Loading,
    Output,
    Outputs,
    Problem,
    Process,
    Rank,
    Ready,
    Stats,
    Submit,
    ToWorker,
)
from pdrt.spawn import WorkerSpec

READY = Ready(
    endpoint="tcp://127.0.0.1:1",
    process=Process(host="here", pid=1, started=1),
    layout=KvLayout(block_size=16, dtype="uint8", layers=1, kv_heads=1, head_dim=1),
    blocks=64,
    eos_token_ids=(256,),
)
DIED = Problem(code="peer_lost", message="worker ended with exit status -9")


class FakeWorker:
    """Implements Handle. `answers` is how it ends each request; None: not at all."""

    def __init__(
        self,
        rank: Rank,
        make_spec: Callable[[str], WorkerSpec],
        folder: Path,
        heard: Heard,
        time: Time,
    ) -> None:
        self.rank, self.state = rank, "loading"
        self.make_spec, self.folder, self.time = make_spec, folder, time
        self.ready: Ready | None = None
        self.stats, self.stats_at = Stats(), 0.0
        self.loading: Loading | None = None
        self.lives, self.pid = 1, 42
        self.last_problem: Problem | None = None
        self.told: list[ToWorker] = []
        self.answers: Output | None = Output(room=0, tokens=(7,), finish="length")
        self.is_full = self.is_slow_to_stop = False
        self.runs = False
        self.trouble: Exception | None = None
        self._heard, self._stopping, self._ended = heard, asyncio.Event(), asyncio.Event()

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    def tell(self, message: ToWorker) -> None:
        if self.ready is None:
            raise PeerLost("it is not ready")
        if self.is_full:
            raise Overloaded("it does not read")
        self.told.append(message)
        if isinstance(message, Submit) and self.answers is not None:
            asyncio.get_running_loop().call_soon(self.answer, message.room, self.answers)

    def stop(self) -> None:
        self._stopping.set()
        if not self.is_slow_to_stop:
            self._ended.set()

    @property
    def is_asked_to_stop(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> None:
        self.runs = True
        try:
            await self._ended.wait()
            if self.trouble is not None:
                raise self.trouble
        finally:
            self.runs = False

    # For the test.

    def break_down(self, trouble: Exception) -> None:
        self.trouble = trouble
        self._ended.set()

    def become_ready(self) -> None:
        self.ready, self.state = READY, "ready"
        self._heard(self, READY)

    def say(self, message: Outputs | Loading) -> None:
        self._heard(self, message)

    def answer(self, room: int, end: Output) -> None:
        item = Output(room=room, tokens=end.tokens, finish=end.finish, problem=end.problem)
        self.say(Outputs(items=(item,)))

    def die(self, final: bool = False) -> None:
        self.ready, self.state, self.last_problem = None, "waiting", DIED
        if final:
            self.state = "failed"
            self._ended.set()
        self._heard(self, Lost(DIED, final))
