"""The admin listener: members come and go, requests are told of, and nobody without the token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest

from pdrt.cli import router_settings
from pdrt.control.admin import Admin
from pdrt.control.ledger import KEPT
from pdrt.control.wire.server import Server
from pdrt.errors import ConfigError
from pdrt.telemetry import LogLevel
from tests.control.fake_leader import FakeLeader, Json, after, good, status
from tests.control.router_rig import KEY, Got, Rig, _got, rig, until

BEARER = {"authorization": f"Bearer {KEY.bearer()}"}
OPEN = {"registration": True}


class Desk:
    """A rig's router with its admin listener, and a client that has the token."""

    def __init__(self, found: Rig, url: str, level: LogLevel) -> None:
        self.rig, self.url, self.level = found, url, level

    async def ask(self, method: str, path: str, body: Json | None = None, **headers: str) -> Got:
        sent = {**BEARER, **headers}
        async with self.rig.session.request(
            method, self.url + path, json=body, headers=sent
        ) as response:
            return await _got(response)

    async def register(self, leader: FakeLeader, **more: object) -> Got:
        target = leader.target
        body = {"role": leader.role, "http": target.http, "instance_epoch": 1, **more}
        if leader.role == "prefill":
            body.setdefault("bootstrap", target.bootstrap)
        return await self.ask("POST", "/internal/register", body)

    async def members(self) -> dict[str, Json]:
        told = await self.ask("GET", "/admin/members")
        return {each["name"]: each for each in told.json["members"]}


@asynccontextmanager
async def desk(prefill: int = 1, decode: int = 1, **config: object) -> AsyncIterator[Desk]:
    async with rig(prefill, decode, **config) as r:  # type: ignore[arg-type]
        level = LogLevel()
        server = Server(
            Admin(r.router, r.router.roster, KEY, level),
            "admin",
            max_body_bytes=1 << 16,
            max_head_bytes=1 << 14,
            slow_reader_s=30.0,
        )
        listening = socket.create_server(("127.0.0.1", 0))
        await server.start(listening)
        try:
            yield Desk(r, f"http://127.0.0.1:{listening.getsockname()[1]}", level)
        finally:
            await server.close(0.01)


@asynccontextmanager
async def newcomers(*roles: str) -> AsyncIterator[list[FakeLeader]]:
    leaders = [FakeLeader(role, KEY) for role in roles]
    try:
        for each in leaders:
            await each.start()
        yield leaders
    finally:
        for each in leaders:
            await each.stop()


PATHS = [
    ("GET", "/admin/members"),
    ("POST", "/admin/members"),
    ("DELETE", "/admin/members/x"),
    ("POST", "/admin/members/x/drain"),
    ("POST", "/admin/members/x/undrain"),
    ("POST", "/admin/drain"),
    ("GET", "/admin/requests"),
    ("GET", "/admin/requests/x"),
    ("GET", "/admin/log-level"),
    ("POST", "/admin/log-level"),
    ("POST", "/internal/register"),
]


async def test_every_path_needs_the_clusters_token() -> None:
    async with desk() as d:
        for method, path in PATHS:
            got = await d.ask(method, path, authorization="Bearer wrong")
            assert (got.status, got.error["code"]) == (401, "unauthorized"), path
        assert not d.rig.router.draining


async def test_nothing_of_it_is_on_the_port_of_clients() -> None:
    async with desk() as d:
        for method, path in PATHS:
            async with d.rig.session.request(method, d.rig.url + path, headers=BEARER) as answer:
                assert answer.status == 404, path
        d.rig.router.admin_url = d.url
        async with d.rig.session.post(d.rig.url + "/admin/drain") as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["code"]) == (404, "not_found")
        assert d.url in body["error"]["message"]


