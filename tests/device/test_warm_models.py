"""Real models answer a conversation alike, whether its prefix is computed, received or found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdrt.device import torchrunner
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.modelspec import ModelSpec
from pdrt.sched.base import Scheduler
from pdrt.sched.limits import Limits
from tests.device import tiny
from tests.sched.devices import RunnerDevice
from tests.sched.fakes import Rig, submit
from tests.sched.pair import Pair

LIMITS = Limits(block_size=8, max_batch_size=8, max_prefill_tokens=32, reserved_tokens=8)
TURNS, WORDS, TOKENS = 3, 21, 12


def loaded(directory: Path) -> TorchRunner:
    return torchrunner.load(
        directory,
        Shard(ModelSpec.read(directory)),
        device="cpu",
        dtype="float32",
        block_size=LIMITS.block_size,
        progress=lambda _stage, _done, _total: None,
    )


@pytest.mark.parametrize("family", ["smollm2", "deepseek_v3"])
def test_each_turn_of_a_chat_equals_generate_warm_and_cold(tmp_path: Path, family: str) -> None:
    """CASES 58, 59: 1P1D and hybrid, with a prefix cache and without, token for token."""
    oracle, sides = tiny.make(family, tmp_path), []

    def device(blocks: int, _size: int) -> RunnerDevice:
        sides.append(RunnerDevice(loaded(tmp_path), blocks))
        return sides[-1]

    warm = Pair(LIMITS, prefill_blocks=48, decode_blocks=48, device=device)
    cold = Rig(Scheduler(replace(LIMITS, prefix_cache=False), 48, ()), device(48, 8))
    hybrid = Rig(Scheduler(LIMITS, 48, ()), device(48, 8))
    history: list[int] = []
    for turn in range(TURNS):
        history += tiny.prompt(WORDS, turn)
        wanted = tiny.answer(oracle, history, TOKENS)
        warm.submit(turn, history, TOKENS)
        warm.finish(60)
        for rig in (cold, hybrid):
            rig.submit(submit(turn, history, max_tokens=TOKENS))
            while rig.book.requests:
                rig.step()
        for said in (warm.decode.said[turn], cold.said[turn], hybrid.said[turn]):
            assert said == wanted, turn
        history += wanted
    first, second = WORDS, 2 * WORDS + TOKENS  # tokens of the first two prompts
    whole = sum(len(history) - turn * (WORDS + TOKENS) - TOKENS for turn in range(TURNS))
    hits = [first // 8 * 8, second // 8 * 8]
    assert warm.prefill.book.counters["prompt_tokens_computed"] == whole - sum(hits)
    assert cold.book.counters["prefix_tokens_hit"] == 0
    assert hybrid.book.counters["prefix_tokens_hit"] >= sum(hits)
