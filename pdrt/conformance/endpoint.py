"""One deployment, asked through the official `openai` client, and bare where that hides things."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from urllib.parse import urlsplit

from aiohttp import ClientSession, ClientTimeout

from pdrt.chat import first_model
from pdrt.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

Json: TypeAlias = dict[str, Any]
PROMPT: Final = "The sea is"
ASK: Final = [{"role": "user", "content": "Say something about the sea."}]
SHORT: Final = 16  # tokens of most answers
_INSTALL: Final = "pip install 'pdrt[conformance]'"


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer as it came."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`model` is what requests name; `max_model_len` 0 where the server does not tell."""

    name: str
    base: str  # without /v1
    model: str
    client: AsyncOpenAI
    http: ClientSession
    api_key: str = ""
    max_model_len: int = 0
    patience_s: float = 5.0  # with a server that should refuse at once

    async def complete(self, **more: object) -> Completion:
        """Greedy and short unless told otherwise."""
        create = cast("Callable[..., Awaitable[Completion]]", self.client.completions.create)
        usual: Json = {"prompt": PROMPT, "max_tokens": SHORT, "temperature": 0}
        return await create(model=self.model, **usual | more)

    async def completing(self, **more: object) -> list[Completion]:
        """The chunks of a stream."""
        create = cast(
            "Callable[..., Awaitable[AsyncStream[Completion]]]", self.client.completions.create
        )
        usual: Json = {"prompt": PROMPT, "max_tokens": SHORT, "temperature": 0, "stream": True}
        return [chunk async for chunk in await create(model=self.model, **usual | more)]

    async def chat(self, **more: object) -> ChatCompletion:
        create = cast(
            "Callable[..., Awaitable[ChatCompletion]]", self.client.chat.completions.create
        )
        usual: Json = {"messages": ASK, "max_tokens": SHORT, "temperature": 0}
        return await create(model=self.model, **usual | more)

    async def chatting(self, **more: object) -> list[ChatCompletionChunk]:
        """The chunks of a stream."""
        create = cast(
            "Callable[..., Awaitable[AsyncStream[ChatCompletionChunk]]]",
            self.client.chat.completions.create,
        )
        usual: Json = {"messages": ASK, "max_tokens": SHORT, "temperature": 0, "stream": True}
        return [chunk async for chunk in await create(model=self.model, **usual | more)]

    # Bare HTTP.

    async def post(
        self, path: str, body: Json | bytes, headers: Mapping[str, str] | None = None
    ) -> Raw:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, data, headers)

    async def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Raw:
        told = {"content-type": "application/json", **self._key(), **(headers or {})}
        async with self.http.request(method, self.base + path, data=data, headers=told) as answer:
            named = {name.lower(): value for name, value in answer.headers.items()}
            return Raw(answer.status, named, await answer.text(errors="replace"))

    def _key(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def overlong(self, size: int) -> Raw | None:
        """What is said to a body of that size of which nothing comes; None: nothing."""
        url = urlsplit(self.base)
        is_tls = url.scheme == "https"
        reader, writer = await asyncio.open_connection(
            url.hostname, url.port or (443 if is_tls else 80), ssl=is_tls or None
        )
        try:
            key = "".join(f"{name}: {value}\r\n" for name, value in self._key().items())
            head = f"POST {url.path}/v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\n{key}"
            head += f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
            writer.write(head.encode())
            async with asyncio.timeout(self.patience_s):
                first = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                lines = [line.partition(":") for line in first.split("\r\n")[1:] if line]
                headers = {name.lower(): value.strip() for name, _, value in lines}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
            return Raw(int(first.split()[1]), headers, body.decode(errors="replace"))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            return None
        finally:
            writer.close()


@asynccontextmanager
async def opened(
    name: str, base: str, model: str, api_key: str, timeout_s: float
) -> AsyncIterator[Endpoint]:
    """Raises ConfigError without the client, Unavailable when nobody serves there."""
    try:
        import openai
    except ImportError:
        raise ConfigError(f"the official client is not installed: {_INSTALL}") from None
    client = openai.AsyncOpenAI(
        base_url=f"{base}/v1", api_key=api_key or "none", max_retries=0, timeout=timeout_s
    )
    async with client, ClientSession(timeout=ClientTimeout(total=timeout_s)) as http:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        async with ClientSession(headers=headers) as asking:
            named = model or await first_model(asking, f"{base}/v1")
        found = Endpoint(name, base, named, client, http, api_key)
        yield replace(found, max_model_len=await _longest(found), patience_s=min(5.0, timeout_s))


async def _longest(endpoint: Endpoint) -> int:
    answer = await endpoint.ask("GET", "/v1/models")
    try:
        told = [each for each in answer.json["data"] if each["id"] == endpoint.model]
        return int(told[0].get("max_model_len") or 0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return 0
