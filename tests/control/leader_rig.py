"""A leader's API with the real dispatcher and one worker that says what the test tells it to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from pdrt.config import Role, SecuritySection
from pdrt.control.api import make_app
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.grammarcheck import GrammarCheck
from pdrt.control.http import listen
from pdrt.control.keydoor import KeyDoor
from pdrt.control.leader import Leader, Limits
from pdrt.control.order import PATHS
from pdrt.control.text import ByteText, TextPool
from pdrt.keys import ClusterKey
from pdrt.messages import (
    AbortRoom,
    KvLayout,
    Output,
    Outputs,
    Problem,
    Process,
    Rank,
    Ready,
    Rebind,
    Submit,
    ToWorker,
    pack_odds,
    pack_tops,
)
from pdrt.messages import unpack_ids as unpack

KEY = ClusterKey(b"the key of a test cluster")
BEARER = {"authorization": f"Bearer {KEY.bearer()}"}
EOS = 256
WALL = 1_800_000_000.0
READY = Ready(
    endpoint="tcp://127.0.0.1:1",
    process=Process(host="h", pid=1, started=0),
    layout=KvLayout(block_size=16, dtype="uint8", layers=1, kv_heads=1, head_dim=1),
    blocks=64,
    eos_token_ids=(EOS,),
)


def out(text: str | bytes = "", finish: Any = None, *, eos: bool = False, **fields: Any) -> Output:
    """An output without a room: the worker fills it in."""
    data = text.encode() if isinstance(text, str) else text
    tokens = (*data, *((EOS,) if eos else ()))
    return Output(room=0, tokens=tokens, finish=finish, **fields)


def odd(text: str | bytes, at: int = 0, finish: Any = None, top: int = 0, index: int = 0) -> Output:
    """An output with odds: token i of a sequence has -(i + index) / 8; X and Y lie behind it."""
    tokens = text.encode() if isinstance(text, str) else text
    logprobs = tuple(-(at + i + index) / 8 for i in range(len(tokens)))
    best = [((t, p), (88, p - 1), (89, p - 2)) for t, p in zip(tokens, logprobs, strict=True)]
    return Output(
        room=0,
        index=index,
        tokens=tuple(tokens),
        logprobs=logprobs,
        tops=pack_tops([one[:top] for one in best]),
        finish=finish,
    )


def scored(prompt: bytes, top: int) -> bytes:
    """The odds of a prompt's tokens but the first: token i has -i / 16."""
    logprobs = [-i / 16 for i in range(1, len(prompt))]
    best = [((t, p), (88, p - 1)) for t, p in zip(prompt[1:], logprobs, strict=True)]
    return pack_odds(logprobs, [one[:top] for one in best])


def failing(code: str, message: str = "why", stage: str = "sched") -> Output:
    return Output(room=0, problem=Problem(code=code, message=message, stage=stage))


class ScriptedWorker:
    """Answers each Submit with the script, one output a message; without one it waits."""

    def __init__(self) -> None:
        self.rank, self.ready = Rank(), READY
        self.dispatcher: DPDispatcher | None = None
        self.script: Sequence[Output] | None = None
        self.answers: Callable[[Submit], Sequence[Output]] | None = None  # else, by what was asked
        self.pause = 0  # turns of the loop between two outputs, so that each is told alone
        self.submitted = deque[Submit]()
        self.aborted = list[tuple[int, str]]()
        self.stopped = list[int]()  # sequences that were aborted alone
        self.rebound = list[Rebind]()
        self.news = asyncio.Event()

    def tell(self, message: ToWorker) -> None:
        match message:
            case Submit():
                self.submitted.append(message)
                script = self.answers(message) if self.answers is not None else self.script
                if script is not None and self.pause:
                    self.say_slowly(message.room, script, self.pause)
                elif script is not None:
                    asyncio.get_running_loop().call_soon(self.say, message.room, *script)
            case AbortRoom(index=index) if index >= 0:
                self.stopped.append(index)
            case AbortRoom():
                self.aborted.append((message.room, message.reason))
            case Rebind():
                self.rebound.append(message)
            case _:
                pass
        self.news.set()

    def say(self, room: int, *outputs: Output) -> None:
        assert self.dispatcher is not None
        for output in outputs:
            self.dispatcher.deliver(0, Outputs(items=(replace(output, room=room),)))

    def say_slowly(self, room: int, outputs: Sequence[Output], turns: int = 0) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self.say_slowly, room, outputs, turns - 1)
        elif outputs:
            self.say(room, outputs[0])
            loop.call_soon(self.say_slowly, room, outputs[1:], self.pause)

    async def until(self, ready: Any) -> None:
        """Until `ready(self)` holds; looked at after each message."""
        while not ready(self):
            self.news.clear()
            await self.news.wait()

    async def next_submit(self) -> Submit:
        await self.until(lambda worker: worker.submitted)
        return self.submitted.popleft()


