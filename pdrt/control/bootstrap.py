"""The bootstrap server: where a prefill instance's ranks are found, and nothing about transfers.

The promise: a route is given only while every expected rank holds a live lease; a rank's
place changes hands only for a newer epoch; whatever the bytes, the answer is a typed one.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Final, TypeVar

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from pdrt.config import is_loopback
from pdrt.control.http import (
    add_request_id,
    error_middleware,
    read_body,
    require_bearer,
)
from pdrt.errors import BadRequest, Conflict, NoPrefill
from pdrt.keys import ClusterKey
from pdrt.messages import (
    PROTOCOL,
    BootstrapHealth,
    Leased,
    QueryDpRanks,
    Rank,
    RankAddress,
    RegisterDpRank,
    RegisterRank,
    Route,
)

T = TypeVar("T")
STAGE: Final = "bootstrap"
MAX_BODY_BYTES: Final = 64 << 10
_SHOWN: Final = 8  # of many missing ranks or wrong fields
CALLER_HEADER: Final = "x-pdrt-peer"  # a leader that watches us says who it is
_LEASED: Final = TypeAdapter(Leased)
_HEALTH: Final = TypeAdapter(BootstrapHealth)
_ROUTE: Final = TypeAdapter(Route)
_REGISTER: Final = TypeAdapter(RegisterRank)
_REGISTER_ROOM: Final = TypeAdapter(RegisterDpRank)
_QUERY_ROOMS: Final = TypeAdapter(QueryDpRanks)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the instance, from its configuration."""

    tp: int = 1
    cp: int = 1
    dp: int = 1

    def ranks(self) -> Iterable[str]:
        return (
            f"{dp},{cp},{tp}" for dp, cp, tp in product(*map(range, (self.dp, self.cp, self.tp)))
        )


@dataclass(frozen=True, slots=True)
class Limits:
    lease_s: float = 10.0
    room_ttl_s: float = 600.0
    max_rooms: int = 65536


@dataclass(slots=True)
class Registration:
    """The last that was accepted for one rank; kept after its lease, for its epoch."""

    said: RegisterRank
    until: float
    withdrawn: bool = False


