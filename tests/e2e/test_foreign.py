"""A model that transformers computes, through real processes: what `generate` says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.test_models import settings, write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(300)]
TOKENS = 12
LENGTHS = [1, 8, 25, 32, 86]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_with_images"])
async def test_prefill_and_decode_apart_say_what_generate_says(tmp_path: Path, name: str) -> None:
    """Prompts shorter and longer than the window, alone and in flight together."""
    from tests.device import tiny
    from tests.device.foreign_tiny import CONFIGS

    oracle = tiny.save(CONFIGS[name], 1, tmp_path / "model")
    write_tokenizer(tmp_path / "model", tiny.VOCAB)
    cluster = Cluster.make(tmp_path, 1, 1, 0, settings(tmp_path / "model"))
    cluster.startup_s = 170.0

    async def check(prompt: list[int]) -> None:
        sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await cluster.post("/generate", {"prompt": prompt, "sampling_params": sampling})
        assert answer.ids == tiny.answer(oracle, prompt, TOKENS)
        assert answer.headers["x-pd-path"] == "disagg"

    async with cluster.running():
        for length in LENGTHS:
            await check(tiny.prompt(length))
        await asyncio.gather(*(check(tiny.prompt(1 + 17 * i % 90, 50 + i)) for i in range(8)))
        await cluster.until_baseline()
