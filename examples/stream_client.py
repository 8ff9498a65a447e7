"""Streams an answer from pdrt's /generate with aiohttp.

python examples/stream_client.py "Once upon a time" --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession


async def generate(session: ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """The chunks of a streamed answer: new text and ids, and last why it ended."""
    async with session.post(f"{url}/generate", json=body | {"stream": True}) as answer:
        if answer.status != 200:
            sys.exit(f"{answer.status}: {await answer.text()}")
        print(f"[request {answer.headers['x-request-id']}, {answer.headers['x-pd-path']}]")
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue  # an empty line between events, or an event's name
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                continue  # the end; who hangs up before the stream is over counts as gone
            chunk = json.loads(data)
            if "error" in chunk:
                sys.exit(f"\nthe answer ended early: {chunk['error']['message']}")
            yield chunk


async def main(prompt: str, url: str, max_tokens: int, api_key: str) -> None:
    sampling = {"max_tokens": max_tokens, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with ClientSession(headers=headers) as session:
        async for chunk in generate(session, url, {"prompt": prompt, "sampling_params": sampling}):
            print(chunk["output"], end="", flush=True)
            if chunk.get("finish_reason"):
                print(f"\n[{chunk['finish_reason']}, {chunk['usage']}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--api-key", default="", help="if the server wants one")
    options = parser.parse_args()
    try:
        url = options.url.rstrip("/")
        asyncio.run(main(options.prompt, url, options.max_tokens, options.api_key))
    except ClientError as error:
        sys.exit(f"nobody serves at {options.url}: {error}")