@dataclass(slots=True)
class BootstrapState:
    """Plain data with pure methods; the caller brings the time.

    `epoch` is the leader's own, from the same rising clock as its ranks' epochs; `host` is
    where peers reach this server.
    """

    sizes: Sizes
    epoch: int
    host: str = "127.0.0.1"
    limits: Limits = field(default_factory=Limits)
    status: str = "ok"
    http: str = ""  # where the leader's API is reached
    rank_table: dict[str, Registration] = field(default_factory=dict)
    room_to_dp_rank: OrderedDict[int, tuple[int, float]] = field(default_factory=OrderedDict)
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def instance_epoch(self) -> int:
        """Rises whenever the leader or one of its ranks begins a new life."""
        return max([self.epoch, *(entry.said.instance_epoch for entry in self.rank_table.values())])

    # Ranks.

    def register(self, said: RegisterRank, now: float) -> float:
        """Take or renew a lease; returns its length.

        Raises BadRequest for what cannot be right, Conflict for what disagrees with the
        configuration, with a live sibling, or with a newer life of the same rank.
        """
        self._check_sizes(said)
        self._check_address(said)
        known = self.rank_table.get(str(said.rank))
        if known is not None:
            _check_epoch(said, known)
        self._check_fingerprint(said, now)
        self.counters["renewed" if known and known.said == said else "registered"] += 1
        self.rank_table[str(said.rank)] = Registration(said, now + self.limits.lease_s)
        return self.limits.lease_s

    def withdraw(self, rank: Rank) -> None:
        """The rank's process is dead: its lease ends, and only a newer epoch may follow."""
        if entry := self.rank_table.get(str(rank)):
            entry.withdrawn = True

    def missing(self, now: float) -> list[str]:
        """The ranks that keep the instance from being ready, each with the reason."""
        return [
            f"{rank} ({self._absence(rank, now)})"
            for rank in self.sizes.ranks()
            if not self._is_live(rank, now)
        ]

    def is_ready(self, now: float) -> bool:
        return all(self._is_live(rank, now) for rank in self.sizes.ranks())

    def route(self, now: float) -> Route:
        """Where every rank is. Raises NoPrefill, naming who is missing, until all are there."""
        if missing := self.missing(now):
            raise NoPrefill(f"prefill ranks are missing: {', '.join(missing[:_SHOWN])}")
        entries = {rank: self.rank_table[rank].said for rank in self.sizes.ranks()}
        layout = next(iter(entries.values())).fingerprint
        return Route(
            attn_tp_size=self.sizes.tp,
            attn_cp_size=self.sizes.cp,
            dp_size=self.sizes.dp,
            block_size=layout.block_size,
            kv_cache_dtype=layout.dtype,
            fingerprint=layout,
            instance_epoch=self.instance_epoch,
            ranks={rank: _address(said) for rank, said in entries.items()},
        )

    def health(self, now: float) -> BootstrapHealth:
        missing = self.missing(now)
        return BootstrapHealth(
            status=self.status,
            ready=not missing,
            instance_epoch=self.instance_epoch,
            missing=tuple(missing[:_SHOWN]),
            http=self.http,
        )

    def _is_live(self, rank: str, now: float) -> bool:
        entry = self.rank_table.get(rank)
        return entry is not None and not entry.withdrawn and now < entry.until

    def _absence(self, rank: str, now: float) -> str:
        entry = self.rank_table.get(rank)
        if entry is None:
            return "never registered"
        if entry.withdrawn:
            return "its process ended"
        return f"lease lapsed {now - entry.until:.1f} s ago"

    def _check_sizes(self, said: RegisterRank) -> None:
        if said.protocol_version != PROTOCOL:
            raise Conflict(f"protocol_version: {PROTOCOL} here, {said.protocol_version} there")
        ours = (self.sizes.tp, self.sizes.cp, self.sizes.dp)
        theirs = (said.attn_tp_size, said.attn_cp_size, said.dp_size)
        if ours != theirs:
            raise Conflict(f"sizes (tp, cp, dp): {ours} here, {theirs} there")
        if not (said.rank.tp < ours[0] and said.rank.cp < ours[1] and said.rank.dp < ours[2]):
            raise BadRequest(
                f"rank: {said.rank} (dp, cp, tp) is outside the sizes (tp, cp, dp) {ours}"
            )

    def _check_address(self, said: RegisterRank) -> None:
        try:
            address = ipaddress.ip_address(said.rank_ip)
        except ValueError:
            raise BadRequest(f"rank_ip: {said.rank_ip!r} is no IP address") from None
        if address.is_unspecified or address.is_multicast:
            raise BadRequest(f"rank_ip: {said.rank_ip} is no address that peers can reach")
        if address.is_loopback and not is_loopback(self.host):
            raise BadRequest(
                f"rank_ip: {said.rank_ip} is reached from its own machine only, but the leader is"
                f" at {self.host}; set [parallel] local_ip on that node"
            )

    def _check_fingerprint(self, said: RegisterRank, now: float) -> None:
        for rank, entry in self.rank_table.items():
            if rank == str(said.rank) or not self._is_live(rank, now):
                continue
            if differences := entry.said.fingerprint.differences(said.fingerprint):
                raise Conflict(f"fingerprint differs from rank {rank}'s: {'; '.join(differences)}")

    # Rooms.

    def register_room(self, room: int, dp_rank: int, now: float) -> None:
        """Remember which dp rank computes a room; the oldest makes place for one too many."""
        if dp_rank >= self.sizes.dp:
            raise BadRequest(f"dp_rank: {dp_rank} must be below dp = {self.sizes.dp}")
        self._expire_rooms(now)
        self.room_to_dp_rank.pop(room, None)  # so that the order stays that of the expiries
        if len(self.room_to_dp_rank) >= self.limits.max_rooms:
            self.room_to_dp_rank.popitem(last=False)
            self.counters["rooms_evicted"] += 1
        self.room_to_dp_rank[room] = dp_rank, now + self.limits.room_ttl_s

    def dp_ranks(self, rooms: Iterable[int], now: float) -> dict[str, int]:
        """The dp rank of each room, -1 where it is not known."""
        self._expire_rooms(now)
        return {str(room): self.room_to_dp_rank.get(room, (-1, 0.0))[0] for room in rooms}

    def _expire_rooms(self, now: float) -> None:
        while self.room_to_dp_rank:
            room = next(iter(self.room_to_dp_rank))
            if now < self.room_to_dp_rank[room][1]:
                return
            del self.room_to_dp_rank[room]
            self.counters["rooms_expired"] += 1


