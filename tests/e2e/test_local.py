"""Short prompts that decode computes itself: the same answers, without a word to prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import PATIENT, Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
SETTINGS: Tables = {"scheduler": {"max_prefill_tokens": 32, "local_prefill": True}}
ROUTER: Tables = {**PATIENT, "policy": {"local_prefill_tokens": 40}}
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(
        tmp_path_factory.mktemp("local"), 1, 1, 0, SETTINGS, PATIENT, router=ROUTER
    )
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 41, 100])
async def test_an_answer_is_the_same_whoever_computes_its_prompt(
    cluster: Cluster, length: int
) -> None:
    """CASES 81."""
    prompt = [(7 * i) % 256 for i in range(length)]
    answer = await cluster.post("/generate", {"prompt": prompt, "sampling_params": SAMPLED})
    assert answer.ids == Colocated().answer(prompt, SAMPLED)
    path = "local" if length <= 40 else "disagg"
    assert (answer.headers["x-pd-path"], answer.body["path"]) == (path, path)
    assert answer.body["usage"]["completion_tokens"] == 12
    await cluster.until_baseline()


async def test_a_group_and_its_prompts_odds_come_from_decode_alone(cluster: Cluster) -> None:
    params = {**SAMPLED, "n": 3, "logprobs": 1, "prompt_logprobs": 1}
    local = await cluster.post("/generate", {"prompt": [1, 2, 3], "sampling_params": params})
    assert local.headers["x-pd-path"] == "local"
    pin = {"bootstrap_host": cluster.nodes["prefill0"].url[7:-5], "bootstrap_port": 18800}
    both = await cluster.post("/generate", {"prompt": [1, 2, 3], "sampling_params": params, **pin})
    assert both.headers["x-pd-path"] == "disagg"
    for name in ("outputs", "prompt_logprobs"):
        assert local.body[name] == both.body[name]
    await cluster.until_baseline()
