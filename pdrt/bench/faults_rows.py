"""The rows of the faults table: what goes wrong, on which side, and how it may end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from pdrt.bench.backend import Play
from pdrt.bench.faults_client import Got
from pdrt.bench.faults_ground import Ground
from pdrt.bench.faults_verdict import Want

Act: TypeAlias = Callable[[Ground], Awaitable[Got]]
_HANG: Final = Play(begin="hang")
_RESET: Final = Play(begin="reset")
_LATER: Final = Play(after_s=0.5)  # so that the fault is there before the other side is done
_LONG: Final = Play(chunks=1000, every_s=0.02)
_GONE: Final = (500, 502, 503)
_TEN_MB: Final = 10_000_000


G = TypeVar("G")


@dataclass(frozen=True)
class OneRow(Generic[G]):
    """A fault on a ground of some kind."""

    name: str
    act: Callable[[G], Awaitable[Got]]
    want: Want
    is_slow: bool = False  # waits for a limit of many seconds


Row: TypeAlias = OneRow[Ground]


def rows() -> list[Row]:
    return [*_sound(), *_prefill(), *_decode(), *_streams(), *_both(), *_gone(), *_odd(), *_slow()]


def _sound() -> Iterator[Row]:
    for stream, kind in ((True, "stream"), (False, "json")):
        yield Row(f"sound, {kind}", _asked(stream), Want())


def _asked(stream: bool, prefill: Play | None = None, decode: Play | None = None) -> Act:
    async def act(ground: Ground) -> Got:
        if prefill is not None:
            ground.prefill.does(prefill)
        if decode is not None:
            ground.decode.does(decode)
        return await ground.caller.ask(stream=stream)

    return act


# One side fails before anything was said; the other one is at work.


def _prefill() -> Iterator[Row]:
    for stream, kind in ((True, "stream"), (False, "json")):
        for status in (400, 500):
            play = Play(status=status)
            want = Want(statuses=(status,))
            yield Row(f"prefill {status}, {kind}", _asked(stream, play, _HANG), want)
        deadline = Want(statuses=(504,), codes=("deadline",), waits="deadline")
        yield Row(f"prefill hangs, {kind}", _asked(stream, _HANG, _HANG), deadline)
        yield Row(f"prefill resets, {kind}", _asked(stream, _RESET, _HANG), Want(statuses=_GONE))
        yield Row(f"prefill refuses, {kind}", _refused("prefill", stream), Want(statuses=_GONE))
    yield Row("one of two prefills refuses", _one_refused("prefill"), Want())


def _decode() -> Iterator[Row]:
    for stream, kind in ((True, "stream"), (False, "json")):
        for status in (400, 500):
            play = Play(status=status)
            want = Want(statuses=(status,))
            yield Row(f"decode {status}, {kind}", _asked(stream, _LATER, play), want)
        full = Play(status=429, headers={"retry-after": "7"})
        want = Want(statuses=(429,), retry_after="7")
        yield Row(f"decode 429, {kind}", _asked(stream, _LATER, full), want)
        deadline = Want(statuses=(504,), codes=("deadline",), waits="deadline")
        yield Row(f"decode hangs, {kind}", _asked(stream, None, _HANG), deadline)
        yield Row(f"decode resets, {kind}", _asked(stream, _LATER, _RESET), Want(statuses=_GONE))
        yield Row(f"decode refuses, {kind}", _refused("decode", stream), Want(statuses=_GONE))
    yield Row("one of two decodes refuses", _one_refused("decode"), Want())
    half = Play(ending="die")
    yield Row("decode's json breaks off", _asked(False, None, half), Want(statuses=_GONE))


def _refused(side: str, stream: bool) -> Act:
    async def act(ground: Ground) -> Got:
        lost, other = (
            (ground.prefill, ground.decode)
            if side == "prefill"
            else (ground.decode, ground.prefill)
        )
        other.does(_HANG if side == "prefill" else _LATER)
        lost.refuse()
        return await ground.caller.ask(stream=stream)

    return act


def _one_refused(side: str) -> Act:
    async def act(ground: Ground) -> Got:
        (ground.prefill if side == "prefill" else ground.decode).backends[0].refuse()
        slowest = Got()
        for number in range(10):
            got = await ground.caller.ask(stream=False, prompt=f"p{number} " * (number + 1))
            if got.status != 200:
                got.problem = f"request {number + 1} of 10"
                return got
            slowest = max(slowest, got, key=lambda each: each.total_s)
        return slowest

    return act


def _streams() -> Iterator[Row]:
    told = Want(ends="error event")
    dies = Play(upto=2, ending="die")
    yield Row("decode dies in mid-stream", _asked(True, None, dies), told)
    hangs = Play(upto=2, ending="hang")
    late = Want(ends="error event", waits="deadline")
    yield Row("decode hangs in mid-stream", _asked(True, None, hangs), late)
    yield Row("decode is killed in mid-stream", _killed_in_stream, told)


async def _killed_in_stream(ground: Ground) -> Got:
    ground.decode.does(_LONG)
    async with ground.caller.line() as line:
        await line.say(ground.caller.request(ground.caller.body(stream=True)))
        await line.events(3)
        ground.decode.refuse()
        return await line.converse()


def _both() -> Iterator[Row]:
    bad = Play(status=500)
    for stream, kind in ((True, "stream"), (False, "json")):
        yield Row(f"both 500 at once, {kind}", _asked(stream, bad, bad), Want(statuses=(500,)))
    yield Row("both reset at once", _asked(True, _RESET, _RESET), Want(statuses=_GONE))
    yield Row("prefill 500, decode hangs", _asked(False, bad, _HANG), Want(statuses=(500,)))


# The client leaves, at points of a request's life.


def _gone() -> Iterator[Row]:
    left = Want(ends="left")
    yield Row("gone before a byte", _left_after(0), left)
    yield Row("gone in the header", _left_after(40), left)
    yield Row("gone in the body", _left_after(-5), left)
    for stream, kind in ((True, "stream"), (False, "json")):
        yield Row(f"gone while prefill computes, {kind}", _left_with(stream, _HANG, _HANG), left)
        yield Row(f"gone while decode is silent, {kind}", _left_with(stream, None, _HANG), left)
    yield Row("gone while decode waits for prefill", _left_with(True, _HANG, _LONG), left)
    yield Row("gone in a busy stream", _left_in_stream(_LONG), left)
    idle = Play(upto=2, ending="hang")
    yield Row("gone in an idle stream", _left_in_stream(idle), left)
    yield Row("half closed, then gone", _half_closed, left)


def _left_after(count: int) -> Act:
    async def act(ground: Ground) -> Got:
        whole = ground.caller.request(ground.caller.body(stream=True))
        async with ground.caller.line() as line:
            await line.say(whole[:count] if count else b"")
        return Got(end="left")

    return act


def _left_with(stream: bool, prefill: Play | None, decode: Play) -> Act:
    async def act(ground: Ground) -> Got:
        if prefill is not None:
            ground.prefill.does(prefill)
        ground.decode.does(decode)
        async with ground.caller.line() as line:
            await line.say(ground.caller.request(ground.caller.body(stream=stream)))
            await ground.reached(0 if prefill is None else 1, 1)
        return Got(end="left")

    return act


def _left_in_stream(decode: Play) -> Act:
    async def act(ground: Ground) -> Got:
        ground.decode.does(decode)
        async with ground.caller.line() as line:
            await line.say(ground.caller.request(ground.caller.body(stream=True)))
            await line.events(2)
        return Got(end="left")

    return act


async def _half_closed(ground: Ground) -> Got:
    """It says that it has said all, and then is gone."""
    ground.prefill.does(_HANG)
    ground.decode.does(_HANG)
    async with ground.caller.line() as line:
        await line.say(ground.caller.request(ground.caller.body(stream=True)))
        await ground.reached()
        line.writer.write_eof()
    return Got(end="left")


# Requests that are odd or none at all.


def _odd() -> Iterator[Row]:
    bad = Want(statuses=(400,))
    yield Row("10 MB prompt", _big(), Want(statuses=(200, 413)))
    expect = Want(statuses=(200, 413, 417))
    yield Row("10 MB prompt, Expect: 100-continue", _big("expect: 100-continue"), expect)
    yield Row("junk bytes", _raw(b"\x16\x03\x01\x02\x00junk\r\n\r\n"), bad)
    yield Row("a request line that is none", _raw(b"HELO there\r\n\r\n"), bad)
    yield Row("half of a JSON", _posted(b'{"model": "scripted", "prom'), bad)
    yield Row("a JSON list", _posted(b"[1, 2]"), bad)
    yield Row("no body", _posted(b""), bad)
    yield Row("bytes that are no UTF-8", _posted(b'{"prompt": "\xff\xfe"}'), bad)
    yield Row("a length that is none", _raw(_FALSE_LENGTH), bad)
    yield Row("two lengths that differ", _raw(_TWO_LENGTHS), bad)
    yield Row("64 KB header", _headed("x-big: " + "a" * 65_000), Want(statuses=(200, 400, 431)))
    yield Row("1,000 headers", _many_headers, Want(statuses=(200, 400, 431)))
    yield Row("unknown path", _other(path="/v1/nope"), Want(statuses=(404,)))
    yield Row("GET where POST is meant", _other(method="GET"), Want(statuses=(405,)))
    for stream, kind in ((True, "stream"), (False, "json")):
        yield Row(f"HTTP/1.0, {kind}", _other(stream=stream, version="1.0"), Want())
        yield Row(f"chunked upload, {kind}", _chunked(stream), Want())
    yield Row("body byte by byte", _dripped, Want())
    yield Row("two requests at once on a connection", _pipelined, Want())


_FALSE_LENGTH: Final = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1x\r\n\r\n{}"
_TWO_LENGTHS: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}}"
)


def _raw(data: bytes) -> Act:
    return lambda ground: ground.caller.send(data)


def _posted(body: bytes) -> Act:
    return lambda ground: ground.caller.send(ground.caller.request(body))


def _headed(line: str) -> Act:
    def act(ground: Ground) -> Awaitable[Got]:
        return ground.caller.send(ground.caller.request(ground.caller.body(stream=False), line))

    return act


def _many_headers(ground: Ground) -> Awaitable[Got]:
    lines = [f"x-{number}: y" for number in range(1000)]
    return ground.caller.send(ground.caller.request(ground.caller.body(stream=False), *lines))


def _big(*lines: str) -> Act:
    def act(ground: Ground) -> Awaitable[Got]:
        body = ground.caller.body(stream=True, prompt="a" * _TEN_MB)
        head = ground.caller.head(len(body), *lines)
        return ground.caller.send(head, *([0.2] if lines else []), body)

    return act


def _other(*, stream: bool = False, **kinds: str) -> Act:
    def act(ground: Ground) -> Awaitable[Got]:
        body = b"" if kinds.get("method") == "GET" else ground.caller.body(stream=stream)
        return ground.caller.send(ground.caller.request(body, **kinds))

    return act


def _chunked(stream: bool) -> Act:
    def act(ground: Ground) -> Awaitable[Got]:
        body = ground.caller.body(stream=stream)
        pieces: list[bytes | float] = [ground.caller.head(None, "transfer-encoding: chunked")]
        for at in range(0, len(body), 20):
            part = body[at : at + 20]
            pieces += [b"%x\r\n%s\r\n" % (len(part), part), 0.01]
        return ground.caller.send(*pieces, b"0\r\n\r\n")

    return act


def _dripped(ground: Ground) -> Awaitable[Got]:
    whole = ground.caller.request(ground.caller.body(stream=False))
    parts: list[bytes | float] = [whole[:-30]]
    for byte in whole[-30:]:
        parts += [0.005, bytes([byte])]
    return ground.caller.send(*parts)


async def _pipelined(ground: Ground) -> Got:
    """Both are answered, in their order, however the server takes them."""
    one = ground.caller.request(ground.caller.body(stream=False))
    last = ground.caller.request(ground.caller.body(stream=False), "connection: close")
    async with ground.caller.line() as line:
        await line.converse(one + last)
        return await line.another()


# Whoever is slow.


def _slow() -> Iterator[Row]:
    late = Want(statuses=(400, 408), waits="upload")
    yield Row("stalled upload", _stalled(-10), late, is_slow=True)
    yield Row("stalled header", _stalled(40), late, is_slow=True)
    yield Row("slow reader leaves", _slow_reader, Want(ends="left"))
    stays = Want(ends="left", waits="slow reader")
    yield Row("slow reader stays", _reader_that_stopped, stays)


def _stalled(count: int) -> Act:
    def act(ground: Ground) -> Awaitable[Got]:
        whole = ground.caller.request(ground.caller.body(stream=True))
        return ground.caller.send(whole[:count])

    return act


_FLOOD: Final = Play(chunks=1024, every_s=0.0, pad=65_536)  # 64 MB
_MOST_HELD: Final = 16 << 20  # buffers of four sockets, and the router's


async def _slow_reader(ground: Ground) -> Got:
    """Of 64 MB it reads a little; so decode must be slowed down, and not the router filled."""
    ground.decode.does(_FLOOD)
    async with ground.caller.line(room=8192) as line:
        await line.say(ground.caller.request(ground.caller.body(stream=True)))
        await line.events(1)
        sent = await _still(ground)
    is_held = sent <= _MOST_HELD
    problem = "" if is_held else f"{sent >> 20} MB are on their way to a reader that waits"
    return Got(end="left", problem=problem)


async def _still(ground: Ground) -> int:
    """Bytes that decode has sent, once it sends no more."""
    sent, moved = 0, ground.decode.sent
    while moved != sent:
        sent = moved
        await asyncio.sleep(0.3)
        moved = ground.decode.sent
    return sent


async def _reader_that_stopped(ground: Ground) -> Got:
    """It holds its connection and reads no more: after a while its legs are let go."""
    ground.decode.does(_FLOOD)
    async with ground.caller.line(room=8192) as line:
        await line.say(ground.caller.request(ground.caller.body(stream=True)))
        await line.events(1)
        patience = ground.caller.patience_s
        gone = await ground.until(lambda: not ground.decode.open, patience)
    problem = "" if gone is not None else f"its legs are held for {patience:g} s"
    return Got(end="left", problem=problem)
