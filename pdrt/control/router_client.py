"""A leader's calls to the routers it registers with, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from pdrt.control.http import error_from_answer, error_of_client
from pdrt.control.leases import Registration
from pdrt.errors import BadMessage
from pdrt.keys import ClusterKey

_MOST: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RouterClient:
    session: ClientSession
    key: ClusterKey
    timeout_s: float

    async def register(self, url: str, said: Registration) -> float:
        """The lease in seconds. Raises PdrtError."""
        where = f"router {url}"
        headers = {"authorization": f"Bearer {self.key.bearer()}"}
        try:
            async with self.session.post(
                url.rstrip("/") + "/internal/register",
                json=said.model_dump(),
                headers=headers,
                timeout=ClientTimeout(total=self.timeout_s),
                allow_redirects=False,
            ) as response:
                body = await response.content.read(_MOST)
        except (ClientError, TimeoutError, OSError) as error:
            raise error_of_client(error, where) from error
        if response.status != 200:
            raise error_from_answer(response.status, body, where)
        return _lease(body, where)


def _lease(body: bytes, where: str) -> float:
    try:
        told: object = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    lease = told.get("lease_s") if isinstance(told, Mapping) else None
    if not isinstance(lease, int | float) or not 0 < lease <= 86400:
        raise BadMessage(f"{where} told no lease: {body[:200]!r}")
    return float(lease)
