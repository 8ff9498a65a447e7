"""Asking the bootstrap servers: each once, however many requests wait for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from pdrt.data.outward import FindRoute
from pdrt.errors import PdrtError, Unavailable
from pdrt.messages import Problem, Route, Source

Routes: TypeAlias = Callable[[Source], Awaitable[Route]]
Answered: TypeAlias = Callable[[FindRoute, Route | Problem], None]

_RETRY_S: Final = 0.1


class RouteFinder:
    """`routes` asks one server; it may be starting, so it is asked for `patience_s`."""

    def __init__(self, routes: Routes, patience_s: float, answered: Answered) -> None:
        self._routes, self._patience_s, self._answered = routes, patience_s, answered
        self.prefill_info_table: dict[tuple[str, int], Route] = {}
        self._asking: dict[tuple[str, int], list[FindRoute]] = {}

    def find(self, wish: FindRoute, group: asyncio.TaskGroup) -> None:
        """`answered` is told, at once when the answer is known."""
        where = wish.source.host, wish.source.port
        if route := self.prefill_info_table.get(where):
            self._answered(wish, route)
        elif where in self._asking:
            self._asking[where].append(wish)
        else:
            self._asking[where] = [wish]
            group.create_task(self._ask(wish.source))

    def forget(self, host: str, port: int) -> None:
        self.prefill_info_table.pop((host, port), None)

    async def _ask(self, source: Source) -> None:
        where = source.host, source.port
        answer = await self._answer(source)
        if isinstance(answer, Route):
            self.prefill_info_table[where] = answer
        for wish in self._asking.pop(where):
            self._answered(wish, answer)

    async def _answer(self, source: Source) -> Route | Problem:
        silent = Unavailable(f"{source.host}:{source.port} does not answer")
        problem = Problem.of(silent, "bootstrap")
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    try:
                        return await self._routes(source)
                    except PdrtError as error:
                        problem = Problem.of(error, "bootstrap")
                        if not error.retryable:
                            return problem
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            return problem
