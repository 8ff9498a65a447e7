"""The pair of sockets between supervisor and worker: whole messages, and no last word lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pdrt import messages
from pdrt.curve import CurveContext
from pdrt.errors import Overloaded, PeerLost
from pdrt.keys import ClusterKey
from pdrt.link import Link
from pdrt.messages import Drain, FromWorker, Loading, Stop, ToWorker


class Ends:
    def __init__(self, folder: Path, context: zmq.asyncio.Context, depth: int) -> None:
        self.endpoint = f"ipc://{folder}/pair"
        self.ours: Link[FromWorker, ToWorker] = Link(
            context, messages.FROM_WORKER, messages.TO_WORKER, depth
        )
        self.theirs: Link[ToWorker, FromWorker] = Link(
            context, messages.TO_WORKER, messages.FROM_WORKER
        )


@asynccontextmanager
async def ends(folder: Path, depth: int = 100) -> AsyncIterator[Ends]:
    with zmq.asyncio.Context() as context:
        both = Ends(folder, context, depth)
        both.ours.bind(both.endpoint)
        both.theirs.connect(both.endpoint)
        try:
            yield both
        finally:
            both.ours.close()
            both.theirs.close()


def loading(number: int) -> Loading:
    return Loading(stage="weights", done=number, total=1000)


async def test_what_one_end_is_told_the_other_hears_in_order(tmp_path: Path) -> None:
    async with ends(tmp_path) as both:
        sending = asyncio.create_task(both.ours.run())
        for message in (Drain(), Stop()):
            both.ours.tell(message)
        heard = both.theirs.listen()
        assert [await anext(heard), await anext(heard)] == [Drain(), Stop()]
        sending.cancel()


async def test_a_message_waits_for_an_end_that_comes_later(tmp_path: Path) -> None:
    async with ends(tmp_path) as both:
        both.theirs.tell(loading(1))
        both.theirs.tell(loading(2))
        await both.theirs.send_last(loading(3))  # with what waited before it
        heard = both.ours.listen()
        assert [(await anext(heard)) for _ in range(3)] == [loading(n) for n in (1, 2, 3)]


async def test_what_was_said_before_hanging_up_is_read_whole(tmp_path: Path) -> None:
    async with ends(tmp_path) as both:
        reading = asyncio.ensure_future(anext(both.ours.listen()))
        await asyncio.sleep(0)
        said = [loading(number) for number in range(5000)]  # more than any queue between us holds

        async def say() -> None:
            for message in said:
                await both.theirs.on(message)
                await asyncio.sleep(0)
            both.theirs.close(linger_ms=1000)

        saying = asyncio.create_task(say())
        await asyncio.sleep(0)
        reading.cancel()  # in the midst of it
        assert await both.ours.unread() == said
        await saying


async def test_an_end_that_never_came_said_nothing(tmp_path: Path) -> None:
    with zmq.asyncio.Context() as context:
        alone: Link[FromWorker, ToWorker] = Link(context, messages.FROM_WORKER, messages.TO_WORKER)
        alone.bind(f"ipc://{tmp_path}/pair")
        async with asyncio.timeout(0.5):  # less than it waits for one that did
            assert await alone.unread() == []
        alone.close()


async def test_what_is_no_message_is_counted_and_dropped(tmp_path: Path) -> None:
    with zmq.asyncio.Context() as context:
        both = Ends(tmp_path, context, 1)
        both.ours.bind(both.endpoint)
        stranger = context.socket(zmq.PAIR)
        stranger.connect(both.endpoint)
        for frame in (b"", b"\xc1", messages.encode(messages.TO_WORKER, Stop())):
            await stranger.send(frame)
        await stranger.send(messages.encode(messages.FROM_WORKER, loading(1)))
        assert await anext(both.ours.listen()) == loading(1)
        assert both.ours.dropped == 3
        for socket in (both.ours, both.theirs, stranger):
            socket.close()


async def test_a_full_or_ended_link_refuses(tmp_path: Path) -> None:
    async with ends(tmp_path, depth=2) as both:
        both.ours.tell(Drain())
        both.ours.tell(Drain())
        with pytest.raises(Overloaded):
            both.ours.tell(Drain())
        sending = asyncio.create_task(both.ours.run())
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(PeerLost):
            both.ours.tell(Drain())


async def test_an_endpoint_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with zmq.asyncio.Context() as context:
        alone: Link[FromWorker, ToWorker] = Link(context, messages.FROM_WORKER, messages.TO_WORKER)
        with pytest.raises(OSError, match="nowhere/pair"):
            alone.bind(f"ipc://{tmp_path}/nowhere/pair")
        alone.close()


# Between nodes.

KEY = ClusterKey(b"the key of a test cluster")


class Net:
    """A node that listens, with its guard at the door."""

    def __init__(self, ip: str) -> None:
        self.net = CurveContext(KEY, ip)
        self.guard = asyncio.create_task(self.net.guard())
        self.link: Link[FromWorker, ToWorker] = Link(
            self.net.context, messages.FROM_WORKER, messages.TO_WORKER
        )
        self.endpoint = self.link.serve(self.net)


@asynccontextmanager
async def listening(ip: str = "127.0.0.1") -> AsyncIterator[Net]:
    node = Net(ip)
    yield node
    node.guard.cancel()
    await asyncio.gather(node.guard, return_exceptions=True)
    node.link.close()
    node.net.close()


@asynccontextmanager
async def calling(
    endpoint: str, key: ClusterKey = KEY, ip: str = "127.0.0.2"
) -> AsyncIterator[Link[ToWorker, FromWorker]]:
    net = CurveContext(key, ip)
    link: Link[ToWorker, FromWorker] = Link(net.context, messages.TO_WORKER, messages.FROM_WORKER)
    link.dial(net, endpoint)
    yield link
    link.close()
    net.close()


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
async def test_two_nodes_talk_over_tcp_and_each_sees_the_other_come_and_go(ip: str) -> None:
    async with listening(ip) as node:
        async with calling(node.endpoint, ip=ip) as far:
            await asyncio.gather(node.link.met(), far.met())
            await far.on(loading(1))
            await node.link.on(Stop())
            assert await anext(node.link.listen()) == loading(1)
            assert await anext(far.listen()) == Stop()
        async with asyncio.timeout(5):
            await node.link.hung_up()


async def test_who_has_another_key_or_none_is_not_met() -> None:
    """And does not keep the one that has it from coming."""
    async with listening() as node:
        plain = zmq.asyncio.Context()
        stranger = plain.socket(zmq.PAIR)
        stranger.linger = 0
        stranger.connect(node.endpoint)
        await stranger.send(messages.encode(messages.FROM_WORKER, loading(7)))
        async with calling(node.endpoint, ClusterKey(b"another cluster's key")) as false:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await false.met()
            async with calling(node.endpoint) as far:
                await far.on(loading(1))
                assert await anext(node.link.listen()) == loading(1)
        stranger.close()
        plain.term()


async def test_a_connection_that_is_over_is_not_made_again_behind_our_back() -> None:
    """What was said between would be lost without a word."""
    async with listening() as node:
        far_net = CurveContext(KEY, "127.0.0.2")
        near = node.net.context.socket(zmq.PAIR)
        endpoint = node.net.serve(near)
        far: Link[ToWorker, FromWorker] = Link(
            far_net.context, messages.TO_WORKER, messages.FROM_WORKER
        )
        far.dial(far_net, endpoint)
        await far.met()
        near.close(linger=0)
        async with asyncio.timeout(5):
            await far.hung_up()
        host, port = endpoint.removeprefix("tcp://").split(":")
        called = asyncio.Event()

        def knock(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set()
            writer.close()

        server = await asyncio.start_server(knock, host, int(port))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                await called.wait()
        server.close()
        await server.wait_closed()
        far.close()
        far_net.close()


async def test_an_address_that_is_not_ours_is_named() -> None:
    net = CurveContext(KEY, "192.0.2.1")
    link: Link[FromWorker, ToWorker] = Link(net.context, messages.FROM_WORKER, messages.TO_WORKER)
    with pytest.raises(OSError, match=r"tcp://192\.0\.2\.1"):
        link.serve(net)
    link.close()
    net.close()
