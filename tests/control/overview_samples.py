"""Clusters as the router would know them, made of plain data: for the overview and who shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sin
from random import Random

from pdrt.config import Role, Target
from pdrt.control.flow import SECONDS
from pdrt.control.http import Json
from pdrt.control.instances import Instance, Status, read_status
from pdrt.control.legs import State
from pdrt.control.overview import Facts, Running
from pdrt.control.pairs import CanaryPassed, CanaryStarted, Faulted, Pair, Trust, feed
from pdrt.control.screen import Screen
from pdrt.errors import Overloaded, PdrtError, PeerLost, TransferFailed

NOW = 1_800_000_000.0
STATES = (State.OPEN, State.AWAITING, State.STREAMING, State.STREAMING, State.JOINING)


class Nobody:
    """Listens to an instance and does not care."""

    def renewed(self, instance: Instance) -> None: ...

    def faulted(self, instance: Instance) -> None: ...

    def changed(self) -> None: ...

    def serves(self, instance: Instance) -> None: ...

    def rested(self, instance: Instance) -> None: ...


def told(
    role: Role,
    number: int,
    *,
    kv: float = 0.3,
    second: float = 0.0,
    work: float = 0.0,
    **more: object,
) -> Status:
    """What a busy leader says of itself; `work` is what it has done."""
    host = f"127.0.0.{number + 2}"
    ways = {f"tcp://127.0.0.{n + 2}:7000#1.1": "shm, 5.32 GB/s" for n in range(8)}
    return read_status(
        {
            "role": role,
            "state": "ready",
            "model": "SmolLM2-135M-Instruct",
            "instance_epoch": 1,
            "load": {
                "running": 3 + number % 5,
                "waiting": number % 3,
                "blocks_used": int(4096 * kv),
                "blocks_total": 4096,
            },
            "totals": {
                "at": second,
                "tokens_out": 512.0 * work if role != "prefill" else 0,
                "prompt_tokens_computed": 3100.0 * work if role != "decode" else 0,
                "sent_bytes": 2.1e8 * work if role == "prefill" else 0,
                "transfers": 4.0 * work,
                "retractions": number,
            },
            "workers": [
                {
                    "rank": "0,0,0",
                    "state": "ready",
                    "endpoint": f"tcp://{host}:7000",
                    "transports": ways if role == "decode" else {},
                }
            ],
            **more,
        }
    )


@dataclass
class Cluster:
    """`view` is what /overview would answer."""

    prefill: list[Instance] = field(default_factory=list)
    decode: list[Instance] = field(default_factory=list)
    hybrid: list[Instance] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    requests: list[Running] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.screen = Screen(lambda: self.now, lambda: NOW + self.now)

    @property
    def instances(self) -> Sequence[Instance]:
        return (*self.prefill, *self.decode, *self.hybrid)

    def facts(self) -> Facts:
        is_ready = any(pair.trust is Trust.PASSED and pair.is_routable for pair in self.pairs)
        return Facts(
            pdrt="0.1.0",
            now=NOW + self.now,
            started_at=self.screen.started_at,
            is_ready=is_ready,
            reason="" if is_ready else "no healthy prefill instance: none is configured",
            is_draining=False,
            in_flight=len(self.requests),
            max_in_flight=4096,
        )

    def view(self, seconds: int = SECONDS) -> Json:
        return self.screen.overview(
            self.facts(), self.instances, self.pairs, self.requests, seconds
        )

    def fail(self, error: PdrtError, status: int, request_id: str) -> None:
        self.screen.failed(error, status, request_id)


def instance(role: Role, number: int, status: Status | None = None) -> Instance:
    found = Instance(role, Target(http=f"127.0.0.{number + 2}:{8001 + number}"), Nobody())
    found.heard(status or told(role, number))
    return found


def cluster(prefill: int = 1, decode: int = 1, hybrid: int = 0) -> Cluster:
    """All of it ready, each pair passed."""
    made = Cluster(
        [instance("prefill", n) for n in range(prefill)],
        [instance("decode", prefill + n) for n in range(decode)],
        [instance("hybrid", prefill + decode + n) for n in range(hybrid)],
    )
    made.pairs = [
        *(Pair(one, other) for one in made.prefill for other in made.decode),
        *(Pair(None, each) for each in made.hybrid),
    ]
    for pair in made.pairs:
        feed(pair, CanaryStarted())
        feed(pair, CanaryPassed())
        pair.reason, pair.took_s = "", 0.0234
    return made


def under_load(made: Cluster, seconds: int = 290, requests: int = 9) -> Cluster:
    """Minutes of traffic that is never twice the same."""
    chance, flow, work = Random(5), made.screen.flow, 0.0
    for second in range(seconds):
        wave = 1 + 0.5 * sin(second / 23)
        for _ in range(int(6 * wave)):
            made.now = second + chance.random() * 0.1
            flow.started(made.now)
            flow.first(made.now, chance.lognormvariate(-2.6, 0.4) * wave)
            flow.ended(made.now, is_failed=False)
        for _ in range(int(60 * wave)):
            flow.gap(made.now, chance.lognormvariate(-4.2, 0.35) * wave)
        work += wave
        for number, each in enumerate(made.instances):
            if each.status is not None:
                kv = min(0.98, 0.25 * wave + 0.07 * (number % 9))
                each.heard(told(each.role, number, kv=kv, second=float(second), work=work))
        made.now = second + 0.5
        made.screen.look(made.instances)
    made.now = float(seconds)
    for number in range(requests):
        made.requests.append(request(made, number, chance))
        for each in made.instances:
            if each.name in (made.requests[-1].prefill, made.requests[-1].decode):
                hold(each, 1)
    return made


def request(made: Cluster, number: int, chance: Random) -> Running:
    state = STATES[number % len(STATES)]
    is_streaming = state is State.STREAMING
    prefill = made.prefill[number % len(made.prefill)].name if made.prefill else None
    serves = made.decode or made.hybrid
    return Running(
        request_id=f"{number:04x}{chance.getrandbits(80):020x}",
        path=("/v1/chat/completions", "/generate")[number % 2],
        state=state,
        prefill=prefill,
        decode=serves[number % len(serves)].name,
        age_s=chance.uniform(0.05, 12),
        first_s=chance.uniform(0.05, 0.3) if is_streaming else None,
        is_stream=True,
        pieces=chance.randrange(1, 400) if is_streaming else 0,
        tries=1 if state is State.JOINING else 0,
    )


def hold(each: Instance, legs: int) -> None:
    """So many requests are with it."""
    for _ in range(legs):
        each.hold(420, 0, 1, lambda _error: None)


def with_a_dead_one() -> Cluster:
    """2P1D; a prefill instance is gone since a while."""
    made = cluster(prefill=2, decode=1)
    made.prefill[1].died("cannot connect: Connection refused")
    lost = PeerLost("prefill 127.0.0.3:8002 is gone: cannot connect: Connection refused")
    under_load(made, 200, 5)
    lost.stage = "prefill"
    made.fail(lost, 503, "9f3c1d0a77aa4410b2c3d4e5")
    return made


def with_errors() -> Cluster:
    """2P2D with a doubtful pair, one instance that starts, and what clients were told."""
    made = cluster(prefill=2, decode=2)
    made.prefill[1].heard(told("prefill", 1, state="loading", ready_ranks=[]))
    under_load(made, 290, 7)
    made.prefill[1].heard(told("prefill", 1, state="loading", ready_ranks=[]))
    feed(made.pairs[1], Faulted())
    made.pairs[1].reason = "a fault in decode 127.0.0.5:8004"
    moved = TransferFailed(
        "room 812: the slot of prefill rank 0,0,0 did not come within 10 s (tcp)"
    )
    moved.stage = "decode"
    for number in range(4):
        made.now += 0.3
        made.fail(moved, 503, f"c0ffee{number:018x}")
        made.fail(Overloaded("4096 requests are in flight, which is the limit"), 429, f"{number}")
    return made
