"""A worker, and a group, that copies KV to host memory: all ranks do, and a failure is harmless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdrt import messages, steps
from pdrt.data.process import this_process
from pdrt.device.batch import Draw, Drawn, SeqStep
from pdrt.device.moves import Move, Moves
from pdrt.device.null import NullRunner
from pdrt.errors import ConfigError
from pdrt.link import Link
from pdrt.members import Members
from pdrt.messages import (
    FromFollower,
    Hello,
    Join,
    Joined,
    Ready,
    Sampling,
    Stats,
    Step,
    Stepped,
    ToFollower,
)
from tests.test_worker import Rig, rigged, submit
from tests.test_worker_group import Device, Head, Member, follower_end, group, member, spec

BLOCK = NullRunner(16).layout.block_bytes
TIGHT: dict[str, Any] = {
    "scheduler": {
        "kv_memory": 9 * BLOCK,
        "num_reserved_decode_tokens": 1,
        "adaptive_reserve": False,
        "retraction": "copy",
        "host_kv_memory": 40 * BLOCK,
    }
}
ROOMS = range(1, 9)


async def answers(rig: Rig | Member) -> dict[int, list[int]]:
    """Of 8 requests of up to 6 blocks, in 9."""
    for room in ROOMS:
        await rig.tell(submit(room, 60, prompt=range(room, room + 30)))
    said: dict[int, list[int]] = {}
    left = set(ROOMS)
    while left:
        for output in (await rig.until(messages.Outputs)).items:
            assert output.problem is None
            said.setdefault(output.room, []).extend(output.tokens)
            left -= {output.room} if output.finish else set()
    return said


async def last_stats(rig: Rig | Member) -> Stats:
    """When all is over."""
    while True:
        stats = await rig.until(Stats)
        assert isinstance(stats, Stats)
        if not stats.rooms and stats.counters.get("retractions", 0):
            return stats


async def alone(folder: Path) -> dict[int, list[int]]:
    async with rigged(folder, scheduler={"kv_memory": 1 << 20}) as rig:
        await rig.until(Ready)
        return await answers(rig)


async def test_a_worker_under_pressure_copies_and_computes_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    want = await alone(tmp_path / "alone")
    async with rigged(tmp_path, **TIGHT) as rig:
        await rig.until(Ready)
        assert await answers(rig) == want
        stats = await last_stats(rig)
    assert stats.counters["retractions"] == stats.counters["retractions_copy"]
    assert stats.counters["prompt_tokens_computed"] == len(ROOMS) * 30
    assert (stats.host_blocks_used, stats.host_blocks_total, stats.blocks_used) == (0, 40, 0)


class Drawing(Device):
    """Draws whatever rank it is, greedily as the requests want it, and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.drew: list[int] = []

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        greedy = Draw(Sampling(temperature=0), (), 0)
        drawn = super().execute([replace(s, draw=s.draw and greedy) for s in batch])
        self.drew += [one.token for one in drawn]
        return drawn


async def test_all_ranks_of_a_group_copy(tmp_path: Path) -> None:
    """Each device is a whole one here, so that each rank alone must have the right KV."""
    (tmp_path / "alone").mkdir()
    want = await alone(tmp_path / "alone")
    first, second = Drawing(), Drawing()
    async with group(tmp_path, first, second, **TIGHT) as (head, follower):
        await head.until(Ready)
        assert await answers(head) == want
        stats = await last_stats(head)
        while len(second.drew) < len(first.drew):
            await follower.until(Stats)
    assert stats.counters["retractions_copy"] > 0
    assert second.drew == first.drew


async def played_follower(
    link: Link[ToFollower, FromFollower], lose: Callable[[Moves], tuple[int, ...]], copies: int
) -> None:
    """Computes nothing, and says which copies it did not make."""
    heard: AsyncIterator[ToFollower] = link.listen()
    hello = Hello(
        process=this_process(), layout=NullRunner(16).layout, blocks=9, host_blocks=copies
    )
    await link.on(hello)
    async for message in heard:
        match message:
            case Join():
                await link.on(Joined())
            case Step():
                lost = lose(steps.unpack_moves(message))
                await link.on(Stepped(number=message.number, lost=lost))
            case _:
                raise AssertionError(message)


