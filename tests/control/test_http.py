"""Errors keep their meaning on the way through HTTP; bodies are bounded; strangers stay out."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from socket import gaierror

import pytest
from aiohttp import ClientConnectorError, ClientError, ClientSession, ServerDisconnectedError, web
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.test_utils import TestClient, TestServer

from pdrt.control.http import (
    MAX_FIELDS,
    MAX_NESTED,
    MAX_VALUES,
    add_request_id,
    error_body,
    error_from_answer,
    error_middleware,
    error_of,
    error_response,
    listen,
    parse_object,
    read_json,
    reason_at_first,
    reason_of,
    require_bearer,
)
from pdrt.errors import (
    BadRequest,
    ConfigError,
    Overloaded,
    PdrtError,
    TooLarge,
    Unavailable,
    tree,
)
from pdrt.keys import ClusterKey
from pdrt.messages import Problem

KEY = ClusterKey(b"k" * 32)
Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(
    handle: Handle, key: ClusterKey | None = None
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    app = web.Application(middlewares=[error_middleware("test"), require_bearer(key)])
    app.on_response_prepare.append(add_request_id)
    app.add_routes([web.post("/", handle)])
    async with TestClient(TestServer(app)) as client:
        yield client


def raising(error: Exception) -> Handle:
    async def handle(_request: web.Request) -> web.StreamResponse:
        raise error

    return handle


async def echo(request: web.Request) -> web.StreamResponse:
    return web.json_response(await read_json(request, 64))


@pytest.mark.parametrize("kind", tree().values())
def test_an_error_comes_out_of_an_answer_as_it_went_in(kind: type[PdrtError]) -> None:
    error = kind.__new__(kind, "because")
    error.stage = "decode"
    body = json.dumps(error_body(error, "id-1", "relay")).encode()
    back = error_from_answer(error.status, body, "there")
    assert (type(back), str(back), back.stage) == (kind, "because", "decode")


@pytest.mark.parametrize("kind", tree().values())
def test_an_error_comes_out_of_a_message_as_it_went_in(kind: type[PdrtError]) -> None:
    back = error_of(Problem.of(kind.__new__(kind, "because"), "sched"))
    assert (type(back), str(back), back.stage) == (kind, "because", "sched")


def test_a_code_nobody_knows_is_told_in_the_message() -> None:
    error = error_of(Problem(code="odd", message="why"))
    assert (error.status, str(error)) == (500, "odd: why")
    body = b'{"error": {"code": "odd", "message": "why"}}'
    assert isinstance(error_from_answer(503, body, "p0"), Unavailable)
    assert str(error_from_answer(503, body, "p0")) == "odd: why"


@pytest.mark.parametrize("body", [b"", b"plain", b"[]", b'{"error": 3}', b"\xff", b"[" * 100000])
def test_an_answer_that_is_no_error_of_ours_gets_one_by_its_status(body: bytes) -> None:
    error = error_from_answer(429, body, "p0")
    assert isinstance(error, Overloaded)
    assert "p0 answered 429" in str(error)


@pytest.mark.parametrize(
    ("status", "told", "kind"),
    [
        (400, {"message": "m", "code": None}, BadRequest),
        (422, {"message": "m"}, BadRequest),
        (415, {"message": "m", "code": 415}, BadRequest),
        (429, {"message": "m", "type": "t", "param": None, "code": 429}, Overloaded),
    ],
)
def test_other_servers_errors_are_told_in_their_own_words(
    status: int, told: object, kind: type[PdrtError]
) -> None:
    error = error_from_answer(status, json.dumps({"error": told}).encode(), "p0")
    assert (type(error), str(error), error.stage) == (kind, "m", "p0")


@pytest.mark.parametrize("status", [402, 405, 418, 422])
def test_a_clients_mistake_is_never_a_fault_of_ours(status: int) -> None:
    error = error_from_answer(status, b"no such thing", "p0")
    assert isinstance(error, BadRequest)
    assert str(error) == f"p0 answered {status}: no such thing"


def test_a_full_or_absent_server_says_when_to_come_again() -> None:
    assert error_response(Overloaded("full")).headers["retry-after"] == "1"
    assert error_response(Unavailable("gone")).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(BadRequest("no")).headers


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'"text"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b'{"a": ' + b"[" * 200000 + b"]" * 200000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": {' + b",".join(b'"%d": 1' % i for i in range(1025)) + b"}}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_object(body)


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("blanks", ["", " \n"])
def test_a_body_is_read_in_each_encoding_and_with_blanks_around(encoding: str, blanks: str) -> None:
    text = blanks + '{"prompt": "\u00fc: ' + ":" * 2000 + '"}' + blanks
    assert parse_object(text.encode(encoding))["prompt"].startswith("\u00fc: ::")
    assert parse_object((blanks + '{"a": 1}' + blanks).encode(encoding)) == {"a": 1}


def test_an_object_of_too_many_keys_is_refused_wherever_it_is() -> None:
    inner = ",".join(f'"{number}":0' for number in range(1025))
    with pytest.raises(BadRequest, match="1025 keys"):
        parse_object(f'{{"a":[{{{inner}}}]}}'.encode())


@pytest.mark.parametrize(
    ("element", "count", "what"),
    [
        ('{"role":"z"}', MAX_NESTED, "lists and objects"),
        ("[1]", MAX_NESTED, "lists and objects"),
        ('{"a":1,"b":2,"c":3}', MAX_FIELDS // 3 + 1, "fields"),
        ("1", MAX_VALUES + 2, "values"),
        ('"a\\\\"', MAX_VALUES + 2, "values"),
    ],
)
def test_a_body_of_more_things_than_any_request_has_is_refused_before_it_is_read(
    element: str, count: int, what: str
) -> None:
    """The loop stands still while they are made."""
    with pytest.raises(BadRequest, match=what):
        parse_object(f'{{"a":[{",".join([element] * count)}]}}'.encode(), is_clients=True)


def test_marks_in_texts_are_no_things() -> None:
    text = '{[:,\\"{[:,\\\\' * (MAX_VALUES // 2 + 1)
    body = json.dumps({"prompt": text}).encode()
    assert parse_object(body, is_clients=True) == {"prompt": text}


def test_the_largest_batch_is_taken_and_so_is_its_leg_with_what_is_added() -> None:
    batch = {"prompt": [[7] * 8192] * 128, "max_tokens": 1, "stream": True}
    assert parse_object(json.dumps(batch).encode(), is_clients=True) == batch
    leg = {"prompt": [7] * (MAX_VALUES + 1), "room": 1, "attempt": 2}
    assert parse_object(json.dumps(leg).encode()) == leg


async def test_a_body_over_the_limit_is_413_with_and_without_a_length() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 8

    async with served(echo) as client:
        for data in (b" " * 65, chunks()):
            answer = await client.post("/", data=data)
            assert answer.status == TooLarge.status
            assert (await answer.json())["error"]["code"] == "too_large"
        answer = await client.post("/", json={"a": 1})
        assert (answer.status, await answer.json()) == (200, {"a": 1})


async def test_a_body_that_is_not_encoded_as_it_says_is_a_bad_request() -> None:
    async with served(echo) as client:
        for encoding in ("gzip", "deflate"):
            headers = {"content-encoding": encoding}
            answer = await client.post("/", data=b"\xffjunk", headers=headers)
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "bad_request"


async def test_an_upload_that_stalls_is_ended() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(await read_json(request, 64, within_s=0))

    async def stall() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with served(handle) as client:
        answer = await client.post("/", data=stall())
        assert answer.status == 400
        assert "did not arrive" in (await answer.json())["error"]["message"]


async def test_an_unexpected_exception_is_a_500_that_tells_no_detail() -> None:
    async with served(raising(KeyError("secret"))) as client:
        answer = await client.post("/", headers={"x-request-id": "id-9"})
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["request_id"]) == (500, "internal", "id-9")
        assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("POST", "/nowhere", 404, "not_found"), ("GET", "/", 405, "method_not_allowed")],
)
async def test_refusals_of_the_library_have_our_form(
    method: str, path: str, status: int, code: str
) -> None:
    async with served(echo) as client:
        answer = await client.request(method, path)
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("sent", ["abc-1", "", "with space", "x" * 129, "<script>"])
async def test_a_fit_request_id_is_kept_and_another_replaced(sent: str) -> None:
    async with served(echo) as client:
        answer = await client.post("/", json={}, headers={"x-request-id": sent})
        got = answer.headers["x-request-id"]
        assert got == sent if sent == "abc-1" else got not in (sent, "")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer wrong", 401),
        (KEY.bearer(), 401),
        ("Bearer \udcff", 401),
        (f"Bearer {KEY.bearer()}", 200),
    ],
)
async def test_only_the_clusters_token_opens(header: str | None, status: int) -> None:
    headers = {} if header is None else {"authorization": header}
    async with served(echo, KEY) as client:
        if header == "Bearer \udcff":  # the client library would not send it
            assert not KEY.is_bearer(header)
            return
        assert (await client.post("/", json={}, headers=headers)).status == status


async def test_a_taken_port_is_named_with_its_address() -> None:
    first, port = await listen(web.Application(), "127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1"):
            await listen(web.Application(), "127.0.0.1", port)
    finally:
        await first.cleanup()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_an_address_that_is_not_this_hosts_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        await listen(web.Application(), host, 0)


async def test_a_handler_is_cancelled_when_its_client_leaves() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(_request: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    app = web.Application()
    app.add_routes([web.get("/", handle)])
    runner, port = await listen(app, "127.0.0.1", 0)
    try:
        async with ClientSession() as session:
            asked = asyncio.ensure_future(session.get(f"http://127.0.0.1:{port}/"))
            await begun.wait()
            asked.cancel()
            await cancelled.wait()
    finally:
        await runner.cleanup()


HOST = ConnectionKey("nowhere", 8000, False, True, None, None, None)
REASONS: dict[str, ClientError | OSError] = {
    "Name or service not known": ClientConnectorError(
        HOST, gaierror(-2, "Name or service not known")
    ),
    "Connection refused": ClientConnectorError(HOST, OSError(errno.ECONNREFUSED, "words of ours")),
    "Server disconnected": ServerDisconnectedError(),
    "TimeoutError": TimeoutError(),
}


@pytest.mark.parametrize("said", REASONS)
def test_why_nobody_answers_is_told_without_a_programmers_words(said: str) -> None:
    assert reason_of(REASONS[said]) == said


def test_only_who_has_not_been_heard_yet_may_speak_tls() -> None:
    assert "https://" in reason_at_first(ServerDisconnectedError())
    assert reason_at_first(REASONS["Connection refused"]) == "Connection refused"