async def test_instances_register_serve_and_leave_without_a_restart() -> None:
    start = desk(0, 0, wait=False, policy=OPEN)
    async with start as d, newcomers("prefill", "decode") as leaders:
        r = d.rig
        assert (await r.send()).error["code"] == "no_decode"
        for leader in leaders:
            got = await d.register(leader)
            assert got.json == {"status": "ok", "lease_s": 10.0}
        await until(lambda: r.router.fleet.is_ready)
        assert (await r.send()).status == 200
        assert (await d.members())[f"decode 127.0.0.1:{leaders[1].port}"]["lease_left_s"] == 10.0
        assert (await d.register(leaders[1], state="leaving")).status == 200
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, "no_decode")
        assert (await d.register(leaders[1], instance_epoch=2)).status == 200
        await until(lambda: r.router.fleet.is_ready)
        assert (await r.send()).status == 200


async def test_a_lapsed_lease_removes_who_registered_and_its_stream_goes_on() -> None:
    gate = asyncio.Event()
    async with desk(2, 1, policy=OPEN) as d, newcomers("decode") as (late,):
        r = d.rig
        assert (await d.register(late)).status == 200
        await until(lambda: len(r.router.fleet.decode) == 2)
        await until(lambda: all(pair.trust == "passed" for pair in r.router.fleet.pairs))
        one = r.router.fleet.decode[1]
        r.decode[0].plays.append(after(gate, good({"output": "x"})))
        late.plays.append(after(gate, good({"output": "late"})))
        asked = [r.sending(), r.sending()]
        await late.nth(1)
        r.time.now += 10.0
        await until(lambda: one not in r.router.fleet.instances)
        assert len(r.router.fleet.pairs) == 2
        await until(lambda: one in r.router.fleet.leaving)
        gate.set()
        answers = [await each for each in asked]
        assert sorted(each.json["output"] for each in answers) == ["late", "x"]
        await until(lambda: one not in r.router.fleet.leaving)
        metrics = (await r.get("/metrics")).body.decode()
        assert one.name not in metrics
        assert r.router.fleet.decode[0].name in metrics


async def test_a_stream_on_one_that_left_is_told_when_it_dies() -> None:
    async with desk(1, 1, policy=OPEN) as d, newcomers("decode") as (late,):
        r = d.rig
        assert (await d.register(late)).status == 200
        await until(lambda: all(pair.trust == "passed" for pair in r.router.fleet.pairs))
        await until(lambda: len(r.router.fleet.pairs) == 2)
        one = r.router.fleet.decode[1]
        r.router.fleet.decode[0].set_drained(True)
        late.plays.append(after(asyncio.Event(), good({})))
        asked = r.sending()
        await late.nth(1)
        await d.register(late, state="leaving")
        assert one not in r.router.fleet.instances
        r.router.fleet.decode[0].set_drained(False)
        await late.stop()
        one.nudged.set()
        got = await asked
        assert (got.status, len(r.decode[0].seen)) == (200, 1)  # moved to the other one


async def test_registration_is_refused_where_it_is_off_and_for_listed_ones_of_another_role() -> (
    None
):
    async with desk() as d, newcomers("decode") as (late,):
        got = await d.register(late)
        assert (got.status, got.error["code"]) == (404, "not_found")
        assert "[policy] registration" in got.error["message"]
    async with desk(policy=OPEN) as d:
        assert (await d.register(d.rig.decode[0])).status == 200
        assert len(d.rig.router.fleet.decode) == 1
        got = await d.register(d.rig.decode[0], role="hybrid")
        assert (got.status, got.error["code"]) == (409, "conflict")
        got = await d.register(d.rig.decode[0], http="not an address")
        assert (got.status, got.error["code"]) == (400, "bad_request")
        got = await d.register(d.rig.decode[0], instance_epoch="x")
        assert "instance_epoch" in got.error["message"]


async def test_a_registration_with_an_address_that_is_none_leaves_nothing_behind() -> None:
    async with desk(policy=OPEN) as d, newcomers("prefill") as (late,):
        for epoch in (1, 1, 2):
            got = await d.register(late, bootstrap="garbage", instance_epoch=epoch)
            assert (got.status, got.error["code"]) == (400, "bad_request")
            assert "bootstrap = 'garbage'" in got.error["message"]
        assert len(d.rig.router.fleet.prefill) == 1
        assert (await d.register(late, instance_epoch=1)).status == 200
        got = await d.register(late, bootstrap="garbage", instance_epoch=2)
        assert got.status == 400
        assert (await d.register(late, state="leaving")).status == 200
        assert len(d.rig.router.fleet.prefill) == 1


