"""The life of a node with workers, a side and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdrt.config import Role, TimeoutsSection
from pdrt.control.dispatch import DPDispatcher, Stream
from pdrt.control.heartbeat import Time, Watched
from pdrt.control.parts import Condition, Handle, Lane, Parts, lanes
from pdrt.control.selftest import self_test
from pdrt.control.shown import Shown
from pdrt.control.supervisor import DrainWanted, Mail, Said, Signalled, Supervisor
from pdrt.control.worker_handle import Lost
from pdrt.errors import Draining, NotFound, PdrtError, PeerLost
from pdrt.messages import (
    AbortRoom,
    AskPrefill,
    Drain,
    FromWorker,
    Loading,
    Output,
    Outputs,
    Problem,
    Rank,
    ResumeLocally,
    Sampling,
    Submit,
    ToWorker,
    pack_ids,
)
from tests.fake_time import FakeTime, settle
from tests.fake_worker import DIED, FakeWorker

TIMEOUTS = TimeoutsSection(startup_s=60, drain_s=30)
WALL = 1_800_000_000.0
BAD = Problem(code="bad_logits", message="no number")


class FakeSide:
    """Implements Side; remembers what it is told."""

    bootstrap: tuple[str, int] | None = None
    epoch = 5

    def __init__(self) -> None:
        self.absent: list[str] = []
        self.heard: list[tuple[Rank, ToWorker]] = []
        self.over: list[tuple[int, int]] = []
        self.gone: list[Rank] = []
        self.dead: list[Rank] = []
        self.refusal: PdrtError | None = None
        self.asked = asyncio.Event()
        self.asks = 0

    async def bind(self, stack: AsyncExitStack, url: str) -> None: ...

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        return []

    def told(self, rank: Rank, message: ToWorker) -> None:
        self.heard.append((rank, message))

    def ended(self, room: int, attempt: int) -> None:
        self.over.append((room, attempt))

    def lost(self, rank: Rank, is_dead: bool = True) -> None:
        self.gone.append(rank)
        self.dead += [rank] if is_dead else []

    async def prefill_again(self, wanted: AskPrefill) -> None:
        self.asks += 1
        if self.refusal is not None:
            raise self.refusal
        await self.asked.wait()

    def missing(self) -> Sequence[str]:
        return self.absent

    def peers(self) -> Sequence[Watched]:
        return [Watched("10.0.0.1:18800", reason="it is new")]


class Rig:
    def __init__(self, role: Role, dp: int, tp: int = 1) -> None:
        self.time, self.side = FakeTime(), FakeSide()
        time = Time(self.time.clock, self.time.sleep)

        def unused(_endpoint: str) -> Any:
            raise AssertionError

        self.workers = [
            FakeWorker(Rank(dp=n, tp=m), unused, Path(), self.heard, time)
            for n in range(dp)
            for m in range(tp)
        ]
        self.dispatcher = DPDispatcher(lanes(self.workers, self.side.told), self.time.clock)
        ranks = list(range(dp))
        self.parts = Parts(
            role,
            self.side,
            self.workers,
            self.dispatcher,
            Condition(),
            prove=(lambda: self_test(self.dispatcher, ranks)) if role == "hybrid" else None,
        )
        self.supervisor = Supervisor(self.parts, TIMEOUTS, time, lambda: WALL)
        self.shown = Shown(self.parts, "m", 100, self.time.clock)
        self.task = asyncio.create_task(self.supervisor.run())

    @property
    def state(self) -> str:
        return str(self.parts.condition.state)

    def heard(self, handle: Handle, message: FromWorker | Lost) -> None:
        self.supervisor.tell(Said(handle, message))

    def submit(self, room: int = 7, rank: int | None = None) -> Stream:
        message = Submit(
            room=room,
            attempt=0,
            request_id="r",
            tokens=pack_ids([1]),
            prompt_tokens=1,
            sampling=Sampling(max_tokens=9),
            time_left=9.0,
        )
        return self.dispatcher.submit(message, rank)

    async def tell(self, mail: Mail) -> None:
        self.supervisor.tell(mail)
        await settle()

    async def be_ready(self) -> None:
        await settle()
        for worker in self.workers:
            worker.become_ready()
        await settle()
        assert self.state == "ready"


@asynccontextmanager
async def rigged(role: Role = "decode", dp: int = 1, tp: int = 1) -> AsyncIterator[Rig]:
    rig = Rig(role, dp, tp)
    try:
        yield rig
    finally:
        if not rig.task.done():
            rig.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rig.task
    assert not any(worker.runs for worker in rig.workers), "a worker is left"


async def end_of(stream: Stream) -> str:
    outputs = [output async for output in stream]
    assert outputs[-1].problem is not None
    return outputs[-1].problem.code


async def test_a_node_is_ready_when_all_workers_are_and_all_leases_are_held() -> None:
    async with rigged(dp=2) as rig:
        rig.side.absent = ["0,0,0 (never registered)"]
        await settle()
        assert rig.state == "loading"
        assert "worker 1,0,0 is loading" in rig.shown.why_not_ready()
        rig.workers[0].become_ready()
        await rig.time.run_for(0.2)
        assert rig.state == "loading"
        rig.workers[1].become_ready()
        await rig.time.run_for(0.2)
        assert rig.state == "registering"
        assert rig.shown.why_not_ready() == "the node is registering; 0,0,0 (never registered)"
        rig.side.absent = []
        await rig.time.run_for(0.1)
        assert rig.state == "ready"
        assert "no request has succeeded" in rig.shown.why_not_ready()
        rig.parts.condition.served()
        assert rig.shown.why_not_ready() == ""


async def test_a_lapsed_lease_is_a_reason_not_to_be_ready() -> None:
    async with rigged("prefill") as rig:
        await rig.be_ready()
        rig.parts.condition.served()
        rig.side.absent = ["0,0,0 (lease lapsed)"]
        assert rig.shown.why_not_ready() == "0,0,0 (lease lapsed)"
        assert rig.shown.health()["missing"] == ["0,0,0 (lease lapsed)"]


async def test_a_node_that_is_never_ready_gives_up_in_time_and_says_why() -> None:
    async with rigged(dp=2) as rig:
        await settle()
        rig.workers[0].become_ready()
        rig.side.absent = ["0,0,0 (never registered)"]
        await rig.time.run_for(59.9)
        assert not rig.task.done()
        rig.workers[1].die()  # a fault does not stop the clock
        await rig.time.run_for(0.2)
        await rig.task
        assert rig.state == "failed"
        assert rig.parts.condition.reason == (
            "not ready after 60 s; worker 1,0,0 is waiting; 0,0,0 (never registered)"
        )


async def test_a_node_that_has_been_ready_may_take_its_time_afterwards() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].die()
        await rig.time.run_for(100)
        assert rig.state == "loading"
        rig.workers[0].become_ready()
        await settle()
        assert rig.state == "ready"


async def test_the_death_of_a_worker_fails_its_requests_and_is_a_fault() -> None:
    async with rigged(dp=2) as rig:
        await rig.be_ready()
        rig.parts.condition.served()
        for worker in rig.workers:
            worker.answers = None
        with rig.submit(7, 0) as lost, rig.submit(8, 1) as kept:
            rig.workers[0].die()
            await settle()
            assert await end_of(lost) == "peer_lost"
            assert rig.side.gone == [Rank(dp=0)]
            assert (rig.state, rig.dispatcher.load().rooms) == ("loading", 1)
            rig.workers[0].become_ready()
            await settle()
            assert "last fault" in rig.shown.why_not_ready()
            assert rig.shown.status()["last_fault_at"] == WALL
            rig.workers[1].answer(8, Output(room=0, tokens=(1,), finish="stop"))
            await settle()
            assert [output.finish async for output in kept] == ["stop"]


async def test_the_loss_of_any_rank_fails_its_groups_requests_and_no_others() -> None:
    """CASES 33: at once, though tp 0 has not ended yet, and nothing new is given to it."""
    async with rigged(dp=2, tp=2) as rig:
        await rig.be_ready()
        heads = rig.workers[0], rig.workers[2]
        for head in heads:
            head.answers = None
        with rig.submit(7, 0) as lost, rig.submit(8, 1) as kept:
            rig.workers[1].die()
            await settle()
            assert await end_of(lost) == "peer_lost"
            assert rig.side.gone == [Rank(tp=1)]
            assert rig.shown.status()["ready_ranks"] == [1]
            assert "worker 0,0,1 is waiting" in rig.shown.why_not_ready()
            with pytest.raises(PeerLost, match="dp rank 0 is not connected"):
                rig.submit(9, 0)
            with rig.submit(9) as other:
                assert other.dp_rank == 1
            heads[0].die()  # its link to the follower dropped
            await settle()
            heads[1].answer(8, Output(room=0, tokens=(1,), finish="stop"))
            await settle()
            assert [output.finish async for output in kept] == ["stop"]
        for worker in rig.workers[:2]:
            worker.become_ready()
        await settle()
        assert rig.state == "ready"
        assert {type(m) for w in rig.workers for m in w.told} == {Submit, AbortRoom}
        assert rig.workers[1].told == rig.workers[3].told == []


async def test_a_hybrid_group_is_tried_through_its_tp_0() -> None:
    async with rigged("hybrid", dp=2, tp=2) as rig:
        await rig.be_ready()
        await rig.time.run_for(0.5)
        assert rig.shown.why_not_ready() == ""
        tried = [sum(isinstance(m, Submit) for m in worker.told) for worker in rig.workers]
        assert tried == [1, 0, 1, 0]


async def test_a_lane_takes_nothing_new_while_a_rank_of_its_group_is_absent() -> None:
    """But ends what tp 0 has: the other rank's node may only be on its way out."""
    async with rigged(tp=2) as rig:
        await settle()
        (lane,) = lanes(rig.workers, rig.side.told)
        rig.workers[0].become_ready()
        assert lane.ready is None
        resume, abort = ResumeLocally(room=7), AbortRoom(room=7, reason="x")
        with pytest.raises(PeerLost, match="worker 0,0,1 is loading, not ready"):
            lane.tell(resume)
        lane.tell(abort)
        rig.workers[1].become_ready()
        lane.tell(resume)
        assert (rig.workers[0].told, rig.workers[1].told) == ([abort, resume], [])
        assert (lane.rank, lane.ready) == (Rank(), rig.workers[0].ready)


