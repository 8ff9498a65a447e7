"""What every HTTP server here shares: typed errors as JSON, bounded bodies, the bearer check.

The promise: whatever a handler raises becomes a JSON error with a truthful status, and an
error that another pdrt process answered keeps its code, message and stage on the way through.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from typing import Any, Final, NoReturn, TypeAlias

import structlog
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSSLError,
    ServerDisconnectedError,
    web,
)
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pdrt.control.listen import listen as listening
from pdrt.errors import (
    BadRequest,
    Conflict,
    DeadlinePassed,
    NotFound,
    Overloaded,
    PdrtError,
    TooLarge,
    Unauthorized,
    Unavailable,
    tree,
)
from pdrt.keys import ClusterKey
from pdrt.messages import Problem

Json: TypeAlias = dict[str, Any]

REQUEST_ID: Final = web.RequestKey("request_id", str)
MAX_KEYS: Final = 1024  # of one JSON object
MAX_NESTED: Final = 1 << 16  # lists and objects of a client's body ...
MAX_FIELDS: Final = 1 << 17
MAX_VALUES: Final = (1 << 20) + (1 << 12)  # ... for the loop stands still while they are made
_MARKS: Final = (  # what there is one of for each of them
    ("{[", MAX_NESTED, "lists and objects"),
    (":", MAX_FIELDS, "fields"),
    (",", MAX_VALUES, "values"),
)
BODY_S: Final = 30.0  # a stalled upload ends after this
CANARY_HEADER: Final = "x-pdrt-canary"  # on the legs of a request that tries a pair
PATH_HEADER: Final = "x-pd-path"  # which path served a request
RETRY_AFTER_S: Final = 1
LAST_WORDS_S: Final = 1.0  # for a reader that has stopped reading
_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")
_GOOD_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled",
    503: "unavailable_error",
    504: "timeout_error",
}
_BY_STATUS: Final[dict[int, type[PdrtError]]] = {
    400: BadRequest,
    401: Unauthorized,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: DeadlinePassed,
}

log = structlog.get_logger(__name__)


# Errors as JSON and back.


def error_body(error: PdrtError, request_id: str = "", stage: str = "") -> Json:
    """The error object that clients and other pdrt processes read; the error's own stage wins."""
    return {
        "error": {
            "type": _TYPES.get(error.status, "server_error"),
            "code": error.code,
            "message": str(error) or error.code,
            "request_id": request_id,
            "stage": error.stage or stage,
        }
    }


def error_response(error: PdrtError, request_id: str = "", stage: str = "") -> web.Response:
    headers = {"x-request-id": request_id} if request_id else {}
    if error.status in (429, 503):
        headers["retry-after"] = str(error.retry_after or RETRY_AFTER_S)
    body = error_body(error, request_id, stage)
    return web.json_response(body, status=error.status, headers=headers)


def error_of(problem: Problem) -> PdrtError:
    """The exception for an error that travelled as a value; an unknown code is told, as a 500."""
    return _error(problem.code, problem.message, problem.stage, PdrtError)


