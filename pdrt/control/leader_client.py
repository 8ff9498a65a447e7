"""How an instance's other nodes talk to their leader: join it, find the heads of groups there."""

from __future__ import annotations

from typing import Final

from aiohttp import ClientSession
from pydantic import TypeAdapter

from pdrt.control.bootstrap_client import Server
from pdrt.errors import NotFound
from pdrt.keys import ClusterKey
from pdrt.messages import GroupPlace, NodeHello, NodeWelcome

JOIN_PATH: Final = "/internal/join"
GROUP_PATH: Final = "/internal/groups"
HELLO: Final = TypeAdapter(NodeHello)
WELCOME: Final = TypeAdapter(NodeWelcome)
PLACE: Final = TypeAdapter(GroupPlace)


class LeaderClient:
    """One leader's API, reached by HTTP. Raises PdrtError only."""

    def __init__(
        self, session: ClientSession, url: str, key: ClusterKey, timeout_s: float = 2.0
    ) -> None:
        self.where = f"leader {url.removeprefix('http://')}"
        self._server = Server(session, self.where, url, key, timeout_s)

    async def join(self, hello: NodeHello) -> NodeWelcome:
        """Raises BadRequest or Conflict for what will not be otherwise when asked again."""
        return await self._server.call("POST", JOIN_PATH[1:], WELCOME, HELLO.dump_json(hello))

    async def announce(self, dp: int, place: GroupPlace) -> None:
        """Raises Conflict when a later life of this rank has announced itself."""
        path = f"{GROUP_PATH[1:]}/{dp}"
        _ = await self._server.call("PUT", path, PLACE, PLACE.dump_json(place))

    async def find(self, dp: int) -> GroupPlace | None:
        """None while tp 0 of that dp rank has not announced itself."""
        try:
            return await self._server.call("GET", f"{GROUP_PATH[1:]}/{dp}", PLACE)
        except NotFound:
            return None