async def test_a_rank_whose_node_is_gone_may_live_and_its_tp_0_is_told_what_is_over() -> None:
    async with rigged(tp=2) as rig:
        await rig.be_ready()
        head, far = rig.workers
        head.answers = None
        with rig.submit(7) as lost:
            far.ready = None
            rig.heard(far, Lost(DIED, final=False, is_dead=False))
            await settle()
            assert await end_of(lost) == "peer_lost"
            assert [m.room for m in head.told if isinstance(m, AbortRoom)] == [7]
            assert (rig.side.gone, rig.side.dead) == ([far.rank], [])
        assert rig.state == "loading"


async def test_a_tp_0_with_a_full_mailbox_hears_later_of_all_that_is_over() -> None:
    async with rigged(tp=2) as rig:
        await rig.be_ready()
        head, far = rig.workers
        head.answers = None
        with rig.submit(7), rig.submit(8), rig.submit(9):
            head.is_full, far.ready = True, None
            rig.heard(far, Lost(DIED, final=False, is_dead=False))
            await rig.time.run_for(0.2)
            assert not [m for m in head.told if isinstance(m, AbortRoom)]
            head.is_full = False
            await rig.time.run_for(0.2)
            assert [m.room for m in head.told if isinstance(m, AbortRoom)] == [7, 8, 9]


