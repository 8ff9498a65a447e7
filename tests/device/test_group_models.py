"""Real models and sampling groups: a sequence says what it says alone, wherever it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdrt.device import torchrunner
from pdrt.device.chance import of_sequence
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.modelspec import ModelSpec
from pdrt.sched.base import Scheduler
from pdrt.sched.limits import Limits
from tests.device import tiny
from tests.sched.devices import RunnerDevice
from tests.sched.fakes import Rig, submit
from tests.sched.pair import Pair

B = 8
LIMITS = Limits(block_size=B, max_batch_size=8, max_prefill_tokens=16, reserved_tokens=4)
N, TOKENS, SEED = 3, 12, 5


def device(directory: Path, blocks: int, *, mirrored: bool) -> RunnerDevice:
    runner = torchrunner.load(
        directory,
        Shard(ModelSpec.read(directory)),
        device="cpu",
        dtype="float32",
        block_size=B,
        progress=lambda _stage, _done, _total: None,
    )
    return RunnerDevice(TorchRunner(runner.model, runner.layout, mirrored=mirrored), blocks)


def finish(rig: Rig) -> None:
    for _ in range(500):
        if not rig.book.requests:
            return
        rig.step()
    raise AssertionError(rig.book.rooms)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("family", ["smollm2", "deepseek_v3"])
def test_a_group_says_what_its_sequences_say_alone(
    tmp_path: Path, family: str, mirrored: bool
) -> None:
    """Hybrid, 1P1D, and 1P1D in a pool that holds hardly more than one of them (CASES 13)."""
    tiny.make(family, tmp_path)

    def made(blocks: int, _size: int) -> RunnerDevice:
        return device(tmp_path, blocks, mirrored=mirrored)

    for length in (13, 16):
        prompt = tiny.prompt(length)
        alone = Rig(Scheduler(replace(LIMITS, prefix_cache=False), 48, ()), made(48, B))
        hybrid = Rig(Scheduler(LIMITS, 48, ()), made(48, B))
        small = Pair(LIMITS, prefill_blocks=8, decode_blocks=5, device=made)
        large = Pair(LIMITS, prefill_blocks=48, decode_blocks=48, device=made)
        message = submit(1, prompt, max_tokens=TOKENS, n=N, seed=SEED)
        hybrid.submit(message)
        finish(hybrid)
        for pair in (small, large):
            pair.submit(1, prompt, TOKENS, n=N, seed=SEED)
            pair.finish(500)
        for index in range(N):
            one = replace(message, room=2 + index, sampling=of_sequence(message.sampling, index))
            alone.submit(one)
            finish(alone)
            want = alone.said[2 + index]
            for rig in (hybrid, small.decode, large.decode):
                assert rig.sequences[1, index] == want, (length, index)
        assert small.decode.book.counters["retractions"] > 0
        assert large.decode.book.counters["transfers"] == 1


def test_greedy_sequences_all_equal_generate(tmp_path: Path) -> None:
    oracle = tiny.make("smollm2", tmp_path)
    prompt = tiny.prompt(13)
    rig = Rig(Scheduler(LIMITS, 48, ()), device(tmp_path, 48, mirrored=False))
    message = submit(1, prompt, max_tokens=TOKENS, n=N)
    rig.submit(replace(message, sampling=replace(message.sampling, temperature=0.0)))
    finish(rig)
    want = tiny.answer(oracle, prompt, TOKENS)
    assert [rig.sequences[1, index] for index in range(N)] == [want] * N
