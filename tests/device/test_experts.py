"""Each token visits the experts that its family's rule chooses; no other expert does a thing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdrt.device.linear import Linear
from pdrt.device.models.blocks import FeedForward, Mlp, Reader
from pdrt.device.models.experts import Moe, Router, feed_forward
from pdrt.device.shard import Shard
from pdrt.device.weights import Checkpoint
from pdrt.modelspec import Experts, ModelSpec
from tests.device import tiny

HIDDEN, WIDE = 12, 5
HOW = Experts(count=6, per_token=2, intermediate=WIDE, layers=frozenset({0}))


def mlp() -> Mlp:
    return Mlp(Linear(torch.randn(2 * WIDE, HIDDEN)), Linear(torch.randn(HIDDEN, WIDE)))


def moe(how: Experts, seed: int = 0, bias: Tensor | None = None) -> Moe:
    torch.manual_seed(seed)
    return Moe(
        Router(how, torch.randn(how.count, HIDDEN), bias),
        tuple(mlp() for _ in range(how.count)),
    )


def expert(block: Moe, number: int, x: Tensor) -> Tensor:
    own = block.experts[number]
    gate, up = (own.gate_up.weight @ x).chunk(2)
    return own.down.weight @ (F.silu(gate) * up)


def by_definition(block: Moe, x: Tensor) -> Tensor:
    """Token by token, choice by choice."""
    chosen, counts = block.router(x)
    return torch.stack(
        [
            sum(
                (count * expert(block, int(e), row) for e, count in zip(es, cs, strict=True)),
                start=torch.zeros(HIDDEN),
            )
            for row, es, cs in zip(x, chosen, counts, strict=True)
        ]
    )


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 70),
    count=st.integers(1, 9),
    share=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_tokens_sorted_by_expert_get_what_each_would_get_alone(
    rows: int, count: int, share: int, seed: int
) -> None:
    block = moe(replace(HOW, count=count, per_token=min(share, count)), seed)
    x = torch.randn(rows, HIDDEN)
    torch.testing.assert_close(block(x), by_definition(block, x), atol=1e-4, rtol=1e-4)


def test_an_expert_that_no_token_chose_is_not_touched() -> None:
    block = moe(HOW)
    x = torch.randn(2, HIDDEN)
    used = set(block.router(x)[0].flatten().tolist())
    idle = [number for number in range(HOW.count) if number not in used]
    assert idle
    want = block(x)
    for number in idle:
        block.experts[number].down.weight.fill_(torch.nan)
    assert torch.equal(block(x), want)


class Counted(TorchFunctionMode):
    """How often an activation was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.activations = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        self.activations += func is F.silu
        return func(*args, **(kwargs or {}))


def test_products_are_one_for_each_expert_that_has_tokens() -> None:
    """However many tokens there are."""
    block = moe(replace(HOW, count=40))
    for rows in (1, 3, 200):
        x = torch.randn(rows, HIDDEN)
        used = set(block.router(x)[0].flatten().tolist())
        with Counted() as counted:
            block(x)
        assert counted.activations == len(used)


def test_the_shared_expert_is_added_to_what_the_routed_ones_say() -> None:
    block = moe(HOW)
    shared = mlp()
    x = torch.randn(7, HIDDEN)
    torch.testing.assert_close(replace(block, shared=shared)(x), block(x) + shared(x))


SCORES = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, 3.5]])


def route(how: Experts, bias: Tensor | None = None) -> dict[int, float]:
    """What the router says to a token whose raw scores are `SCORES`."""
    chosen, counts = Router(how, SCORES.t().contiguous(), bias)(torch.ones(1, 1))
    return dict(zip(chosen[0].tolist(), counts[0].tolist(), strict=True))


SOFT, SIGMOID = SCORES[0].softmax(0), SCORES[0].sigmoid()
GROUPED = replace(HOW, groups=3, top_groups=1)