def tls_reason(error: ClientSSLError) -> str:
    """For a person whose client and server did not agree on TLS."""
    if isinstance(error, ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return f"its certificate is not trusted, {why}; SSL_CERT_FILE names a file of CAs to trust"
    return "it does not speak TLS there: http:// instead of https://, perhaps"


def reason_of(error: ClientError | TimeoutError | OSError) -> str:
    """For a person whose server did not answer, without what only a programmer needs."""
    if isinstance(error, ClientSSLError):
        return tls_reason(error)
    system = error.os_error if isinstance(error, ClientConnectorError) else error
    if isinstance(system, OSError) and system.errno:
        return cause_of(system)
    return str(error) or type(error).__name__


def reason_at_first(error: ClientError | TimeoutError | OSError) -> str:
    """The same of a server that has not been heard yet: perhaps it is spoken to in a wrong way."""
    if isinstance(error, ServerDisconnectedError):  # as who speaks TLS does to who does not
        return "it ended the connection without a word; https:// instead of http://, perhaps"
    return reason_of(error)


def error_from_answer(status: int, body: bytes, where: str) -> PdrtError:
    """The typed error in another process's answer; `where` names it if the answer does not say."""
    told: Any = None
    kind = _BY_STATUS.get(status) or (BadRequest if 400 <= status < 500 else PdrtError)
    try:
        told = json.loads(body)["error"]
        code, message = told.get("code"), str(told["message"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        text = body[:200].decode(errors="replace")
        return at_stage(kind(f"{where} answered {status}: {text}"), where)
    stage = str(told.get("stage") or where)
    if not isinstance(code, str):  # other servers say null, or the status
        return at_stage(kind(message), stage)
    return _error(code, message, stage, kind)


def error_of_client(error: ClientError | TimeoutError | OSError, where: str) -> PdrtError:
    """What a failed call to another process is called here."""
    if isinstance(error, TimeoutError):
        return at_stage(Unavailable(f"{where} did not answer in time"), where)
    return at_stage(Unavailable(f"{where} cannot be reached: {cause_of(error)}"), where)


def cause_of(error: ClientError | OSError | TimeoutError) -> str:
    """What the system says of a connection; else the exception's name and what it says."""
    system = error.os_error if isinstance(error, ClientConnectorError) else error
    if isinstance(system, OSError) and system.errno:  # a resolver's numbers are its own
        return os.strerror(system.errno) if system.errno > 0 else str(system.strerror)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _error(code: str, message: str, stage: str, otherwise: type[PdrtError]) -> PdrtError:
    kind = tree().get(code)
    if kind is None:
        return at_stage(otherwise(f"{code}: {message}"), stage)
    return at_stage(kind.__new__(kind, message), stage)  # not every __init__ takes one message


def at_stage(error: PdrtError, stage: str) -> PdrtError:
    error.stage = stage
    return error


# Requests.


def new_request_id() -> str:
    return secrets.token_hex(12)


def good_request_id(text: str | None) -> str | None:
    """The id when it is fit for a header and a log line, else None."""
    return text if text and _GOOD_ID.fullmatch(text) else None


def request_id_of(request: web.Request) -> str:
    """The id of this request: the client's when it sent a fit one, else minted, once."""
    found = request.get(REQUEST_ID)
    if found is None:
        found = good_request_id(request.headers.get("x-request-id")) or new_request_id()
        request[REQUEST_ID] = found
    return found


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `app.on_response_prepare`: every answer carries x-request-id, streams too."""
    response.headers["x-request-id"] = request_id_of(request)


async def read_json(request: web.Request, limit: int, within_s: float = BODY_S) -> Json:
    """The body's JSON object. Raises TooLarge over `limit` bytes, BadRequest for anything else."""
    return parse_object(await read_body(request, limit, within_s))


async def read_body(request: web.Request, limit: int, within_s: float = BODY_S) -> bytes:
    """The body's bytes. Raises TooLarge over `limit` bytes, BadRequest when it stalls."""
    if (request.content_length or 0) > limit:
        raise TooLarge(f"the body has {request.content_length} bytes; the limit is {limit}")
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise TooLarge(f"the body is over the limit of {limit} bytes")
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {within_s:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body is not what its headers say: {error}"[:300]) from error
    return bytes(body)


def parse_object(body: bytes, *, is_clients: bool = False) -> Json:
    """The JSON object in these bytes. Raises BadRequest, also for NaN, deep nesting, no text.

    A client's is bounded. What the router makes of it has more in it, and is not refused for that.
    """
    try:
        is_plain = body[:1] == b"{" and body[1:2] != b"\0"  # or another encoding is looked for
        text = body.decode() if is_plain else body.decode(json.detect_encoding(body))
        if is_clients and len(text) > MAX_NESTED:
            _check_size(text)
        found = _found(text)
        if "\\u" in text and _HALF_PAIR.search(text):
            # Half a pair is no text: nothing could encode it later.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}"[:300]) from error
    if not isinstance(found, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(found).__name__}")
    return found


_BLANKS: Final = " \t\r\n"


def _found(text: str) -> object:
    """What the text says. Keys are counted only where there may be too many in one object."""
    if text.count(":") > MAX_KEYS:
        return _READ(text)
    try:
        found, end = _READ_QUICKLY(text)
    except ValueError:  # blanks before it, or no JSON: the other way tells where
        return _READ(text)
    return _READ(text) if text[end:].strip(_BLANKS) else found


def _check_size(text: str) -> None:
    """Raises BadRequest for more than any request has."""
    if all(_count(text, marks) <= most for marks, most, _ in _MARKS):
        return
    bare = text.replace("\\\\", "").replace('\\"', "")
    outside = "".join(bare.split('"')[::2])  # what stands between strings
    for marks, most, what in _MARKS:
        if (count := _count(outside, marks)) > most:
            raise BadRequest(f"the body has about {count} {what}; the limit is {most}")


def _count(text: str, marks: str) -> int:
    return sum(map(text.count, marks))


def _object(pairs: list[tuple[str, Any]]) -> Json:
    """Refuses what no request has and what would take minutes to refuse key by key."""
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys; the limit is {MAX_KEYS}")
    return dict(pairs)


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# A decoder that is made anew for each body costs as much as what it does.
_READ_QUICKLY: Final = json.JSONDecoder(parse_constant=no_constant).raw_decode
_READ: Final = json.JSONDecoder(parse_constant=no_constant, object_pairs_hook=_object).decode


def check_bearer(request: web.Request, key: ClusterKey | None) -> None:
    """Raises Unauthorized unless the request carries the cluster's token, or there is no key."""
    if key is not None and not key.is_bearer(request.headers.get("authorization")):
        raise Unauthorized("the cluster's bearer token is missing or wrong")


# Answers that both kinds of servers give.


async def say_last(request: web.Request, response: web.StreamResponse, event: bytes) -> None:
    """The last event of a stream that has begun; whoever does not take it is cut off."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await response.write(event)
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        cut_off(request)


def cut_off(request: web.Request) -> None:
    """Break the connection: how an answer that is not whole says so."""
    if request.transport is not None:
        request.transport.abort()


def metrics_response(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST}
    )


# Servers.


async def listen(
    app: web.Application, host: str, port: int, grace_s: float = 5.0
) -> tuple[web.AppRunner, int]:
    """Serve on this address; the real port is told. Clean up the runner to stop.

    A handler is cancelled when its client goes away. Raises ConfigError for a taken port or an
    address that is not this host's.
    """
    socket = listening(host, port)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=grace_s
    )
    await runner.setup()
    await web.SockSite(runner, socket).start()
    return runner, int(socket.getsockname()[1])


# Middlewares.


def require_bearer(key: ClusterKey | None) -> Middleware:
    """A middleware that lets only the cluster's members past."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_bearer(request, key)
        return await handler(request)

    return middleware


def error_middleware(stage: str) -> Middleware:
    """A middleware, put first, that turns what handlers raise into typed JSON errors.

    A handler that has begun a stream ends it itself: no second answer can follow the first.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request_id_of(request)
        try:
            return await handler(request)
        except PdrtError as error:
            response = error_response(error, request_id_of(request), stage)
            if request.content.exception():
                response.force_close()  # where the next request begins cannot be known
            return response
        except web.HTTPException as error:
            return _http_exception(error, request_id, stage)
        except Exception:
            log.exception("handler_failed", request_id=request_id, path=request.path)
            return error_response(PdrtError("an internal error; see the log"), request_id, stage)

    return middleware


def _http_exception(error: web.HTTPException, request_id: str, stage: str) -> web.StreamResponse:
    """aiohttp's own refusals (no such path, wrong method) in our form, with its headers."""
    if error.status < 400:
        raise error
    kind = _BY_STATUS.get(error.status, PdrtError)
    body = error_body(kind(error.text or error.reason), request_id, stage)
    body["error"]["type"] = _TYPES.get(error.status, "server_error")
    if error.status not in _BY_STATUS:
        body["error"]["code"] = error.reason.lower().replace(" ", "_")
    response = web.json_response(body, status=error.status)
    if allow := error.headers.get("allow"):
        response.headers["allow"] = allow
    return response
