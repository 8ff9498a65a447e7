"""POST /tokenize and /detokenize: what a model's tokenizer makes of a text, a chat or tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from aiohttp import web
from pydantic import Field

from pdrt.control.http import Json, read_json
from pdrt.control.leader import Leader
from pdrt.control.order import Chat, parse
from pdrt.control.reply import long_json_of
from pdrt.control.schema import TextPrompt, TokenId, checked
from pdrt.control.strict import Strict
from pdrt.errors import BadRequest, NotFound

_FEW: Final = 4096  # tokens, which are written faster than a thread starts
_OF_CHAT: Final = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
    }
)


class TokenizeRequest(Strict):
    prompt: TextPrompt
    model: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    model: str | None = None


class Tokenizing:
    """For anybody who may ask the leader at all: nothing is computed."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        text = self._leader.text
        if "messages" in body:
            ids = await text.ids(_chat(body))
        else:
            asked = checked(TokenizeRequest, body)
            special = asked.add_special_tokens is not False
            ids = await text.run(partial(text.encode, special=special), asked.prompt)
        limit = self._leader.limits.max_model_len
        told: Json = {"tokens": ids, "count": len(ids), "max_model_len": limit}
        said = await text.run(long_json_of, told) if len(ids) > _FEW else long_json_of(told)
        return web.Response(body=said, content_type="application/json")

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = checked(DetokenizeRequest, await self._body(request)).tokens
        if ids:
            self._leader.limits.check_prompt(ids)
        text = self._leader.text
        return web.json_response({"prompt": await text.run(text.decode, ids)})

    async def _body(self, request: web.Request) -> Json:
        """Raises NotFound for another model's."""
        leader = self._leader
        body = await read_json(request, leader.limits.max_body_bytes)
        if body.get("model") not in (None, "", leader.model):
            raise NotFound(f"model {body['model']!r} is not served here; {leader.model!r} is")
        return body


def _chat(body: Json) -> Chat:
    """The conversation that a chat request with these fields has."""
    if body.get("add_special_tokens"):
        raise BadRequest("add_special_tokens: a chat has those of its template")
    fields = {k: v for k, v in body.items() if k not in ("model", "add_special_tokens")}
    if unknown := fields.keys() - _OF_CHAT:
        raise BadRequest(f"{min(unknown)} is not a known field beside messages")
    prompt = parse("chat", fields).prompt
    assert isinstance(prompt, Chat), "a chat request has one"
    return prompt
