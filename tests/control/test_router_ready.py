"""Ready means that a real request went through: canaries, restarts, faults."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from pdrt.config import RouterConfig
from pdrt.control.instances import Instance, Status
from pdrt.control.router import make_router
from pdrt.control.upstream import Upstream
from pdrt.data.peer import Health
from pdrt.errors import ConfigError
from tests.control.fake_leader import Seen, die, good, hang, status, stream
from tests.control.router_rig import KEY, Rig, rig, until


def trust(r: Rig) -> list[str]:
    return [pair.trust for pair in r.router.fleet.pairs]


async def test_ready_only_once_a_pair_has_served_a_canary() -> None:
    """CASES 29: a router was healthy as soon as decode was up."""
    async with rig(wait=False) as r:
        r.decode[0].canaries.append(hang)
        await until(lambda: len(r.decode[0].seen_canaries) == 1)
        got = await r.get("/ready")
        assert (got.status, got.json["ready"]) == (503, False)
        assert "canary" in got.json["reason"]
        assert (await r.get("/health")).status == 200
        refused = await r.send()
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        assert not r.decode[0].seen


async def test_an_instance_that_still_loads_gets_no_canary() -> None:
    """CASES 29: warm-up timed out against a prefill instance that was loading."""
    async with rig(wait=False) as r:
        r.prefill[0].status["state"] = "loading"
        await until(lambda: r.instance(r.prefill[0]).status is not None)
        await until(lambda: r.instance(r.decode[0]).is_routable)
        got = await r.get("/ready")
        assert got.status == 503
        assert "loading" in got.json["reason"]
        assert not r.prefill[0].seen_canaries
        r.prefill[0].status["state"] = "ready"
        r.instance(r.prefill[0]).nudged.set()
        await r.ready()
        assert (await r.send()).status == 200


async def test_a_canary_is_a_small_real_request_over_both_legs() -> None:
    async with rig(prefill=2, decode=2, hybrid=1) as r:
        assert trust(r) == ["passed"] * 5
        assert [len(leader.seen_canaries) for leader in r.leaders] == [2, 2, 2, 2, 1]
        prefill, decode = r.prefill[0].seen_canaries[0], r.decode[0].seen_canaries[0]
        assert prefill.body["prompt"] == [1]
        assert decode.body["sampling_params"]["max_tokens"] == 2
        assert decode.headers["x-pdrt-canary"] == "1"
        assert not r.prefill[0].seen


@pytest.mark.parametrize(
    "fault",
    [die, status(500, "boom"), stream(b"data: 1\n\n", ending="die")],
    ids=["dies", "500", "breaks off"],
)
async def test_a_failed_canary_is_tried_again_until_it_passes(fault: object) -> None:
    async with rig(wait=False) as r:
        r.decode[0].canaries.append(fault)  # type: ignore[arg-type]
        await until(lambda: len(r.time.pauses) == 1)
        assert (await r.get("/ready")).status == 503
        r.time.wake()
        await r.ready()
        assert (await r.get("/ready")).status == 200


async def test_a_busy_instance_does_not_fail_its_canary() -> None:
    async with rig() as r:
        r.decode[0].status["last_fault_at"] = 1.0
        r.decode[0].canaries.append(status(429, "full", "overloaded"))
        await r.look()
        await until(lambda: len(r.time.pauses) == 1)
        assert trust(r) == ["doubtful"]
        assert (await r.send()).status == 200


async def test_after_a_fault_the_pair_is_tried_again_and_not_ready_until_it_passed() -> None:
    async with rig() as r:
        r.decode[0].status["last_fault_at"] = 17.5
        r.decode[0].canaries.append(hang)
        await r.look()
        await until(lambda: len(r.decode[0].seen_canaries) == 2)
        assert trust(r) == ["retrying"]
        assert (await r.get("/ready")).status == 503
        assert (await r.send()).status == 200  # it lives, and there is nothing better


async def test_a_doubtful_pair_is_used_only_for_want_of_a_better_one() -> None:
    async with rig(decode=2) as r:
        r.decode[0].status["last_fault_at"] = 17.5
        r.decode[0].canaries.append(hang)
        await r.look()
        await until(lambda: len(r.decode[0].seen_canaries) == 2)
        for _ in range(4):
            assert (await r.send()).status == 200
        assert (len(r.decode[0].seen), len(r.decode[1].seen)) == (0, 4)
        assert (await r.get("/ready")).status == 200


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_all_of_a_kind_gone_and_back_needs_no_router_restart(side: str) -> None:
    """CASES 22 and 27: a brief disappearance became a permanent 500."""
    async with rig(prefill=2, decode=2) as r:
        leaders = r.prefill if side == "prefill" else r.decode
        for leader in leaders:
            await r.lose(leader)
        got = await r.send()
        assert (got.status, got.error["code"]) == (503, f"no_{side}")
        assert (await r.get("/ready")).status == 503
        assert (await r.get("/health")).status == 200
        for leader in leaders:
            leader.status["instance_epoch"] += 1
            await r.find(leader)
        await r.ready()
        assert (await r.send()).status == 200


async def test_a_new_epoch_is_a_new_peer_whose_requests_are_lost() -> None:
    async with rig() as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(hang)
        asked = r.sending()
        await r.prefill[0].nth(1)
        r.prefill[0].status["instance_epoch"] = 2
        r.prefill[0].canaries.append(hang)
        r.decode[0].canaries.append(hang)
        await r.look()
        got = await asked
        assert (got.status, got.error["code"]) == (503, "peer_lost")
        assert "restarted" in got.error["message"]
        await until(lambda: len(r.prefill[0].seen_canaries) == 2)
        assert trust(r) == ["trying"]


async def test_an_instance_of_another_role_is_not_used() -> None:
    """CASES 83."""
    async with rig(wait=False) as r:
        r.decode[0].status["role"] = "hybrid"
        r.instance(r.decode[0]).nudged.set()
        await until(lambda: "hybrid" in r.instance(r.decode[0]).reason)
        assert (await r.send()).error["code"] == "no_decode"


@pytest.mark.parametrize(
    "answer",
    [good({"role": "decode"}), good({}), status(500, "x"), status(401, "x"), die],
    ids=["no state", "nothing", "500", "401", "dies"],
)
async def test_whatever_a_leader_says_of_itself_breaks_nothing(answer: object) -> None:
    async with rig() as r:
        r.decode[0].status_play = answer  # type: ignore[assignment]
        instance = r.instance(r.decode[0])
        instance.nudged.set()
        await until(lambda: instance.health == "dead")
        assert (await r.get("/health")).status == 200
        r.decode[0].status_play = None
        instance.nudged.set()
        await r.ready()


async def test_plain_backends_are_ready_when_they_say_so() -> None:
    async with rig(policy={"backends": "plain"}) as r:
        assert (await r.get("/ready")).status == 200
        for leader in r.decode:
            leader.status_code = 503
        for _ in range(2):
            r.instance(r.decode[0]).nudged.set()
            await asyncio.sleep(0)
        await until(lambda: r.instance(r.decode[0]).health == "dead")
        assert (await r.get("/ready")).status == 503


def test_without_a_key_only_plain_backends_can_be_fronted() -> None:
    tables = {"hybrid": [{"http": "127.0.0.1:1"}]}
    with pytest.raises(ConfigError, match="key_file"):
        make_router(RouterConfig.model_validate(tables), None)
    make_router(RouterConfig.model_validate(tables), KEY)
    make_router(RouterConfig.model_validate({**tables, "policy": {"backends": "plain"}}), None)


async def test_an_instance_that_cannot_serve_is_looked_at_now() -> None:
    """Its worker has died, say: the next beat would come after many more requests."""
    async with rig() as r:
        r.decode[0].status["state"] = "loading"
        r.decode[0].plays.append(status(503, "the worker is gone", "peer_lost"))
        assert (await r.send()).status == 503
        await until(lambda: not r.router.fleet.is_ready)
        assert (await r.get("/ready")).status == 503


# How often instances are looked at.


async def test_one_that_refuses_connections_is_looked_at_once_a_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look that failed is no reason for another: a core was busy with it."""
    looks, really = 0, Upstream.status

    async def counted(upstream: Upstream, instance: Instance) -> Status:
        nonlocal looks
        looks += 1
        return await really(upstream, instance)

    monkeypatch.setattr(Upstream, "status", counted)
    async with rig() as r:
        await r.lose(r.decode[0])
        before = looks
        for _ in range(500):
            await asyncio.sleep(0)
        assert looks - before <= 1


