"""Whatever happens in whatever order, to copies in host memory too: none is left over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.request import State
from tests.sched.fakes import EOS, FakeDevice, Rig
from tests.sched.test_stateful import (
    BLOCKS,
    LIMITS,
    SETTINGS,
    SOAK,
    Answers,
    B,
    DecodeWorld,
    HybridWorld,
)

COPYING = replace(LIMITS, retraction="copy", host_blocks=7)


class Copying(Answers):
    """A device whose copies sometimes fail; the host has less room than two long requests need."""

    @rule(odd=st.booleans())
    def copies_begin_to_fail(self, odd: bool) -> None:
        self.rig.device.broken = set(range(odd, 1000, 2))

    @rule()
    def copies_work_again(self) -> None:
        self.rig.device.broken = set()

    @invariant()
    def host_blocks_are_those_of_the_swapped_requests(self) -> None:
        book = self.rig.book
        held = [len(r.host_blocks) for r in book.queues[State.SWAPPED].values()]
        assert all(held)
        assert sum(held) == book.host.used <= book.host.total


class CopyingHybridWorld(Copying, HybridWorld):
    def sched_make(self) -> None:
        self.rig = Rig(Scheduler(COPYING, BLOCKS, {EOS}), FakeDevice(BLOCKS, B))


class CopyingDecodeWorld(Copying, DecodeWorld):
    def sched_make(self) -> None:
        super().sched_make()
        sched = DecodeDisaggScheduler(COPYING, BLOCKS, 3, {EOS})
        self.rig = Rig(sched, FakeDevice(BLOCKS, B))


WORLDS = pytest.mark.parametrize("world", [CopyingHybridWorld, CopyingDecodeWorld])


@WORLDS
def test_every_promise_holds_with_copies_in_host_memory(world: type[Copying]) -> None:
    """CASES 38, 41, 70: as invariants."""
    run_state_machine_as_test(world, settings=SETTINGS)


@WORLDS
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_promise_holds_with_copies_for_long(world: type[Copying]) -> None:
    run_state_machine_as_test(world, settings=settings(SOAK, max_examples=1000))
