"""The leader's HTTP for its other nodes, which join here, and for the heads of groups."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web
from pydantic import TypeAdapter

from pdrt.control.bootstrap import parse
from pdrt.control.http import read_body
from pdrt.control.leader_client import GROUP_PATH, HELLO, JOIN_PATH, PLACE, WELCOME
from pdrt.control.nodes import Board, Nodes
from pdrt.errors import BadRequest

T = TypeVar("T")
_MAX_BODY = 1 << 16


def add_routes(app: web.Application, nodes: Nodes, board: Board) -> None:
    """To a leader's app, which lets only the cluster get to them."""

    async def join(request: web.Request) -> web.Response:
        hello = parse(HELLO, await read_body(request, _MAX_BODY))
        return _json(WELCOME, nodes.join(hello))

    async def announce(request: web.Request) -> web.Response:
        place = parse(PLACE, await read_body(request, _MAX_BODY))
        board.announce(_dp(request), place)
        return _json(PLACE, place)

    async def find(request: web.Request) -> web.Response:
        return _json(PLACE, board.find(_dp(request)))

    app.router.add_post(JOIN_PATH, join)
    app.router.add_put(f"{GROUP_PATH}/{{dp}}", announce)
    app.router.add_get(f"{GROUP_PATH}/{{dp}}", find)


def _dp(request: web.Request) -> int:
    text = request.match_info["dp"]
    if not (text.isascii() and text.isdigit() and len(text) < 8):
        raise BadRequest(f"dp rank {text[:20]!r} is no number")
    return int(text)


def _json(adapter: TypeAdapter[T], value: T) -> web.Response:
    return web.Response(body=adapter.dump_json(value), content_type="application/json")
