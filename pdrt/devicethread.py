"""The device thread of a worker, with the model's shard and the KV memory in it.

Loading and computing block, so they have a thread of their own; the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeAlias, TypeVar

from pdrt.config import NodeConfig
from pdrt.data.memory import PoolMemory
from pdrt.device.backends import Progress, open_runner, retraction_of
from pdrt.device.batch import Drawn, Runner, SeqStep
from pdrt.device.compiler import LIBRARY
from pdrt.device.cores import pin
from pdrt.device.moves import Moves
from pdrt.device.places import Rendezvous
from pdrt.device.poolsize import host_bytes, pool_blocks
from pdrt.device.spare import Spare, spare_blocks
from pdrt.errors import BadRequest, PeerLost
from pdrt.messages import Grammar, Loading
from pdrt.modelspec import NULL_PATH, ModelSpec
from pdrt.spawn import WorkerSpec

P = ParamSpec("P")
T = TypeVar("T")
Load: TypeAlias = Callable[
    [NodeConfig, Progress, int, int], Runner
]  # number in the group, and its size
_MEET_S: Final = 60.0  # for the ranks of a group to come to a sum; `members` misses the dead first


class DeviceThread:
    """`load` first; `tell` hears of its progress, in the event loop."""

    def __init__(
        self, spec: WorkerSpec, tell: Callable[[Loading], None], load: Load = open_runner
    ) -> None:
        self._spec, self._tell, self._load = spec, tell, load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._loop = asyncio.get_running_loop()
        self.max_len = 0  # tokens that a sequence may have
        self.runner: Runner
        self.memory: PoolMemory
        self.spare: Spare

    async def load(self) -> None:
        """Raises PeerLost when it takes too long, ConfigError and what else the device dislikes."""
        within_s = self._spec.config.timeouts.startup_s
        try:
            async with asyncio.timeout(within_s):
                await self._load_all()
        except TimeoutError:
            who = f"worker {self._spec.rank}"
            raise PeerLost(
                f"{who} did not load within {within_s:g} s ([timeouts] startup_s)"
            ) from None

    async def _load_all(self) -> None:
        config, size = self._spec.config, 1 + len(self._spec.followers)
        self.max_len = ModelSpec.of(config.model).max_model_len
        await self.run(pin, config, self._spec.place)
        self.runner = await self.run(self._load, config, self._progress, self._spec.member, size)
        self.memory = await self.run(self._make_memory)
        self.spare = await self.run(self._make_spare)

    def _make_memory(self) -> PoolMemory:
        """In the device thread, for touching each page takes a while."""
        config, layout = self._spec.config, self.runner.layout
        blocks = pool_blocks(config.scheduler, layout, self.max_len, host_bytes())
        self._progress("kv pool", 0, 1)
        transfer = config.transfer
        memory = PoolMemory(layout, blocks, transfer.slots, transfer.writers)
        self.runner.bind(memory.pool_view, blocks)
        self._progress("kv pool", 1, 1)
        return memory

    def _make_spare(self) -> Spare:
        """None for those who retract nothing, or want no copies."""
        spec, layout = self._spec, self.runner.layout
        blocks = 0
        if spec.role != "prefill" and retraction_of(spec.config) == "copy":
            blocks = spare_blocks(spec.config.scheduler, layout, self.max_len, host_bytes())
        return Spare(self.memory.pool_view, layout.block_bytes, blocks)

    async def step(
        self, batch: Sequence[SeqStep], moves: Moves
    ) -> tuple[list[Drawn], tuple[int, ...]]:
        """What was drawn, after the moves, and the keys of those that failed."""
        return await self.run(self._step, batch, moves)

    def _step(self, batch: Sequence[SeqStep], moves: Moves) -> tuple[list[Drawn], tuple[int, ...]]:
        lost = self.spare.do(moves) if moves else ()
        return self.runner.execute(batch), lost

    async def read_vocabulary(self) -> None:
        """For grammars, where they can be had; before we are ready.

        The library holds Python's lock for a second or more with a large one, and whoever pinged
        us meanwhile would take us for dead.
        """
        is_null = self._spec.config.model.path == NULL_PATH
        if is_null or importlib.util.find_spec(LIBRARY) is None:
            return
        with contextlib.suppress(BadRequest):  # requests with a grammar are told
            await self._loop.run_in_executor(self._beside, self.runner.prepare, None)

    async def prepare(self, grammar: Grammar) -> None:
        """Beside the device's steps, which go on meanwhile. Raises BadRequest."""
        await self._loop.run_in_executor(self._beside, self.runner.prepare, grammar)

    async def join(self, rendezvous: Rendezvous) -> None:
        """Meet the group's other ranks, all of which come now. Raises PeerLost."""
        await self.run(self.runner.join, rendezvous, _MEET_S)

    async def run(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """In the device thread, after what was given to it before."""
        return await self._loop.run_in_executor(self._thread, partial(call, *args, **more))

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Called in the device thread."""
        self._loop.call_soon_threadsafe(self._tell, Loading(stage=stage, done=done, total=total))
