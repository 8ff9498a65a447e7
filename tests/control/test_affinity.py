"""The turns of one conversation go to one dp rank, and the ranks have equal work all the same."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.affinity import Affinity, prefix_keys
from pdrt.control.dispatch import DPDispatcher, Stream
from pdrt.messages import Output, Outputs, Sampling, Submit, pack_ids
from tests.control.test_dispatch import FakeLink, Rig


def ids(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def keys_of(tokens: list[int], salt: str = "") -> list[bytes]:
    return prefix_keys(pack_ids(tokens), salt)


@given(st.integers(0, 3000), st.integers(0, 500))
def test_a_longer_prompt_has_the_keys_of_those_that_it_begins_with(size: int, more: int) -> None:
    tokens = ids(size + more)
    short, long = keys_of(tokens[:size]), keys_of(tokens)
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)


def test_prompts_have_few_keys_and_the_last_is_near_the_end() -> None:
    for size in (16, 100, 512, 5_000, 131_072):
        keys = keys_of([7] * size)
        assert len(keys) <= 32 + 32 * max(0, math.ceil(math.log2(size / 512)))
        shorter = keys_of([7] * int(size * 0.96 - 16))
        assert len(shorter) < len(keys)
    assert keys_of([7] * 15) == []


def test_tenants_with_different_salts_know_nothing_of_each_other() -> None:
    assert not set(keys_of(ids(200), "a")) & set(keys_of(ids(200), "b"))
    assert not set(keys_of(ids(200), "a")) & set(keys_of(ids(200)))


def test_the_longest_known_beginning_counts_and_the_last_rank_that_served_it() -> None:
    affinity, tokens = Affinity(), ids(300)
    assert affinity.find(keys_of(tokens)) is None
    affinity.note(keys_of(tokens[:100]), 1)
    affinity.note(keys_of(tokens[:200]), 2)
    assert affinity.find(keys_of(tokens)) == 2
    assert affinity.find(keys_of(tokens[:110])) == 1
    affinity.note(keys_of(tokens[:200]), 3)
    assert affinity.find(keys_of(tokens)) == 3
    assert affinity.find([]) is None


def test_what_prompts_only_begin_with_alike_binds_them_not() -> None:
    affinity, system = Affinity(), ids(200)
    affinity.note(keys_of([*system, *ids(150, 1)]), 1)
    assert affinity.find(keys_of([*system, *ids(150, 2)])) is None


def test_it_is_bounded_and_forgets_what_was_unused_longest() -> None:
    affinity = Affinity(most=8)
    for seed in range(3):
        affinity.note(keys_of(ids(100, seed)), seed)
    assert len(affinity) == 8
    assert [affinity.find(keys_of(ids(100, seed))) for seed in range(3)] == [None, 1, 2]


# With the dispatcher.


def submit(room: int, tokens: list[int], max_tokens: int) -> Submit:
    return Submit(
        room=room,
        attempt=0,
        request_id="",
        tokens=pack_ids(tokens),
        prompt_tokens=len(tokens),
        sampling=Sampling(max_tokens=max_tokens),
        time_left=60,
    )


async def test_a_conversation_stays_where_it_was_until_that_rank_has_much_more_to_do() -> None:
    """Up to 12 times its own 100 tokens more, where the other rank has nothing."""
    rig, tokens = Rig(ranks=2), ids(64)
    rig.dispatcher.submit(submit(1, tokens, 36), 1)
    rig.say(1, finish="length", dp=1)
    for room in range(2, 13):
        turn = submit(room, [*tokens, *ids(16, room)], 20)
        assert rig.dispatcher.submit(turn).dp_rank == 1
    rig.dispatcher.submit(submit(50, ids(100, 9), 100), 1)
    assert rig.dispatcher.submit(submit(51, [*tokens, *ids(16, 51)], 20)).dp_rank == 0


async def test_a_rank_that_is_not_connected_is_not_waited_for() -> None:
    rig, tokens = Rig(ranks=2), ids(64)
    rig.dispatcher.submit(submit(1, tokens, 5), 1)
    rig.links[1].ready = None
    assert rig.dispatcher.submit(submit(2, tokens, 5)).dp_rank == 0


async def test_a_rank_that_comes_back_is_not_flooded() -> None:
    rig = Rig(ranks=2)
    rig.links[1].ready = None
    for room in range(50):
        rig.dispatcher.submit(submit(room, ids(20, room), 20))
        rig.say(room, finish="length")
    rig.links[1].ready = rig.links[0].ready
    chosen = [rig.dispatcher.submit(submit(r, ids(20, r), 20)).dp_rank for r in range(100, 120)]
    assert chosen.count(1) == 10


class Chat:
    """One conversation on whichever ranks it is put."""

    def __init__(self, rng: Random, systems: list[list[int]]) -> None:
        self._rng = rng
        self.tokens = list(rng.choice(systems))
        self.turns_left = rng.randint(2, 12)
        self.ranks: list[int] = []

    def ask(self, dispatcher: DPDispatcher, room: int) -> Stream:
        self.tokens += [self._rng.randrange(50_000) for _ in range(self._rng.randint(20, 300))]
        stream = dispatcher.submit(submit(room, self.tokens, 256))
        self.ranks.append(stream.dp_rank)
        return stream

    def hear(self) -> int:
        """The answer, as long as it is; what the turn was in all."""
        self.tokens += [self._rng.randrange(50_000) for _ in range(self._rng.randint(20, 250))]
        self.turns_left -= 1
        return len(self.tokens)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("busy", [8, 64])
async def test_turns_stay_and_work_is_even(ranks: int, busy: int) -> None:
    """CASES 66: of random conversations with three system prompts, `busy` requests at a time."""
    rng = Random(ranks * busy)
    systems = [ids(rng.randint(100, 500), seed) for seed in range(3)]
    links = [FakeLink(dp) for dp in range(ranks)]
    dispatcher = DPDispatcher(links, lambda: 0.0)
    idle: list[Chat] = []
    open_rooms: dict[int, tuple[Chat, int]] = {}
    served, stayed, turns = [0] * ranks, 0, 0
    for room in range(3000):
        while len(idle) < busy:
            idle.append(Chat(rng, systems))
        chat = idle.pop(rng.randrange(len(idle)))
        chat.ask(dispatcher, room)
        open_rooms[room] = chat, chat.ranks[-1]
        if len(chat.ranks) > 1:
            turns += 1
            stayed += chat.ranks[-1] == chat.ranks[-2]
        if len(open_rooms) > busy:
            over = rng.choice(list(open_rooms))
            chat, rank = open_rooms.pop(over)
            served[rank] += chat.hear()
            dispatcher.deliver(rank, Outputs(items=(Output(room=over, finish="length"),)))
            if chat.turns_left:
                idle.append(chat)
    told = f"{stayed / turns:.3f} {max(served) / min(served):.2f}"
    assert stayed / turns >= 0.95, told
    assert max(served) / min(served) <= 1.3, told
