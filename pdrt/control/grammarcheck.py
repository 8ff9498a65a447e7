"""Whether a grammar can be compiled, asked of a process beside the leader before work begins.

A small schema may stand for hours of work or gigabytes of memory, and a library's call cannot be
ended: so a child compiles it, within bounds, and is killed and replaced when it takes too long. It
is started with the first grammar. What was found good is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from pdrt.device.compiler import Find, check_library
from pdrt.errors import BadRequest, Overloaded, Unavailable
from pdrt.messages import Grammar

_REMEMBERED: Final = 1024
_WAITING: Final = 64
_START_S: Final = 60.0  # imports, and a large model's tokens


class GrammarCheck:
    """For the model at `path`, which has `vocab` tokens."""

    def __init__(
        self,
        path: str,
        vocab: int,
        eos: Collection[int],
        *,
        within_s: float = 2.0,
        find: Find = importlib.util.find_spec,
    ) -> None:
        self._path, self._vocab, self._eos = path, vocab, eos
        self._within_s, self._find = within_s, find
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._child: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    @property
    def pid(self) -> int | None:
        """The child's, if there is one."""
        return None if self._child is None else self._child.pid

    async def check(self, grammar: Grammar) -> None:
        """Raises BadRequest that says what is wrong with it, or what is missing here."""
        check_library(self._find)
        if not self._eos:
            raise BadRequest("response_format: this model has no end token to end an answer with")
        digest = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        if digest not in self._good:
            if self._waiting >= _WAITING:
                raise Overloaded(f"{self._waiting} requests wait for their grammars")
            self._waiting += 1
            try:
                async with self._turn:
                    if digest not in self._good:
                        await self._try(grammar)
            finally:
                self._waiting -= 1
        self._good[digest] = None
        self._good.move_to_end(digest)
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    async def _try(self, grammar: Grammar) -> None:
        """A child that did not answer is of no use to the next one."""
        has_answered = False
        try:
            problem = await self._ask(grammar)
            has_answered = True
        finally:
            if not has_answered:
                await self.close()
        if problem:
            raise BadRequest(problem)

    async def _ask(self, grammar: Grammar) -> str:
        """What is wrong with it; empty when nothing is."""
        child = self._child or await self._start()
        assert child.stdin is not None
        line = json.dumps({"kind": grammar.kind, "text": grammar.text}) + "\n"
        try:
            async with asyncio.timeout(self._within_s):
                child.stdin.write(line.encode())
                await child.stdin.drain()
                return await _problem_of(child)
        except TimeoutError:
            raise BadRequest(
                f"the grammar is too large: it takes more than {self._within_s:g} s to compile"
            ) from None
        except (EOFError, ConnectionError):
            raise BadRequest("the grammar is too large: it takes too much memory") from None

    async def _start(self) -> Process:
        """Raises BadRequest when the library cannot read this model's tokens."""
        eos = ",".join(map(str, self._eos))
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "pdrt.device.trialcompiler", self._path, str(self._vocab), eos),
            str(int(self._within_s) + 2),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
        )
        try:
            async with asyncio.timeout(_START_S):
                problem = await _problem_of(child)
        except (TimeoutError, EOFError):
            raise Unavailable("the process that compiles grammars does not start") from None
        if problem:
            raise BadRequest(problem)
        return child

    async def close(self) -> None:
        """End the child; the next grammar starts another."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _problem_of(child: Process) -> str:
    """What its next line says. Raises EOFError when it has ended."""
    assert child.stdout is not None
    line = await child.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return str(json.loads(line)["problem"])