async def test_a_worker_that_dies_too_often_ends_the_node_with_its_reason() -> None:
    """And the other workers with it; their clients are told."""
    async with rigged(dp=2) as rig:
        await rig.be_ready()
        rig.workers[1].answers = None
        with rig.submit(8, 1) as stream:
            rig.workers[0].die(final=True)
            await settle()
            await rig.task
            assert await end_of(stream) == "draining"
        assert rig.workers[1].is_asked_to_stop
        assert rig.state == "failed"
        assert "cannot be kept alive: worker ended" in rig.parts.condition.reason
        with pytest.raises(Draining):
            rig.submit()


@pytest.mark.parametrize("mail", [DrainWanted(), Signalled()])
async def test_an_idle_node_stops_at_once_when_asked(mail: Mail) -> None:
    async with rigged(dp=2) as rig:
        await rig.be_ready()
        await rig.tell(mail)
        await rig.time.run_for(0.1)
        await rig.task
        assert rig.state == "stopped"
        assert all(Drain() in worker.told for worker in rig.workers)


async def test_a_node_that_still_loads_stops_at_once_when_asked() -> None:
    async with rigged() as rig:
        await settle()
        await rig.tell(Signalled())
        await rig.time.run_for(0.1)
        await rig.task
        assert rig.state == "stopped"