async def test_a_listed_one_that_says_goodbye_gets_nothing_new_until_it_is_back() -> None:
    async with desk(1, 2, policy=OPEN) as d:
        r = d.rig
        leader, one = r.decode[0], r.instance(r.decode[0])
        leader.status_play = after(asyncio.Event(), good({}))
        assert (await d.register(leader, state="leaving")).status == 200
        assert one in r.router.fleet.instances
        for _ in range(3):
            assert (await r.send()).status == 200
        assert not leader.seen
        assert "leaving" in one.why_not


async def test_who_has_left_is_neither_watched_nor_tried_any_more() -> None:
    async with desk(policy=OPEN) as d, newcomers("decode") as (late,):
        late.canaries.extend(status(503, "no", "peer_lost") for _ in range(9))
        await d.register(late)
        await until(lambda: len(late.seen_canaries) == 1)
        await until(lambda: bool(d.rig.time.pauses))
        await d.ask("DELETE", f"/admin/members/{late.target.http}")
        polled = late.polled
        d.rig.time.wake()
        await d.rig.send()
        assert (len(late.seen_canaries), late.polled) == (1, polled)
        assert not d.rig.router.fleet.leaving


async def test_operators_join_and_remove_members() -> None:
    async with desk() as d, newcomers("decode") as (late,):
        got = await d.ask("POST", "/admin/members", {"role": "decode", "http": late.target.http})
        assert (got.status, got.json["member"]["role"]) == (201, "decode")
        name = got.json["member"]["name"]
        await until(lambda: d.rig.router.fleet.decode[1].is_routable)
        again = await d.ask("POST", "/admin/members", {"role": "decode", "http": late.target.http})
        assert (again.status, again.error["code"]) == (409, "conflict")
        bad = await d.ask("POST", "/admin/members", {"role": "decode", "http": "x", "y": 1})
        assert bad.status == 400
        assert (await d.ask("DELETE", f"/admin/members/{name}")).status == 200
        assert len(d.rig.router.fleet.decode) == 1
        gone = await d.ask("DELETE", f"/admin/members/{late.target.http}")
        assert (gone.status, gone.error["code"]) == (404, "not_found")


async def test_a_drained_member_gets_nothing_new_and_finishes_what_it_has() -> None:
    gate = asyncio.Event()
    async with desk(1, 2) as d:
        r = d.rig
        where = r.decode[0].target.http
        r.decode[0].plays.append(after(gate, good({"output": "slow"})))
        asked = r.sending()
        await r.decode[0].nth(1)
        got = await d.ask("POST", f"/admin/members/{where}/drain")
        assert (got.json["member"]["drained"], got.json["member"]["drained_and_idle"]) == (
            True,
            False,
        )
        for _ in range(3):
            assert (await r.send()).status == 200
        assert len(r.decode[0].seen) == 1
        gate.set()
        assert (await asked).json["output"] == "slow"
        await r.at_rest()
        assert (await d.members())[f"decode {where}"]["drained_and_idle"] is True
        await d.ask("POST", f"/admin/members/{where}/undrain")
        for _ in range(2):
            assert (await r.send()).status == 200
        assert len(r.decode[0].seen) == 2