class Rig:
    def __init__(
        self, leader: Leader, worker: ScriptedWorker, client: aiohttp.ClientSession
    ) -> None:
        self.leader, self.worker, self.client = leader, worker, client
        self.served = 0
        self.drains = 0
        self.not_ready = ""
        self.stalled = 0.0
        self.url = ""

    def count_served(self) -> None:
        self.served += 1

    def count_drain(self) -> None:
        self.drains += 1
        self.leader.dispatcher.drain()

    async def post(self, path: str, body: Any, **kwargs: Any) -> aiohttp.ClientResponse:
        if isinstance(body, bytes):
            return await self.client.post(path, data=body, **kwargs)
        return await self.client.post(path, json=body, **kwargs)

    def leg(self, room: int = 7, attempt: int = 0, **fields: Any) -> dict[str, Any]:
        """The router's fields of a leg, with a genuine token."""
        return {
            "bootstrap_room": room,
            "attempt": attempt,
            "bootstrap_host": "127.0.0.9",
            "bootstrap_port": 18800,
            "disagg_prefill_dp_rank": 0,
            "time_left_s": 20.0,
            "transfer_token": KEY.room_token(room, attempt, WALL + 20),
            "request_id": "id-1",
            **fields,
        }


@asynccontextmanager
async def rigged(role: Role = "hybrid", **changes: Any) -> AsyncIterator[Rig]:
    """A served leader; `changes` are fields of Leader or of Limits."""
    worker = ScriptedWorker()
    dispatcher = DPDispatcher([worker], lambda: 0.0)
    worker.dispatcher = dispatcher
    of_limits = {k: changes.pop(k) for k in list(changes) if k in Limits.__dataclass_fields__}
    registry = CollectorRegistry()
    keys = SecuritySection(api_keys=changes.pop("api_keys", ()))
    leader = Leader(
        role=role,
        model="null",
        dispatcher=dispatcher,
        text=TextPool(ByteText()),
        grammars=GrammarCheck("null", 257, (EOS,)),
        limits=replace(Limits(max_model_len=1000, vocab=257), **of_limits),
        key=KEY,
        registry=registry,
        keydoor=KeyDoor(keys, registry, lambda: 0.0, (), PATHS),
        status=lambda: {"role": role, "state": "ready"},
        why_not_ready=lambda: rig.not_ready,
        stalled_s=lambda: rig.stalled,
        wall=lambda: WALL,
    )
    for name, value in changes.items():
        setattr(leader, name, value)
    runner, port = await listen(make_app(leader), "127.0.0.1", 0, grace_s=1.0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            rig = Rig(leader, worker, client)
            rig.url = f"http://127.0.0.1:{port}"
            leader.served, leader.drain = rig.count_served, rig.count_drain
            yield rig
    finally:
        await runner.cleanup()


def prompt_of(submit: Submit) -> list[int]:
    return unpack(submit.tokens)


async def events_of(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """(event, data) of all server-sent events until the stream ends."""
    found, event = list[tuple[str, str]](), "message"
    for line in (await answer.text()).split("\n"):
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            found.append((event, value))
            event = "message"
    return found


async def error_of(answer: aiohttp.ClientResponse) -> tuple[int, str, str]:
    error = (await answer.json())["error"]
    assert error.keys() == {"type", "code", "message", "request_id", "stage"}
    assert error["request_id"] == answer.headers["x-request-id"]
    return answer.status, error["code"], error["message"]
