"""The bootstrap server over HTTP: every endpoint, every refusal, and what hostile bytes get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pdrt.control.bootstrap import (
    CALLER_HEADER,
    MAX_BODY_BYTES,
    BootstrapState,
    Sizes,
    bootstrap_app,
    parse,
)
from pdrt.errors import BadRequest, Conflict
from pdrt.keys import ClusterKey
from pdrt.messages import QueryDpRanks, RegisterDpRank, RegisterRank
from tests.control.bootstrap_samples import registration
from tests.fake_time import FakeTime

KEY = ClusterKey.from_text("a key for these tests")
BEARER = {"authorization": f"Bearer {KEY.bearer()}"}
REGISTER = TypeAdapter(RegisterRank)
ENDPOINTS = [
    ("PUT", "register_rank"),
    ("GET", "route"),
    ("POST", "register_dp_rank"),
    ("POST", "query_dp_ranks"),
    ("GET", "health"),
]
BODIES = [(method, path) for method, path in ENDPOINTS if method != "GET"]


class Rig:
    """A bootstrap server on a real socket and somebody who calls it."""

    def __init__(self, server: TestServer, session: ClientSession, state: BootstrapState) -> None:
        self.server, self.session, self.state = server, session, state
        self.time: FakeTime
        self.callers: list[str] = []

    async def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] = BEARER
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        url = self.server.make_url(f"/bootstrap/{path}")
        async with self.session.request(method, url, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def register(self, **changes: Any) -> tuple[int, Any]:
        return await self.call("PUT", "register_rank", REGISTER.dump_json(registration(**changes)))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    time, state, callers = (
        FakeTime(),
        BootstrapState(Sizes(), 0, http="http://127.0.0.1:8001"),
        list[str](),
    )
    server = TestServer(bootstrap_app(state, KEY, time.clock, callers.append), host="127.0.0.1")
    async with server, ClientSession() as session:
        rig = Rig(server, session, state)
        rig.time, rig.callers = time, callers
        yield rig


async def test_a_registered_instance_has_a_route_until_its_lease_lapses(rig: Rig) -> None:
    status, answer = await rig.call("GET", "route")
    assert (status, answer["error"]["code"], answer["error"]["stage"]) == (
        503,
        "no_prefill",
        "bootstrap",
    )
    assert await rig.register() == (200, {"status": "ok", "lease_s": 10.0})
    status, route = await rig.call("GET", "route")
    assert status == 200
    assert route["ranks"]["0,0,0"]["rank_port"] == 5000
    assert route["instance_epoch"] == 1
    rig.time.now += 10
    status, answer = await rig.call("GET", "route")
    assert (status, "lease lapsed" in answer["error"]["message"]) == (503, True)


async def test_rooms_are_registered_and_asked_for(rig: Rig) -> None:
    room = (1 << 63) - 1
    body = {"bootstrap_room": room, "dp_rank": 0}
    assert await rig.call("POST", "register_dp_rank", body) == (200, {"status": "ok"})
    answer = await rig.call("POST", "query_dp_ranks", {"bootstrap_rooms": [room, 3]})
    assert answer == (200, {str(room): 0, "3": -1})


async def test_health_says_ready_or_who_is_missing(rig: Rig) -> None:
    status, health = await rig.call("GET", "health")
    assert (status, health["ready"], health["missing"]) == (
        200,
        False,
        ["0,0,0 (never registered)"],
    )
    await rig.register(epoch=9)
    status, health = await rig.call("GET", "health")
    assert health == {
        "status": "ok",
        "ready": True,
        "instance_epoch": 9,
        "missing": [],
        "http": "http://127.0.0.1:8001",
    }


async def test_a_ping_tells_who_watches_us(rig: Rig) -> None:
    await rig.call("GET", "health")
    await rig.call("GET", "health", headers={**BEARER, CALLER_HEADER: "127.0.0.2:8100 5"})
    assert rig.callers == ["127.0.0.2:8100 5"]


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY.bearer()[:-1]}"},
        {"authorization": KEY.bearer()},
        {"authorization": f"bearer {KEY.bearer()} x"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer Zürich"},
    ],
)
async def test_the_unsigned_get_401_and_change_nothing(
    rig: Rig, method: str, path: str, headers: dict[str, str]
) -> None:
    """CASES 107: an unsigned registration is refused before it is read."""
    body = REGISTER.dump_json(registration()) if method == "PUT" else b"{"
    status, answer = await rig.call(method, path, body if method != "GET" else None, headers)
    assert (status, answer["error"]["code"]) == (401, "unauthorized")
    assert rig.state.rank_table == {}


async def test_a_forged_place_is_refused_and_the_route_stays(rig: Rig) -> None:
    """CASES 107: even a member of the cluster cannot re-route without a newer epoch."""
    await rig.register(epoch=5)
    status, answer = await rig.register(epoch=5, rank_port=6666)
    assert (status, answer["error"]["code"]) == (409, "conflict")
    status, answer = await rig.register(epoch=4, rank_port=6666)
    assert (status, answer["error"]["code"]) == (409, "conflict")
    _, route = await rig.call("GET", "route")
    assert route["ranks"]["0,0,0"]["rank_port"] == 5000


GOOD = json.loads(REGISTER.dump_json(registration()))
WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"rank_port": 0}, "rank_port"),
    ({"rank_port": 65536}, "rank_port"),
    ({"rank_port": "5000"}, "rank_port"),
    ({"rank_port": True}, "rank_port"),
    ({"rank_port": None}, "rank_port"),
    ({"rank_ip": 7}, "rank_ip"),
    ({"rank_ip": "1" * 513}, "rank_ip"),
    ({"rank_ip": "host"}, "rank_ip"),
    ({"attn_tp_size": 0}, "attn_tp_size"),
    ({"instance_epoch": -1}, "instance_epoch"),
    ({"instance_epoch": 1 << 63}, "instance_epoch"),
    ({"instance_epoch": 1.5}, "instance_epoch"),
    ({"fingerprint": {}}, "fingerprint.block_size"),
    ({"fingerprint": GOOD["fingerprint"] | {"dtype": "float8"}}, "fingerprint.dtype"),
    ({"fingerprint": []}, "fingerprint"),
    ({"rank": {"dp": -1}}, "rank.dp"),
    ({"process": {"host": "h", "pid": 0, "started": 0}}, "process.pid"),
    ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
]


@pytest.mark.parametrize(("changes", "field"), WRONG_FIELDS)
async def test_a_malformed_registration_gets_400_with_the_field_named(
    rig: Rig, changes: dict[str, Any], field: str
) -> None:
    status, answer = await rig.call("PUT", "register_rank", GOOD | changes)
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert field in answer["error"]["message"]
    assert rig.state.rank_table == {}


@pytest.mark.parametrize("field", [name for name in GOOD if name != "protocol_version"])
async def test_a_missing_field_is_named(rig: Rig, field: str) -> None:
    body = {name: value for name, value in GOOD.items() if name != field}
    status, answer = await rig.call("PUT", "register_rank", body)
    assert (status, field in answer["error"]["message"]) == (400, True)


async def test_a_field_of_a_later_version_is_ignored(rig: Rig) -> None:
    status, _ = await rig.call("PUT", "register_rank", GOOD | {"colour": "blue"})
    assert status == 200


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


JUNK = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe\x00",
    b"[" * 50_000,
    b'{"a":' * 10_000,
    b"9" * 60_000,
    b'{"bootstrap_room": NaN, "dp_rank": 0}',
    b'{"bootstrap_room": 1e400, "dp_rank": 0}',
    b'{"bootstrap_room": "\\ud800", "dp_rank": 0, "bootstrap_rooms": ["\\ud800"]}',
    b'{"bootstrap_room": -1, "dp_rank": 0, "bootstrap_rooms": [-1]}',
    b'{"bootstrap_room": %d, "dp_rank": 0, "bootstrap_rooms": [%d]}' % (1 << 63, 1 << 63),
    b'{"bootstrap_room": 1, "dp_rank": -1, "bootstrap_rooms": 1}',
    b'{"bootstrap_room": 1, "dp_rank": 9, "bootstrap_rooms": {}}',
    json.dumps({"bootstrap_rooms": list(range(1025))}).encode(),
    pickle.dumps(Bomb()),
]


@pytest.mark.parametrize(("method", "path"), BODIES)
@pytest.mark.parametrize("body", JUNK, ids=range(len(JUNK)))
async def test_junk_gets_400_and_the_server_goes_on(
    rig: Rig, method: str, path: str, body: bytes
) -> None:
    status, answer = await rig.call(method, path, body)
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert len(answer["error"]["message"]) < 2000
    assert (await rig.call("GET", "health"))[0] == 200


@pytest.mark.parametrize(("method", "path"), BODIES)
async def test_a_body_over_the_limit_gets_413(rig: Rig, method: str, path: str) -> None:
    status, answer = await rig.call(method, path, b" " * (MAX_BODY_BYTES + 1))
    assert (status, answer["error"]["code"]) == (413, "too_large")


async def test_other_paths_and_methods_get_typed_errors(rig: Rig) -> None:
    status, answer = await rig.call("GET", "nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer = await rig.call("DELETE", "route")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00" * 64,
        b"\x16\x03\x01\x02\x00\x01\x00" * 9,
        pickle.dumps(Bomb()),
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
async def test_what_is_no_http_does_not_hurt_the_server(rig: Rig, frame: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.write(frame)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer == b"" or answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert (await rig.call("GET", "health"))[0] == 200


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
NEARLY = st.dictionaries(st.sampled_from(list(GOOD)), ANYTHING, max_size=4).map(lambda d: GOOD | d)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300) | ANYTHING.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_a_message_or_a_bad_request(body: bytes) -> None:
    for kind in (RegisterRank, RegisterDpRank, QueryDpRanks):
        with contextlib.suppress(BadRequest):
            assert isinstance(parse(TypeAdapter(kind), body), kind)


@settings(max_examples=100, deadline=None)
@given(NEARLY)
def test_a_registration_with_any_fields_is_taken_or_refused(body: dict[str, Any]) -> None:
    state = BootstrapState(Sizes(), epoch=0)
    with contextlib.suppress(BadRequest, Conflict):
        state.register(parse(REGISTER, json.dumps(body).encode()), 0)
        assert state.route(0).ranks["0,0,0"].rank_ip