async def test_a_copy_that_fails_on_a_follower_is_known_before_its_request_goes_on(
    tmp_path: Path,
) -> None:
    """CASES 70: one in three, at leaving or at return. The process lives, the tokens are right."""
    (tmp_path / "alone").mkdir()
    want = await alone(tmp_path / "alone")
    moved: list[int] = []

    def lose(moves: Moves) -> tuple[int, ...]:
        keys = [move.key for move in (*moves.saves, *moves.loads)]
        moved.extend(keys)
        return tuple(keys) if keys and len(moved) % 3 == 0 else ()

    async with AsyncExitStack() as stack:
        made = spec(tmp_path, 0, **TIGHT)
        link = follower_end(stack, made, 1)
        playing = asyncio.create_task(played_follower(link, lose, 40))
        head = await member(stack, made, Device())
        await head.until(Ready)
        assert await answers(head) == want
        stats = await last_stats(head)
        playing.cancel()
    assert stats.counters["host_copies_failed"] > 0
    assert stats.counters["retractions_copy"] > stats.counters["host_copies_failed"]
    assert stats.host_blocks_used == 0


async def test_what_a_follower_did_not_copy_is_waited_for(tmp_path: Path) -> None:
    """Else a token that rests on it could be said before."""
    members = Members(spec(tmp_path, 0), asyncio.Event())
    members.bind()
    running = asyncio.create_task(members.run())
    moves = Moves(saves=(Move(7, (0,), (0,)),))
    async with AsyncExitStack() as stack:
        stack.callback(members.close)
        follower = follower_end(stack, spec(tmp_path, 0), 1)
        await members.step([SeqStep(1, [1], 0, [0], None)], moves)
        members.computed()
        asked = asyncio.create_task(members.lost())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not asked.done()
        await follower.on(Stepped(number=1, lost=(7,)))
        assert await asked == {7}
        assert await members.lost() == set()
        running.cancel()


async def test_ranks_with_unequal_room_for_copies_are_a_wrong_setting(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        made = spec(tmp_path, 0, **TIGHT)
        link = follower_end(stack, made, 1)
        playing = asyncio.create_task(played_follower(link, lambda _moves: (), 39))
        head = await member(stack, made, Device())
        told = await head.end()
        playing.cancel()
    assert told.startswith(ConfigError.code)
    assert "host_kv_memory: worker 0,0,0 has room for 40 KV blocks and worker 0,0,1 for 39" in told


async def test_a_follower_makes_the_moves_of_a_step_before_it(tmp_path: Path) -> None:
    made = spec(tmp_path, 1, **TIGHT)
    async with AsyncExitStack() as stack:
        head, device = Head(made), Device()
        stack.callback(head.link.close)
        await member(stack, made, device)
        hello = await anext(head.heard)
        assert isinstance(hello, Hello)
        assert hello.host_blocks == 40
        await head.say(Join(rendezvous=str(tmp_path / "r")))
        assert isinstance(await anext(head.heard), Joined)
        prompt = list(range(16))
        there = Moves(saves=(Move(1, (0,), (5,)),))
        back = Moves(loads=(Move(1, (5,), (3,)),))
        await head.say(steps.pack(1, [SeqStep(1, prompt, 0, [0], None)]))
        await head.say(steps.pack(2, [SeqStep(2, [9] * 16, 0, [0], None)], there))
        for _ in range(2):
            assert isinstance(await anext(head.heard), Stepped)
        await head.say(steps.pack(3, [], back))
        assert await anext(head.heard) == Stepped(number=3)
        pool = device.runner._pool  # noqa: SLF001 - what is in the memory is all there is to see
        fresh = NullRunner(16)
        memory = bytearray(BLOCK)
        fresh.bind(memoryview(memory), 1)
        fresh.execute([SeqStep(1, prompt, 0, [0], None)])
        assert pool[3].tobytes() == bytes(memory)
        assert pool[0].tobytes() != bytes(memory)


@pytest.mark.parametrize("retraction", ["reprefill", "local"])
async def test_without_copies_no_host_memory_is_taken(tmp_path: Path, retraction: str) -> None:
    scheduler = {**TIGHT["scheduler"], "retraction": retraction}
    async with rigged(tmp_path, scheduler=scheduler) as rig:
        await rig.until(Ready)
        stats = await rig.until(Stats)
    assert stats.host_blocks_total == 0