async def test_the_ledger_tells_who_was_chosen_why_and_what_went_wrong() -> None:
    async with desk(2, 2) as d:
        r = d.rig
        r.decode[0].plays.append(status(503, "no more", "peer_lost"))
        got = await r.send(headers={"x-request-id": "mine"})
        assert got.status == 200
        told = (await d.ask("GET", "/admin/requests/mine")).json
        assert (told["state"], told["status"], told["tries"]) == ("served", 200, 2)
        assert told["decode"] == r.instance(r.decode[1]).name
        (setback,) = told["setbacks"]
        assert (setback["culprit"], setback["code"]) == (r.instance(r.decode[0]).name, "peer_lost")
        because = told["because"]["prefill"]
        assert because["policy"] == "least_loaded"
        assert {each["name"] for each in because["candidates"]} == {
            r.instance(leader).name for leader in r.prefill
        }
        assert told["story"]
        lines = (await d.ask("GET", "/admin/requests")).json["requests"]
        assert [line["request_id"] for line in lines] == ["mine"]


@pytest.mark.parametrize("name", ["a/b", "a//b", "/", "x:y", "p+q=r@s"])
async def test_a_request_is_found_by_whatever_id_it_came_with(name: str) -> None:
    async with desk() as d:
        assert (await d.rig.send(headers={"x-request-id": name})).status == 200
        for written in (name, quote(name, safe="")):
            told = await d.ask("GET", f"/admin/requests/{written}")
            assert told.json["request_id"] == name
        assert (await d.ask("GET", f"/admin/requests/{name}/drain")).status == 404


async def test_running_requests_are_told_of_and_failed_ones_keep_their_error() -> None:
    gate = asyncio.Event()
    async with desk() as d:
        r = d.rig
        r.decode[0].plays.append(after(gate, good({})))
        asked = asyncio.create_task(r.send(headers={"x-request-id": "slow"}))
        await r.decode[0].nth(1)
        r.time.now += 2.5
        told = (await d.ask("GET", "/admin/requests/slow")).json
        assert told["state"] in ("open", "awaiting")
        assert (told["ms"], told["status"]) == (2500.0, None)
        gate.set()
        await asked
        r.decode[0].plays.append(status(400, "bad field", "bad_request"))
        await r.send(headers={"x-request-id": "bad"})
        told = (await d.ask("GET", "/admin/requests/bad")).json
        assert (told["state"], told["status"], told["error"]) == ("failed", 400, "bad_request")
        assert "bad field" in told["message"]
        assert (await d.ask("GET", "/admin/requests/none")).status == 404


async def test_the_ledger_is_bounded_and_keeps_no_prompt() -> None:
    async with desk() as d:
        await d.rig.send(prompt="a secret " * 100)
        ledger = d.rig.router.ledger
        (entry,) = ledger.ended
        assert entry.choice.because is not None
        assert entry.choice.because.ask.prompt is None
        assert ledger.ended.maxlen == KEPT == 1024
        assert not ledger.running


async def test_draining_and_the_level_of_the_log() -> None:
    async with desk() as d:
        assert (await d.ask("GET", "/admin/log-level")).json == {"level": "info"}
        assert (await d.ask("POST", "/admin/log-level", {"level": "error"})).status == 200
        assert d.level.name == "error"
        bad = await d.ask("POST", "/admin/log-level", {"level": "loud"})
        assert (bad.status, d.level.name) == (400, "error")
        got = await d.ask("POST", "/admin/drain")
        assert (got.status, got.json["status"]) == (200, "draining")
        assert d.rig.router.drain_asked.is_set()
        assert (await d.rig.send()).error["code"] == "draining"


def test_a_router_without_targets_needs_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="PDRT_POLICY_REGISTRATION"):
        router_settings(None, {})
    monkeypatch.setenv("PDRT_POLICY_REGISTRATION", "true")
    monkeypatch.setenv("PDRT_SECURITY_KEY", KEY.secret.decode())
    assert router_settings(None, {}).policy.registration


@pytest.mark.parametrize(("level", "said"), [("info", True), ("warning", False)])
def test_a_changed_level_holds_at_once(
    level: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    import structlog

    from pdrt import telemetry

    before = structlog.get_config()
    try:
        threshold = telemetry.configure("error", "json")
        log = structlog.get_logger("x")
        log.info("first")
        threshold.name = level
        log.info("second")
        told = capsys.readouterr().err
        assert "first" not in told
        assert ("second" in told) is said
    finally:
        structlog.configure(**before)