def _check_epoch(said: RegisterRank, entry: Registration) -> None:
    known = entry.said
    if said.instance_epoch < known.instance_epoch:
        raise Conflict(
            f"instance_epoch: {said.instance_epoch} is older than {known.instance_epoch}"
            f" of rank {said.rank} at {known.rank_ip} port {known.rank_port}"
        )
    if said.instance_epoch == known.instance_epoch and (said != known or entry.withdrawn):
        raise Conflict(
            f"instance_epoch: rank {said.rank} of epoch {known.instance_epoch} is at"
            f" {known.rank_ip} port {known.rank_port}"
            f"{' and has ended' if entry.withdrawn else ''}; anything else needs a newer epoch"
        )


def _address(said: RegisterRank) -> RankAddress:
    return RankAddress(
        rank_ip=said.rank_ip,
        rank_port=said.rank_port,
        process=said.process,
        instance_epoch=said.instance_epoch,
    )


def parse(adapter: TypeAdapter[T], body: bytes) -> T:
    """The value in a JSON body. Raises BadRequest that names each wrong field."""
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)[:_SHOWN]
        ]
        raise BadRequest("; ".join(wrong)) from error


def bootstrap_app(
    state: BootstrapState,
    key: ClusterKey | None,
    clock: Callable[[], float],
    heard: Callable[[str], None] = lambda _caller: None,
) -> web.Application:
    """The HTTP face of `state`; `heard` gets the name that a watching leader sent with its ping."""
    app = web.Application(middlewares=[error_middleware(STAGE), require_bearer(key)])

    async def register_rank(request: web.Request) -> web.Response:
        said = parse(_REGISTER, await read_body(request, MAX_BODY_BYTES))
        return _json(_LEASED, Leased(status="ok", lease_s=state.register(said, clock())))

    async def route(_request: web.Request) -> web.Response:
        return _json(_ROUTE, state.route(clock()))

    async def register_dp_rank(request: web.Request) -> web.Response:
        said = parse(_REGISTER_ROOM, await read_body(request, MAX_BODY_BYTES))
        state.register_room(said.bootstrap_room, said.dp_rank, clock())
        return web.json_response({"status": "ok"})

    async def query_dp_ranks(request: web.Request) -> web.Response:
        said = parse(_QUERY_ROOMS, await read_body(request, MAX_BODY_BYTES))
        return web.json_response(state.dp_ranks(said.bootstrap_rooms, clock()))

    async def health(request: web.Request) -> web.Response:
        if caller := request.headers.get(CALLER_HEADER):
            heard(caller)
        return _json(_HEALTH, state.health(clock()))

    app.router.add_put("/bootstrap/register_rank", register_rank)
    app.router.add_get("/bootstrap/route", route)
    app.router.add_post("/bootstrap/register_dp_rank", register_dp_rank)
    app.router.add_post("/bootstrap/query_dp_ranks", query_dp_ranks)
    app.router.add_get("/bootstrap/health", health)
    app.on_response_prepare.append(add_request_id)
    return app


def _json(adapter: TypeAdapter[T], value: T) -> web.Response:
    return web.Response(body=adapter.dump_json(value), content_type="application/json")
