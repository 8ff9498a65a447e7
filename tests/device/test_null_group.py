"""In a group of null devices too, no wrong byte of any rank goes unseen."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pdrt import steps
from pdrt.device.batch import Draw, Drawn, Scoring, SeqStep
from pdrt.device.null import NullRunner
from pdrt.device.shard import Shard
from pdrt.modelspec import NULL_SPEC
from tests.device.loop import GREEDY
from tests.device.ranks import places

BLOCK, BLOCKS = 4, 8
TEXT = b"It was the best of times"
TABLE = list(range(7, 0, -1))


class Group:
    """All ranks in threads of this process, each with a pool of its own."""

    def __init__(self, folder: Path, size: int) -> None:
        self._threads = ThreadPoolExecutor(size)
        group = places(folder, size)
        self.runners = [NullRunner(BLOCK, shard=Shard(NULL_SPEC, r, size)) for r in range(size)]
        self.pools = [bytearray(BLOCKS * r.layout.block_bytes) for r in self.runners]
        for runner, pool in zip(self.runners, self.pools, strict=True):
            runner.bind(memoryview(pool), BLOCKS)
        list(self._threads.map(lambda r, p: r.join(p.rendezvous, 10), self.runners, group))

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        told = steps.unpack(steps.pack(1, batch))
        batches = [batch, *[told] * (len(self.runners) - 1)]
        said: list[list[Drawn]] = list(
            self._threads.map(lambda r, b: r.execute(b), self.runners, batches)
        )
        assert said[1:] == [[]] * (len(said) - 1)
        return said[0]

    def close(self) -> None:
        self._threads.shutdown()
        for runner in self.runners:
            if sums := runner._group:  # noqa: SLF001 - a worker leaves its group by ending
                sums.close()


@pytest.fixture(params=[1, 2, 8])
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    size: int = request.param
    found = Group(tmp_path, size)
    yield found
    found.close()


def step(tokens: Sequence[int], start: int) -> SeqStep:
    history = [*TEXT[:start], *tokens]
    return SeqStep(1, tokens, start, TABLE, Draw(GREEDY, history, len(TEXT)))


def test_any_wrong_byte_of_any_rank_changes_the_next_token(group: Group) -> None:
    chance = random.Random(7)
    assert group.execute([step(TEXT[:-1], 0)])
    last = step(TEXT[-1:], len(TEXT) - 1)
    (right,) = group.execute([last])
    for rank, pool in enumerate(group.pools):
        lanes = group.runners[rank].layout.kv_heads * 4 * 8  # layer, k or v, and byte of 8
        for _ in range(20):
            position, lane = chance.randrange(len(TEXT) - 2), chance.randrange(lanes)
            part, byte = divmod(lane, 8)
            block = TABLE[position // BLOCK] * group.runners[rank].layout.block_bytes
            at = block + (part * BLOCK + position % BLOCK) * 8 + byte
            bit = 1 << chance.randrange(7)  # the top bit alone can hide in a later copy
            pool[at] ^= bit
            (wrong,) = group.execute([last])
            assert wrong.token != right.token, f"rank {rank}, position {position}, lane {lane}"
            pool[at] ^= bit
        assert group.execute([last]) == [right]


def test_each_rank_goes_on_from_its_own_bytes_alone(group: Group) -> None:
    """A pool that a transfer filled is all that a rank knows of the prompt."""
    whole = group.execute([step(TEXT, 0)])
    group.execute([step(TEXT[:-1], 0)])
    assert group.execute([step(TEXT[-1:], len(TEXT) - 1)]) == whole


def test_prompt_tokens_are_scored_as_one_rank_alone_scores_them(
    group: Group, tmp_path: Path
) -> None:
    asked = replace(step(TEXT, 0), scoring=Scoring(list(TEXT[1:]), 2))
    alone = NullRunner(BLOCK)
    alone.bind(memoryview(bytearray(BLOCKS * alone.layout.block_bytes)), BLOCKS)
    assert group.execute([asked]) == alone.execute([asked])
    chunk = replace(step(TEXT[:8], 0), draw=None, scoring=Scoring(list(TEXT[1:9]), 0))
    assert group.execute([chunk]) == alone.execute([chunk])


def test_only_what_is_drawn_is_summed(group: Group) -> None:
    assert group.execute([]) == []
    assert group.execute([replace(step(TEXT, 0), draw=None)]) == []


def test_a_rank_that_has_not_joined_draws_nothing() -> None:
    alone = NullRunner(BLOCK, shard=Shard(NULL_SPEC, 0, 2))
    alone.bind(memoryview(bytearray(BLOCKS * alone.layout.block_bytes)), BLOCKS)
    with pytest.raises(RuntimeError, match="join comes before execute"):
        alone.execute([step(TEXT, 0)])
