"""Metadata slots: what is valid, what is not yet, and what is somebody else's."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrt.data.events import SlotRecord
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.metadata import MAX_SPEC_TOKENS, MetadataBufferPool, pack_slot, unpack_slot

U32 = st.integers(0, (1 << 32) - 1)
RECORDS = st.builds(
    SlotRecord,
    room=st.integers(0, (1 << 63) - 1),
    attempt=U32,
    status=st.integers(0, 65535),
    kv_len=U32,
    cached_tokens=U32,
    token=U32,
    logprob=st.floats(width=32, allow_nan=False),
    spec_tokens=st.lists(U32, max_size=MAX_SPEC_TOKENS).map(tuple),
)
RECORD = SlotRecord(7, 1, 1, 40, 16, 99, -0.5, (1, 2, 3))


class Slots:
    """A pool over memory that the test writes to like a peer."""

    def __init__(self, slots: int = 4) -> None:
        self.memory = bytearray(slots * SLOT_BYTES)
        self.pool = MetadataBufferPool(memoryview(self.memory), slots)

    def write(self, slot: int, record: SlotRecord, size: int = SLOT_BYTES) -> None:
        at = slot * SLOT_BYTES
        self.memory[at : at + size] = pack_slot(record)[:size]


@given(RECORDS)
def test_a_record_survives_its_64_bytes(record: SlotRecord) -> None:
    data = pack_slot(record)
    assert len(data) == 64
    assert unpack_slot(data) == record


@given(RECORDS, st.integers(0, 511))
def test_one_wrong_bit_is_always_noticed(record: SlotRecord, bit: int) -> None:
    data = bytearray(pack_slot(record))
    data[bit // 8] ^= 1 << bit % 8
    assert unpack_slot(bytes(data)) is None


def test_the_room_stands_first_and_in_little_endian() -> None:
    assert pack_slot(RECORD)[:12] == (7).to_bytes(8, "little") + (1).to_bytes(4, "little")


def test_a_wiped_slot_holds_no_record() -> None:
    assert unpack_slot(bytes(64)) is None


@pytest.mark.parametrize("wrong", [{"room": -1}, {"kv_len": 1 << 32}, {"spec_tokens": (0,) * 8}])
def test_what_does_not_fit_is_refused(wrong: dict[str, int]) -> None:
    fields = {"room": 1, "attempt": 1, "status": 1, "kv_len": 1, "cached_tokens": 0, "token": 1}
    with pytest.raises(ValueError, match="fit"):
        pack_slot(SlotRecord(**{**fields, "logprob": 0.0, **wrong}))  # type: ignore[arg-type]


def test_a_valid_slot_is_found_once() -> None:
    slots = Slots()
    slots.pool.watch(2, 7, 1, 40)
    assert slots.pool.scan() == []
    slots.write(2, RECORD)
    assert slots.pool.scan() == [(2, RECORD)]
    assert slots.pool.scan() == []
    assert slots.pool.waiting == 0


@pytest.mark.parametrize("size", range(1, SLOT_BYTES))
def test_half_a_record_is_not_yet_one(size: int) -> None:
    slots = Slots()
    slots.pool.watch(0, 7, 1, 40)
    slots.write(0, RECORD, size)
    assert slots.pool.scan() == []
    slots.write(0, RECORD)
    assert slots.pool.scan() == [(0, RECORD)]


@pytest.mark.parametrize("wanted", [(8, 1, 40), (7, 2, 40), (7, 1, 41)])
def test_a_sound_record_of_somebody_else_is_stale_once(wanted: tuple[int, int, int]) -> None:
    slots = Slots()
    slots.pool.watch(0, *wanted)
    slots.write(0, RECORD)
    assert [slots.pool.scan() for _ in range(3)] == [[], [], []]
    assert slots.pool.stale == 1
    assert slots.pool.corrupt == 0


def test_after_a_stale_record_the_right_one_is_found() -> None:
    slots = Slots()
    slots.pool.watch(0, 8, 0, 40)
    slots.write(0, RECORD)
    slots.pool.scan()
    right = SlotRecord(8, 0, 1, 40, 0, 5, 0.0)
    slots.write(0, right)
    assert slots.pool.scan() == [(0, right)]


def test_a_damaged_record_is_counted_once_and_never_believed() -> None:
    slots = Slots()
    slots.pool.watch(0, 7, 1, 40)
    slots.write(0, RECORD)
    slots.memory[30] ^= 255
    assert [slots.pool.scan() for _ in range(3)] == [[], [], []]
    assert slots.pool.corrupt == 1


def test_watching_and_letting_go_wipe_the_slot() -> None:
    slots = Slots()
    slots.write(1, RECORD)
    slots.pool.watch(1, 7, 1, 40)  # what is there was written for an earlier owner
    assert slots.pool.scan() == []
    slots.write(1, RECORD)
    slots.pool.unwatch(1)
    assert not any(slots.memory)
    assert slots.pool.scan() == []


def test_a_slot_nobody_waits_for_is_not_read() -> None:
    slots = Slots()
    slots.write(1, RECORD)
    assert slots.pool.scan() == []
    assert slots.pool.look(1) is None


def test_a_rows_writers_have_slots_of_their_own() -> None:
    """CASES 51."""
    pool = MetadataBufferPool(memoryview(bytearray(6 * SLOT_BYTES)), 2, writers=3)
    assert [[pool.slot_of(row, n) for n in range(3)] for row in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(AssertionError):
        pool.slot_of(0, 3)


@given(st.lists(st.tuples(st.sampled_from(["watch", "unwatch", "write"]), st.integers(0, 5))))
@example([("watch", 0), ("watch", 1), ("watch", 2), ("write", 0), ("unwatch", 2), ("write", 1)])
def test_whatever_is_waited_for_is_found_once_and_nothing_else(acts: list[tuple[str, int]]) -> None:
    slots, waiting = Slots(6), set[int]()
    for act, slot in acts:
        match act:
            case "watch":
                slots.pool.watch(slot, 7, 1, 40)
                waiting.add(slot)
            case "unwatch":
                slots.pool.unwatch(slot)
                waiting.discard(slot)
            case _:
                slots.write(slot, RECORD)
                assert slots.pool.scan() == ([(slot, RECORD)] if slot in waiting else [])
                waiting.discard(slot)
        assert slots.pool.waiting == len(waiting)
        assert slots.pool.scan() == []


def reuse_slots(rounds: int) -> MetadataBufferPool:
    """Two slots; writes are torn and delayed at random, some into the next owner's time."""
    random, slots = Random(53), Slots(2)
    delayed: list[tuple[int, SlotRecord]] = []
    for room in range(1, rounds + 1):
        slot = room % 2
        slots.pool.watch(slot, room, 0, 16)
        for late in delayed:
            slots.write(*late)  # a stale writer after the wipe
            assert slots.pool.scan() == []
        delayed.clear()
        mine = SlotRecord(room, 0, 1, 16, 0, room % 1000, -1.0)
        if random.random() < 0.3:
            slots.write(slot, mine, random.randrange(1, SLOT_BYTES))
            assert slots.pool.scan() == []
        slots.write(slot, mine)
        assert slots.pool.scan() == [(slot, mine)]
        slots.pool.unwatch(slot)
        if random.random() < 0.2:
            delayed.append((1 - slot, mine))
    return slots.pool


def test_reusing_slots_never_mistakes_one_owner_for_another() -> None:
    """CASES 53, short form."""
    pool = reuse_slots(5_000)
    assert pool.waiting == 0
    assert pool.stale > 500


@pytest.mark.soak
def test_a_hundred_thousand_reuses_never_mistake_one_owner_for_another() -> None:
    """CASES 53."""
    assert reuse_slots(100_000).stale > 10_000