@pytest.mark.parametrize(
    ("how", "bias", "want"),
    [
        (HOW, None, {3: SOFT[3], 5: SOFT[5]}),
        (replace(HOW, scale=2.5), None, {3: 2.5 * SOFT[3], 5: 2.5 * SOFT[5]}),
        (
            replace(HOW, normed=True),
            None,
            {3: SOFT[3] / (SOFT[3] + SOFT[5]), 5: SOFT[5] / (SOFT[3] + SOFT[5])},
        ),
        (replace(HOW, scoring="sigmoid"), None, {3: SIGMOID[3], 5: SIGMOID[5]}),
        # The bias chooses, and does not count.
        (
            replace(HOW, scoring="sigmoid", has_bias=True),
            torch.tensor([9.0, 0, 0, 0, 8.0, 0]),
            {0: SIGMOID[0], 4: SIGMOID[4]},
        ),
        (GROUPED, None, {3: SOFT[3], 2: SOFT[2]}),
        # The group with the best expert, or the one whose two best are better together.
        (replace(GROUPED, groups=2, group_score="max"), None, {3: SOFT[3], 5: SOFT[5]}),
        (
            replace(GROUPED, groups=2, scoring="sigmoid", group_score="top2", has_bias=True),
            torch.tensor([0, 0.5, 0.5, 0.1, 0, 0]),
            {2: SIGMOID[2], 1: SIGMOID[1]},
        ),
        (replace(GROUPED, top_groups=2), None, {3: SOFT[3], 5: SOFT[5]}),
    ],
)
def test_what_a_router_chooses(how: Experts, bias: Tensor | None, want: dict[int, Tensor]) -> None:
    assert route(how, bias) == pytest.approx({e: float(count) for e, count in want.items()})


def test_a_router_chooses_in_float32_whatever_the_models_dtype() -> None:
    """Two experts whose scores bfloat16 cannot tell apart."""
    how = replace(HOW, count=2, per_token=1)
    router = Router(how, torch.tensor([[1.0, 0.0], [1.0, 1 / 512]]))
    assert router(torch.ones(1, 2, dtype=torch.bfloat16))[0].tolist() == [[1]]


def loaded(directory: Path, layer: int, rank: int = 0, size: int = 1) -> FeedForward:
    shard = Shard(ModelSpec.read(directory), rank, size)
    weights = Checkpoint(directory, lambda _stage, _done, _total: None)
    return feed_forward(shard, Reader(weights, torch.float32, "cpu"), layer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    @functools.cache
    def make(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(name)
        return directory, tiny.make(name, directory)

    return make


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_stacked_and_single_experts_of_a_checkpoint_are_the_same(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path, name: str, rank: int, size: int
) -> None:
    """`save_pretrained` writes them one by one, or all in one tensor when told to."""
    directory, oracle = saved(name)
    oracle.save_pretrained(tmp_path, save_original_format=False)
    one_by_one, stacked = loaded(directory, 0, rank, size), loaded(tmp_path, 0, rank, size)
    assert isinstance(one_by_one, Moe)
    assert isinstance(stacked, Moe)
    for one, other in zip(one_by_one.experts, stacked.experts, strict=True):
        assert torch.equal(one.gate_up.weight, other.gate_up.weight)
        assert torch.equal(one.down.weight, other.down.weight)
    assert torch.equal(one_by_one.router.weight, stacked.router.weight)


def test_a_block_says_what_transformers_says(saved: Callable[[str], tuple[Path, Any]]) -> None:
    directory, oracle = saved("qwen3_moe")
    x = torch.randn(30, oracle.config.hidden_size)
    with torch.no_grad():
        want = oracle.model.layers[2].mlp(x[None])[0]
    torch.testing.assert_close(loaded(directory, 2)(x), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_what_the_ranks_have_of_each_expert_adds_up(
    saved: Callable[[str], tuple[Path, Any]], name: str
) -> None:
    directory, oracle = saved(name)
    x = torch.randn(30, oracle.config.hidden_size)
    layer = oracle.config.num_hidden_layers - 1
    whole, *parts = (loaded(directory, layer, r, n) for r, n in [(0, 1), (0, 2), (1, 2)])
    for part in parts:
        assert isinstance(part, Moe)
        assert isinstance(whole, Moe)
        for half, full in zip(part.experts, whole.experts, strict=True):
            assert 2 * half.down.weight.numel() == full.down.weight.numel()
    torch.testing.assert_close(parts[0](x) + parts[1](x), whole(x), atol=1e-5, rtol=1e-4)


def test_layers_without_experts_have_an_mlp(saved: Callable[[str], tuple[Path, Any]]) -> None:
    directory = saved("qwen3_moe")[0]
    assert [isinstance(loaded(directory, layer), Moe) for layer in range(3)] == [True, False, True]