async def test_a_draining_node_takes_nothing_new_and_ends_with_its_last_request() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].answers = None
        with rig.submit() as stream:
            for _ in range(3):  # an operator may ask as often as he likes
                await rig.tell(DrainWanted())
            with pytest.raises(Draining):
                rig.submit(8)
            await rig.time.run_for(10)
            assert rig.state == "draining"
            rig.workers[0].answer(7, Output(room=0, tokens=(1,), finish="stop"))
            await rig.time.run_for(0.1)
            await rig.task
            assert [output.finish async for output in stream] == ["stop"]
        assert rig.state == "stopped"


@pytest.mark.parametrize("hurry", [True, False])
async def test_grace_ends_by_itself_or_by_a_second_signal_and_clients_are_told(
    hurry: bool,
) -> None:
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].answers = None
        with rig.submit() as stream:
            await rig.tell(Signalled())
            assert rig.state == "draining"
            if hurry:
                await rig.tell(Signalled())
            else:
                await rig.time.run_for(30.1)
            await rig.task
            assert await end_of(stream) == "draining"
        assert rig.state == "stopped"


async def test_the_node_waits_until_its_workers_have_ended() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].is_slow_to_stop = True
        await rig.tell(Signalled())
        await rig.time.run_for(3)
        assert rig.state == "stopped"
        assert not rig.task.done()
        await rig.tell(Signalled())  # changes nothing any more
        rig.workers[0].die()
        rig.workers[0].is_slow_to_stop = False
        rig.workers[0].stop()
        await rig.task


async def test_what_any_part_raises_ends_the_node_and_its_workers() -> None:
    async with rigged(dp=2) as rig:
        await rig.be_ready()
        rig.workers[0].break_down(RuntimeError("a bug"))
        with pytest.raises(ExceptionGroup) as caught:
            await rig.task
        assert caught.group_contains(RuntimeError, match="a bug")


async def test_a_request_that_nobody_will_prefill_again_goes_on_where_it_is() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        (worker,) = rig.workers
        worker.answers = None
        rig.side.refusal = NotFound("no such room")
        wanted = AskPrefill(room=7, attempt=1, tokens=b"")
        with rig.submit():
            await rig.tell(Said(worker, wanted))
            assert ResumeLocally(room=7) in worker.told
            worker.is_full = True  # then it must not wait for what never comes
            await rig.tell(Said(worker, wanted))
            assert rig.dispatcher.load().rooms == 0
            worker.is_full = False
            await rig.time.run_for(0.1)
            assert type(worker.told[-1]) is AbortRoom
        count = len(worker.told)
        await rig.tell(Said(worker, wanted))  # a room that has ended
        assert len(worker.told) == count


async def test_an_unanswered_ask_does_not_keep_the_node_alive() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        await rig.tell(Said(rig.workers[0], AskPrefill(room=7, attempt=1, tokens=b"")))
        assert rig.side.asks == 1
        await rig.tell(Signalled())
        await rig.time.run_for(0.1)
        await rig.task


