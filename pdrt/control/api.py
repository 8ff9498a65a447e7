"""The HTTP API of a leader: for clients (hybrid), for the router's legs, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdrt.control import openai
from pdrt.control.http import (
    PATH_HEADER,
    Json,
    add_request_id,
    check_bearer,
    error_middleware,
    metrics_response,
)
from pdrt.control.leader import Leader
from pdrt.control.order import PATHS, TOKEN_PATHS
from pdrt.control.serving import PD_PATH, Serving
from pdrt.control.tokenize import Tokenizing
from pdrt.errors import NotFound

STALL_S: Final = 10.0  # an event loop that has not turned for so long is not alive
_OPEN: Final = frozenset({"/health", "/ready", "/metrics"})
_CLIENT: Final = frozenset({*PATHS, *TOKEN_PATHS, "/v1/models", "/v1/models/{name}"})


def make_app(leader: Leader) -> web.Application:
    """Run it with `http.listen`: without handler_cancellation a client that leaves is not seen."""
    serving, operation, tokens = Serving(leader), _Operation(leader), Tokenizing(leader)
    app = web.Application(middlewares=[error_middleware(leader.role), _allow(leader)])
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(_add_path)
    app.on_cleanup.append(operation.close)
    app.add_routes([web.post(path, serving.serve) for path in PATHS])
    app.add_routes(
        [
            web.get("/v1/models", operation.models),
            web.get("/v1/models/{name:.+}", operation.model),  # it may have a slash in it
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/health", operation.health),
            web.get("/ready", operation.ready),
            web.get("/metrics", operation.metrics),
            web.get("/internal/status", operation.status),
            web.post("/internal/rebind", serving.rebind),
            web.post("/internal/prefill", serving.prefill_again),
            web.post("/admin/drain", operation.drain),
        ]
    )
    return app


class _Operation:
    """What is not a generation."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._created = int(leader.wall())

    async def health(self, _request: web.Request) -> web.Response:
        """Liveness: the process is there and its loop turns. Also shows what is broken."""
        stalled = self._leader.stalled_s()
        is_alive = stalled < STALL_S
        body = {"status": "ok" if is_alive else f"stalled for {stalled:.1f} s"}
        return web.json_response(body | self._leader.health(), status=200 if is_alive else 503)

    async def ready(self, _request: web.Request) -> web.Response:
        """Readiness: a request would succeed."""
        if reason := self._leader.why_not_ready():
            return web.json_response({"ready": False, "reason": reason}, status=503)
        return web.json_response({"ready": True})

    async def metrics(self, _request: web.Request) -> web.Response:
        return metrics_response(self._leader.registry)

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response(openai.models([self._model()]))

    async def model(self, request: web.Request) -> web.Response:
        leader, name = self._leader, request.match_info["name"]
        if name != leader.model:
            raise NotFound(f"model {name!r} is not served here; {leader.model!r} is")
        return web.json_response(self._model())

    def _model(self) -> Json:
        leader = self._leader
        return openai.model(leader.model, self._created, leader.limits.max_model_len)

    async def status(self, _request: web.Request) -> web.Response:
        return web.json_response(self._leader.status())

    async def drain(self, _request: web.Request) -> web.Response:
        """No new work from now on; ask again to learn whether the rest is done."""
        self._leader.drain()
        rooms = self._leader.dispatcher.load().rooms
        body: Mapping[str, object] = {"status": "draining", "drained": not rooms, "rooms": rooms}
        return web.json_response(body, status=202 if rooms else 200)

    async def close(self, _app: web.Application) -> None:
        self._leader.text.close()
        await self._leader.grammars.close()


def _allow(leader: Leader) -> Middleware:
    """Health is for everybody, a hybrid's client API for clients, the rest for the cluster."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else request.path
        if path in _OPEN:
            return await handler(request)
        # What is nowhere is a client's mistake too, and a key would not help.
        if leader.role == "hybrid" and (path in _CLIENT or resource is None):
            _check_client(request, leader)
        else:
            check_bearer(request, leader.key)
        return await handler(request)

    return middleware


def _check_client(request: web.Request, leader: Leader) -> None:
    """Raises PdrtError unless a client's key or the cluster's is sent, or none is needed."""
    if leader.keydoor is None:
        return
    header = request.headers.get("authorization", "")
    if leader.is_member(header):
        return
    if refusal := leader.keydoor.refusal(request.method, request.path, header):
        raise refusal


async def _add_path(request: web.Request, response: web.StreamResponse) -> None:
    if path := request.get(PD_PATH):
        response.headers[PATH_HEADER] = path
