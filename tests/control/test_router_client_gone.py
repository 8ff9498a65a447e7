"""A client that leaves, at each point of the life cycle: both legs are let go (CASES 30, 95)."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdrt.control.pairs import CanaryPassed
from tests.control.fake_leader import FakeLeader, Play, after, die, good, hang, prefilled, stream
from tests.control.router_rig import NEVER_S, Rig, rig, until


class RawClient:
    """A client that can stop reading and hang up."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def send(cls, r: Rig, *, stream: bool = True, cut: int | None = None) -> RawClient:
        port = int(r.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        body = json.dumps({"prompt": "hi", "stream": stream}).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:cut])
        return cls(reader, writer)

    def leave(self) -> None:
        self.writer.transport.abort()


async def _all_gone(*leaders: FakeLeader) -> None:
    for leader in leaders:
        for seen in leader.seen:
            await seen.gone.wait()


async def test_leaving_while_the_body_is_sent() -> None:
    async with rig() as r:
        client = await RawClient.send(r, cut=5)
        await until(lambda: r.router.admitted == 1)
        client.leave()
        await r.at_rest()
        assert not r.decode[0].seen


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_prefill_computes(stream: bool) -> None:
    async with rig() as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(hang)
        client = await RawClient.send(r, stream=stream)
        await r.prefill[0].nth(1)
        await r.decode[0].nth(1)
        client.leave()
        await _all_gone(r.prefill[0], r.decode[0])
        await r.at_rest()


async def test_leaving_while_decode_waits_for_its_first_token() -> None:
    async with rig() as r:
        r.decode[0].plays.append(hang)
        client = await RawClient.send(r)
        await r.decode[0].nth(1)
        await until(lambda: any(relay.route.state == "awaiting" for relay in r.router.relays))
        client.leave()
        await _all_gone(r.decode[0])
        await r.at_rest()


async def test_leaving_while_a_lost_prefill_is_replaced() -> None:
    async with rig(prefill=2) as r:
        r.prefill[0].plays.append(die)
        r.prefill[1].plays.append(hang)
        r.decode[0].plays.append(hang)
        r.decode[0].rebinds.append(hang)
        client = await RawClient.send(r)
        await r.prefill[1].nth(1)
        await until(lambda: bool(r.decode[0].seen_rebinds))
        client.leave()
        await _all_gone(r.prefill[1], r.decode[0])
        await r.decode[0].seen_rebinds[0].gone.wait()
        await r.at_rest()


@pytest.mark.parametrize("prefill", [prefilled(), hang], ids=["prefilled", "prefill open"])
async def test_leaving_in_mid_stream(prefill: Play) -> None:
    async with rig() as r:
        r.prefill[0].plays.append(prefill)
        r.decode[0].plays.append(stream(b"data: 1\n\n", ending="hang"))
        client = await RawClient.send(r)
        await client.reader.readuntil(b"data: 1\n\n")
        client.leave()
        await _all_gone(r.decode[0])
        await r.at_rest()


async def test_leaving_while_a_plain_answer_is_held() -> None:
    async with rig(policy={"backends": "plain"}) as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(stream(b"data: 1\n\n", ending="hang"))
        client = await RawClient.send(r)
        await until(lambda: any(relay.route.state == "held" for relay in r.router.relays))
        client.leave()
        await _all_gone(r.prefill[0], r.decode[0])
        await r.at_rest()


async def test_a_slow_reader_slows_decode_down_and_costs_a_bounded_buffer() -> None:
    """Without back-pressure the router would read a 26 MB answer all at once."""
    chunk = b"data: " + b"x" * 65_528 + b"\n\n"
    async with rig() as r:
        r.decode[0].plays.append(stream(*[chunk] * 512))
        client = await RawClient.send(r)
        await client.reader.read(1)
        sent = -1
        while sent != r.decode[0].seen[0].sent:  # until nothing moves any more
            sent = r.decode[0].seen[0].sent
            for _ in range(500):
                await asyncio.sleep(0)
        assert sent < 16 << 20  # kernel buffers on four sockets, and ours
        client.leave()
        await _all_gone(r.decode[0])
        await r.at_rest()


async def test_a_reader_that_has_stopped_does_not_outlive_the_deadline() -> None:
    chunk = b"data: " + b"x" * 65_528 + b"\n\n"
    gate = asyncio.Event()
    async with rig() as r:
        r.decode[0].plays.append(stream(*[chunk] * 512))
        client = await RawClient.send(r)
        await client.reader.read(1)
        await until(lambda: any(relay.first_byte_at is not None for relay in r.router.relays))
        r.time.pass_deadlines()
        await _all_gone(r.decode[0])
        gate.set()
        client.leave()
        await r.at_rest()


async def test_three_hundred_clients_that_leave_are_followed_by_one_that_is_served() -> None:
    """CASES 7."""
    async with rig() as r:
        never = asyncio.Event()
        for leader in (r.prefill[0], r.decode[0]):
            leader.plays.extend(after(never, hang) for _ in range(300))
        clients = [await RawClient.send(r) for _ in range(300)]
        await r.decode[0].nth(300)
        await r.prefill[0].nth(300)
        for client in clients:
            client.leave()
        await r.at_rest()
        assert (await r.send()).status == 200


async def test_a_reader_that_stops_for_too_long_is_cut_on_both_legs_and_counted() -> None:
    chunk = b"data: " + b"x" * 65_528 + b"\n\n"
    quiet = {"heartbeat_s": NEVER_S, "heartbeat_timeout_s": NEVER_S}
    async with rig(timeouts={**quiet, "slow_reader_s": 5.0}) as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(stream(*[chunk] * 512))
        client = await RawClient.send(r)
        await client.reader.read(1)
        relay = next(iter(r.router.relays))
        await until(
            lambda: relay.first_byte_at is not None and any(each.is_full for each in r.server.all)
        )
        for seconds in (1, 4):  # it is seen to stand still from the first look on
            r.server.look(r.server.now + seconds)
        assert r.router.relays
        r.server.look(r.server.now + 2)
        await _all_gone(r.prefill[0], r.decode[0])
        await r.at_rest()
        text = (await r.get("/metrics")).body.decode()
        assert "pdrt_router_slow_readers_total 1.0" in text
        client.leave()


async def test_a_fault_of_ours_is_a_typed_error_and_lets_both_legs_go() -> None:
    async with rig() as r:
        r.prefill[0].plays.append(hang)
        r.decode[0].plays.append(hang)
        asked = r.sending()
        await r.prefill[0].nth(1)
        await r.decode[0].nth(1)
        relay = next(iter(r.router.relays))
        relay.say(CanaryPassed())  # type: ignore[arg-type]
        got = await asked
        assert (got.status, got.error["code"]) == (500, "internal")
        await _all_gone(r.prefill[0], r.decode[0])
        await r.at_rest()


async def test_requests_sent_ahead_on_one_connection_are_relayed_in_turn() -> None:
    async with rig() as r:
        for text in ("one", "two", "three"):
            r.decode[0].plays.append(good({"output": text}))
        client = await RawClient.send(r, stream=False)
        body = json.dumps({"prompt": "hi"}).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        client.writer.write((head + body) * 2)
        for text in ("one", "two", "three"):
            await client.reader.readuntil(json.dumps({"output": text}).encode())
        client.leave()
        await r.at_rest()
