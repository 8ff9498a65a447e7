"""Damaged KV is never used: it is found, named, and may be fetched from another prefill."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

import pytest

from pdrt.config import TransferSection
from pdrt.data.checksums import Corrupt
from pdrt.data.commands import (
    AbortReceiver,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
)
from pdrt.data.events import Quiet, Received, ReceiveFailed, ReceiverReady, SendEnded, SenderReady
from pdrt.data.process import this_process
from pdrt.data.transfer import State
from pdrt.data.transport.faulty import Fault
from tests.data.fabric import POOL, Fabric, Model, transfer
from tests.data.managers import HASH, LAYOUT, SOURCE, Side, record, route_to, side
from tests.data.ranks import Shape
from tests.data.rig import Rig
from tests.data.test_matrix import MODELS, SIZES

A: Final = (1, 0)
BAD: Final = Corrupt(blocks=1, index=1, block=7, head=0)


# The decisions.


class CheckedRig(Rig):
    """The decode rank wants checksums; the test says what comes of looking at them."""

    def __init__(self) -> None:
        super().__init__(checksums=True)
        self.verifying = self.ds[0].verifying

    def lose_p(self) -> None:
        self.kill_p()
        self.hear_of_death()

    def verified(self, corrupt: Corrupt | None = None) -> None:
        self.d.verified(self.verifying.pop(0).record, corrupt, self.now)
        self.settle()

    @property
    def failure(self) -> ReceiveFailed:
        (failed,) = (event for event in self.heard if isinstance(event, ReceiveFailed))
        return failed


@pytest.fixture
def rig() -> CheckedRig:
    """All has landed, the doorbell was rung, and the blocks are being looked at."""
    rig = CheckedRig()
    rig.open(A)
    rig.expect(A)
    rig.flow()
    rig.admit(A)
    rig.flow()
    rig.send_all(A)
    for write in list(rig.flights):
        rig.land(write)
    rig.scan()
    rig.land_all()
    rig.flow()
    return rig


def test_the_scheduler_hears_of_a_transfer_when_it_is_verified(rig: CheckedRig) -> None:
    assert [list(verify.blocks) for verify in rig.verifying] == [rig.ds[0].books.kept[A][0]]
    assert not rig.has(Received, A)
    rig.verified()
    assert rig.has(Received, A)
    rig.finish(A)
    rig.check_baseline()


def test_the_doorbell_of_what_is_being_verified_is_no_sign_of_damage(rig: CheckedRig) -> None:
    """The slot was found by the poll before the news of it came: it is not looked for again."""
    assert rig.d.rooms[A].state is State.TRANSFERRING
    rig.pass_time(6)  # and what was said is said again
    rig.flow()
    assert len(rig.verifying) == 1
    assert not rig.has(ReceiveFailed, A)


def test_a_damaged_block_fails_the_transfer_by_name_and_may_be_tried_elsewhere(
    rig: CheckedRig,
) -> None:
    """CASES 54: the first bad page is localised."""
    rig.verified(BAD)
    problem = rig.failure.problem
    assert problem.is_retryable
    assert rig.failure.was_written  # prefill is content, and will not try it again
    for word in ("prompt's block 1", "our block 7", "kv head 0", "prefill rank 0,0,0", "room 1"):
        assert word in problem.message
    assert rig.d.counters["blocks_corrupt"] == 1
    assert not rig.has(Received, A)
    assert A in rig.ds[0].books.kept, "the writer must say that it is quiet, as after any failure"
    rig.flow()
    assert rig.has(Quiet, A)
    rig.check_baseline()


def test_the_prompts_block_is_counted_from_its_beginning() -> None:
    rig = CheckedRig()
    rig.open(A)
    rig.expect(A, tokens=12)
    rig.flow()
    rig.admit(A, tokens=12, first_block=1)
    rig.flow()
    rig.send_all(A, tokens=12)
    rig.land_all()
    rig.flow()
    rig.verified(BAD)
    assert "prompt's block 2" in rig.failure.problem.message


Act = Callable[[CheckedRig], None]
OVER: Final[dict[str, Act]] = {
    "aborted": lambda rig: rig.abort_receive(A),
    "too late": lambda rig: rig.pass_time(61),
    "its peer died": lambda rig: rig.lose_p(),
}


@pytest.mark.parametrize("how", OVER)
@pytest.mark.parametrize("corrupt", [None, BAD])
def test_what_is_found_of_an_attempt_that_is_over_changes_nothing(
    rig: CheckedRig, how: str, corrupt: Corrupt | None
) -> None:
    OVER[how](rig)
    rig.verified(corrupt)
    rig.flow()
    assert not rig.has(Received, A)
    assert rig.told["ReceiveFailed", A] == (how != "aborted")
    assert rig.told["Quiet", A] == 1
    assert rig.d.counters["blocks_corrupt"] == 0
    rig.check_baseline()


def test_what_is_found_of_an_earlier_transfer_is_not_taken_for_this_ones(
    rig: CheckedRig,
) -> None:
    late = rig.verifying[0]
    rig.abort_receive(A)
    rig.flow()
    rig.d.verified(late.record, None, rig.now)
    rig.open(A)
    rig.flow()
    rig.admit(A)
    rig.d.verified(late.record, None, rig.now)
    rig.settle()
    assert rig.d.rooms[A].state is State.TRANSFERRING
    assert not rig.has(Received, A)


@pytest.mark.parametrize(
    ("shape", "head", "writer"),
    [
        (Shape(2, 1, heads=2, writers=2), 0, "0,0,0"),
        (Shape(2, 1, heads=2, writers=2), 1, "0,0,1"),
        (Shape(4, 1, heads=8, writers=4), 5, "0,0,2"),
        (Shape(4, 1, heads=2, writers=4), 1, "0,0,3"),  # replicas: by room 1, ranks 1 and 3 write
        (Shape(1, 2, heads=4), 1, "0,0,0"),
    ],
)
def test_of_several_writers_the_one_is_named_that_wrote_the_head(
    shape: Shape, head: int, writer: str
) -> None:
    rig = Rig(shape=shape, checksums=True)
    rig.open(A)
    rig.expect(A)
    rig.flow()
    rig.admit(A)
    rig.flow()
    rig.send_all(A)
    rig.land_all()
    rig.land_all()
    rig.flow()
    rig.scan()
    decode = rig.ds[0]
    decode.desk.verified(decode.verifying[0].record, Corrupt(1, 0, 7, head), rig.now)
    rig.settle()
    failed = next(event for event in rig.heard if isinstance(event, ReceiveFailed))
    assert f"kv head {head} from prefill rank {writer};" in failed.problem.message


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
async def test_every_pair_of_layouts_is_verified_head_by_head(
    prefill_tp: int, decode_tp: int, model: str
) -> None:
    """Each rank checks all its heads, whoever wrote them, and finds them sound."""
    heads, is_latent = MODELS[model]
    rng = random.Random(7)
    shape = Model(heads, "float32", is_latent)
    async with Fabric(shape, prefill_tp, decode_tp, "shm", checksums=True) as fabric:
        free = [rng.sample(range(POOL), POOL) for _ in fabric.ds]
        for room in range(2):
            await transfer(fabric, room, rng, free)
        for d in fabric.ds:
            assert d.desk.counters["blocks_corrupt"] == 0
            assert d.desk.counters["receives_done"] == 2


# Over real transports.


class Pair(NamedTuple):
    p: Side
    d: Side

    async def shake(self, room: int, blocks: tuple[int, ...], slot: int = 0) -> None:
        deadline = time.monotonic() + 60
        tokens = len(blocks) * LAYOUT.block_size
        self.p.manager.do(ExpectHandshakes(room, 0, tokens, HASH, deadline))
        self.d.manager.do(OpenReceiver(room, 0, SOURCE, deadline))
        await self.d.until(ReceiverReady, room)
        self.d.manager.do(AdmitReceiver(room, 0, blocks, 0, slot, tokens, HASH, deadline))
        await self.p.until(SenderReady, room)

    def send(self, room: int, src: tuple[int, ...], *faults: Fault | None) -> None:
        """Each block a chunk of its own, the last with the slot."""
        self.p.faulty.next_writes(*faults)
        for n, block in enumerate(src):
            last = record(room, len(src) * LAYOUT.block_size) if n == len(src) - 1 else None
            self.p.manager.do(SendBlocks(room, 0, (block,), n, last))

    async def outcome(self, room: int) -> Received | ReceiveFailed:
        while True:
            for kind in (Received, ReceiveFailed):
                if self.d.has(kind, room):
                    return await self.d.until(kind, room)
            self.d.told.clear()
            await self.d.told.wait()

    def equal(self, src: tuple[int, ...], dst: tuple[int, ...]) -> bool:
        ours, theirs = self.p.manager.memory.pool_view, self.d.manager.memory.pool_view
        size = LAYOUT.block_bytes
        return all(
            ours[s * size : (s + 1) * size] == theirs[d * size : (d + 1) * size]
            for s, d in zip(src, dst, strict=True)
        )

    def fill(self) -> None:
        """Each block has contents of its own, on both sides."""
        for seed, one in enumerate((self.p, self.d)):
            view = one.manager.memory.pool_view
            view[:] = random.Random(seed).randbytes(len(view))


async def new_pair(transport: str, checksums: bool = True) -> Pair:
    plain = TransferSection.model_validate({"threads": 2, "transport": transport})
    checked = plain.model_copy(update={"checksums": checksums})
    p = side("prefill", lambda _source: pytest.fail("prefill asks nobody"), transfer=plain)
    d = side("decode", lambda _source: route_to(p.endpoint, this_process()), transfer=checked)
    await p.start()
    await d.start()
    pair = Pair(p, d)
    pair.fill()
    return pair


async def stop(pair: Pair) -> None:
    await pair.d.stop()
    await pair.p.stop()


@pytest.fixture(params=["shm", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = await new_pair(request.param)
    yield pair
    await stop(pair)


async def test_what_arrives_as_it_was_sent_is_received(pair: Pair) -> None:
    await pair.shake(1, (9, 4, 5))
    pair.send(1, (0, 1, 2))
    assert isinstance(await pair.outcome(1), Received)
    assert pair.equal((0, 1, 2), (9, 4, 5))
    assert pair.d.manager.stats().counters.get("blocks_corrupt", 0) == 0


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.CORRUPT])
@pytest.mark.parametrize("chunk", [0, 1, 2])
async def test_a_damaged_chunk_fails_its_transfer_and_the_next_one_works(
    pair: Pair, fault: Fault, chunk: int
) -> None:
    """CASES 50, 54: whatever was damaged, no token is drawn from it."""
    await pair.shake(1, (9, 4, 5))
    faults = [None] * 3
    pair.send(1, (0, 1, 2), *faults[:chunk], fault)
    failed = await pair.outcome(1)
    assert isinstance(failed, ReceiveFailed)
    assert failed.problem.is_retryable
    await pair.d.until(Quiet, 1)
    await pair.p.until(SendEnded, 1)
    await pair.shake(2, (9, 4, 5))
    pair.send(2, (3, 4, 5))
    assert isinstance(await pair.outcome(2), Received)
    assert pair.equal((3, 4, 5), (9, 4, 5))
    await pair.p.until(SendEnded, 2)
    for one in pair:
        stats = one.manager.stats()
        assert (stats.rooms, stats.quarantined) == (0, 0)


async def test_the_damaged_block_is_named(pair: Pair) -> None:
    await pair.shake(1, (9, 4, 5))
    pair.send(1, (0, 1, 2), None, Fault.TRUNCATE)
    failed = await pair.outcome(1)
    assert isinstance(failed, ReceiveFailed)
    assert "the prompt's block 1, which is our block 4" in failed.problem.message
    assert pair.d.manager.stats().counters["blocks_corrupt"] == 1


async def test_what_an_earlier_prompt_left_is_not_taken_for_this_ones(pair: Pair) -> None:
    """CASES 57: a block that was never written is sound, with its old checksum, but not ours."""
    await pair.shake(1, (9, 4, 5, 6))
    pair.send(1, (0, 1, 2, 7))
    assert isinstance(await pair.outcome(1), Received)
    await pair.p.until(SendEnded, 1)
    await pair.shake(2, (9, 4, 5, 6))
    pair.p.faulty.next_writes(Fault.TRUNCATE)
    pair.p.manager.do(SendBlocks(2, 0, (0, 1, 3), 0))  # 3 never comes; 0 and 1 are as before
    pair.p.manager.do(SendBlocks(2, 0, (7,), 3, record(2, 4 * LAYOUT.block_size)))
    failed = await pair.outcome(2)
    assert isinstance(failed, ReceiveFailed)
    assert "our block 9" in failed.problem.message, "none of them came with a checksum"


async def test_without_checksums_a_damaged_chunk_is_believed() -> None:
    """What they are for: the slot alone cannot know."""
    pair = await new_pair("shm", checksums=False)
    await pair.shake(1, (9, 4, 5))
    pair.send(1, (0, 1, 2), Fault.CORRUPT)
    assert isinstance(await pair.outcome(1), Received)
    assert not pair.equal((0, 1, 2), (9, 4, 5))
    await stop(pair)


async def test_an_abort_while_blocks_are_verified_ends_quietly(pair: Pair) -> None:
    await pair.shake(1, (9, 4, 5))
    pair.send(1, (0, 1, 2))
    await pair.p.until(SendEnded, 1)  # its slot is there: decode finds it at its next look
    pair.d.manager.do(AbortReceiver(1, 0, "client_gone"))
    await pair.d.until(Quiet, 1)
    assert pair.d.manager.stats().rooms == 0


async def test_many_transfers_with_faults_by_chance_never_bring_wrong_bytes(pair: Pair) -> None:
    """CASES 54: a transfer is received whole and right, or it fails."""
    rng = random.Random(3)
    outcomes = {True: 0, False: 0}
    for room in range(1, 121):
        dst = tuple(rng.sample(range(64), 4))
        src = tuple(rng.sample(range(64), 4))
        await pair.shake(room, dst, slot=room % 16)
        faults = rng.choices([None, Fault.TRUNCATE, Fault.CORRUPT], [5, 1, 1], k=len(src))
        pair.send(room, src, *faults)
        is_received = isinstance(await pair.outcome(room), Received)
        assert not is_received or pair.equal(src, dst)
        assert is_received or any(faults)
        outcomes[is_received] += 1
        await pair.p.until(SendEnded, room)
    assert min(outcomes.values()) > 10
    await asyncio.sleep(0)
    assert pair.d.manager.stats().counters["blocks_corrupt"] > 50