async def test_one_that_sends_answers_lives_while_it_gives_no_beat() -> None:
    timeouts = {"heartbeat_s": 0.3, "heartbeat_timeout_s": 0.3}
    gates = [asyncio.Event() for _ in range(3)]
    pieces = [each for gate in gates for each in (b"data: x\n\n", gate)]

    async def silent(_request: web.Request, _seen: Seen) -> web.StreamResponse:
        for gate in gates:
            if not gate.is_set():
                gate.set()  # a piece of the answer comes while it is looked at
                break
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async with rig(policy={"migrate": False}, timeouts=timeouts) as r:
        decode = r.instance(r.decode[0])
        r.decode[0].plays.append(stream(*pieces, ending="hang"))
        asked = r.sending(stream=True)
        await until(lambda: any(relay.first_byte_at for relay in r.router.relays))
        r.decode[0].status_play = silent
        await until(lambda: decode.health is Health.DEAD)
        assert all(gate.is_set() for gate in gates)
        assert b"event: error" in (await asked).body


async def test_half_a_beat_is_none() -> None:
    async def half(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        return await hang(request, seen)

    timeouts = {"heartbeat_s": 0.3, "heartbeat_timeout_s": 0.3}
    async with rig(timeouts=timeouts) as r:
        decode = r.instance(r.decode[0])
        r.decode[0].status_play = half
        await until(lambda: decode.health is Health.DEAD)
