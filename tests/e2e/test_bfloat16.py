"""How often the demo model in bfloat16 says, 64 tokens long, what transformers says in bfloat16.

Each step rounds to 8 bits, in the same places as transformers does; sums of products are added up
in another order, which now and then rounds one up that was rounded down. Where two tokens are
about as likely that decides, so the bound is a share; what differs is listed with the gap between
the two likeliest logits, which in bfloat16 are 0.125 apart or equal.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.cluster import PATIENT, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
TOKENS: Final = 64
SHARE: Final = 0.95


async def test_bfloat16_continues_as_transformers_does(tmp_path: Path) -> None:
    """A pair, all prompts in flight together."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pdrt import config, demo
    from tests.e2e import halves

    path = demo.prepare(config.cache_dir(), lambda _stage: None)
    oracle: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    asked = halves.prompts(AutoTokenizer.from_pretrained(path))
    wanted = await asyncio.to_thread(halves.continued, oracle, asked, TOKENS)
    tables: Tables = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "device": {"kind": "cpu", "threads": 1},
        "scheduler": {"kv_memory": 400 << 20},
        **PATIENT,
    }
    cluster = Cluster.make(tmp_path, 1, 1, 0, tables, router=PATIENT)
    cluster.startup_s = cluster.answer_s = 300.0
    async with cluster.running():
        said = await asyncio.gather(*(answer(cluster, one.prompt) for one in wanted))
    differing = [one.difference(ids) for one, ids in zip(wanted, said, strict=True)]
    listed = [what for what in differing if what]
    share = 1 - len(listed) / len(wanted)
    print(f"\n{share:.1%} of {len(wanted)} are the same", *listed, sep="\n  ")  # noqa: T201 - a figure
    assert share >= SHARE, listed


async def answer(cluster: Cluster, prompt: list[int]) -> list[int]:
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return (await cluster.generate(prompt, sampling=sampling)).ids