async def test_the_side_hears_of_what_workers_are_told_and_of_each_end() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        with rig.submit() as stream:
            await settle()
            assert [output.finish async for output in stream] == ["length"]
        assert [(rank, type(m)) for rank, m in rig.side.heard] == [(Rank(), Submit)]
        assert rig.side.over == [(7, -1)]
        rig.workers[0].ready = None
        with pytest.raises(PeerLost):
            Lane(rig.workers, rig.side.told).tell(Drain())
        assert len(rig.side.heard) == 1  # what was not told is not heard


async def test_a_hybrid_node_tries_itself_until_it_succeeds() -> None:
    async with rigged("hybrid") as rig:
        rig.workers[0].answers = Output(room=0, problem=BAD)
        await rig.be_ready()
        await rig.time.run_for(2.5)
        tried = sum(isinstance(m, Submit) for m in rig.workers[0].told)
        assert tried == 3
        assert "no request has succeeded" in rig.shown.why_not_ready()
        rig.workers[0].answers = Output(room=0, tokens=(1,), finish="length")
        await rig.time.run_for(1)
        assert rig.shown.why_not_ready() == ""
        await rig.time.run_for(5)
        assert sum(isinstance(m, Submit) for m in rig.workers[0].told) == tried + 1


async def test_a_hybrid_node_tries_itself_again_after_a_fault() -> None:
    async with rigged("hybrid") as rig:
        await rig.be_ready()
        assert rig.shown.why_not_ready() == ""
        for _ in range(3):
            rig.workers[0].answers = None
            rig.workers[0].die()
            await settle()
            rig.workers[0].become_ready()  # and is tried, and dies of it
            await settle()
        rig.workers[0].die()
        await settle()
        rig.workers[0].answers = Output(room=0, tokens=(1,), finish="length")
        rig.workers[0].become_ready()
        await rig.time.run_for(2)
        assert rig.shown.why_not_ready() == ""


async def test_loading_and_figures_are_taken_as_they_come() -> None:
    async with rigged() as rig:
        await settle()
        for done in range(100):
            rig.workers[0].say(Loading(stage="weights", done=done, total=99))
        rig.workers[0].say(Loading(stage="empty", done=0, total=0))
        await rig.be_ready()
        status = rig.shown.status()
        assert (status["state"], status["ready_ranks"], status["dp_size"]) == ("ready", [0], 1)
        assert (rig.shown.pool_tokens(), rig.shown.health()["peers"]) == (
            64 * 16,
            {"10.0.0.1:18800": "unknown: it is new"},
        )
        rig.workers[0].ready = None
        assert rig.shown.pool_tokens() == 0


async def test_a_stalled_loop_shows() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        await rig.time.run_for(5)
        assert rig.shown.stalled_s() < 0.1
        rig.time.now += 20
        assert rig.shown.stalled_s() > 10


async def test_a_large_step_is_handed_on_in_slices_with_the_loop_free_between() -> None:
    """SPEC 2: many streams of one step must not hold the event loop as one block."""
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].answers = None
        streams = [rig.submit(room) for room in range(20)]
        items = tuple(Output(room=room, tokens=(room,), finish="stop") for room in range(20))
        rig.heard(rig.workers[0], Outputs(items=items))
        still_open = []
        while rig.dispatcher.load().rooms:
            await asyncio.sleep(0)
            still_open.append(rig.dispatcher.load().rooms)
        assert [n for i, n in enumerate(still_open) if n not in still_open[:i]] == [12, 4, 0]
        said = [[output async for output in stream][-1].tokens for stream in streams]
        assert said == [(room,) for room in range(20)]
        assert [room for room, _attempt in rig.side.over] == list(range(20))


async def test_the_delay_of_the_loop_is_measured() -> None:
    delays: list[float] = []
    async with rigged() as rig:
        rig.supervisor._loop_delay = delays.append  # noqa: SLF001 - else every rig needs it
        await rig.time.run_for(0.2)
    assert len(delays) >= 3
    assert max(delays) < 0.01
