"""A server that speaks OpenAI's schema and does nothing of what is asked, in several ways."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

from aiohttp import web
from aiohttp.test_utils import TestServer

Manner: TypeAlias = Literal["deaf", "empty", "false", "silent"]
TEXT: Final = "abc abc abc def"
Json: TypeAlias = dict[str, Any]


class WrongServer:
    """deaf: one fixed answer, whatever was asked; empty: `{}`; false: counts and ends that are not
    true, and never the same twice; silent: the connection is closed.
    """

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self._numbers = itertools.count()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [self._model()]})
        match self.manner:
            case "silent":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "empty":
                return web.json_response({})
            case "deaf" | "false":
                return await self._said(request)

    def _model(self) -> Json:
        told = "another" if self.manner == "false" and next(self._numbers) else "wrong"
        return {"id": told, "object": "model", "created": 0, "owned_by": "x", "max_model_len": 9}

    async def _said(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read() or b"{}")
        except ValueError:
            body = {}
        is_chat = "chat" in request.path
        if not body.get("stream"):
            return web.json_response(self._whole(is_chat=is_chat))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in (TEXT[:4], TEXT[4:]):
            chunk = self._whole(is_chat=is_chat, part=part)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n" if self.manner == "deaf" else b"")
        return response

    def _whole(self, *, is_chat: bool, part: str | None = None) -> Json:
        number = next(self._numbers) if self.manner == "false" else 0
        text = (TEXT if part is None else part) + (str(number) if number else "")
        choice: Json = {"index": 0, "finish_reason": "length"}
        if not is_chat:
            choice |= {"text": text, "logprobs": None}
        elif part is None:
            choice |= {"message": {"role": "assistant", "content": text}}
        else:
            choice |= {"delta": {"content": text}}
        kind = "chat.completion" if is_chat else "text_completion"
        if is_chat and part is not None:
            kind = "chat.completion.chunk"
        usage = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21 + number}
        told: Json = {"id": f"c{number}", "object": kind, "created": 0, "model": "wrong"}
        told |= {"choices": [choice]}
        return told if part is not None else told | {"usage": usage}


@asynccontextmanager
async def serving(manner: Manner) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 31)
    app.router.add_route("*", "/{tail:.*}", WrongServer(manner).answer)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"
