"""Ranks that share the rows of embedding and head say what one rank says, in its part of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pdrt.device import collective
from pdrt.device.collective import Collective, Solo
from pdrt.device.models.blocks import Reader
from pdrt.device.models.vocabulary import Vocabulary, vocabulary
from pdrt.device.shard import Shard
from pdrt.device.weights import Checkpoint
from pdrt.modelspec import NULL_SPEC, ModelSpec
from tests.device import ranks
from tests.device.ranks import places

HIDDEN = 16


@given(vocab=st.integers(1, 500), size=st.sampled_from([1, 2, 4, 8]))
def test_each_token_is_on_one_rank_and_no_rank_has_more_than_the_first(
    vocab: int, size: int
) -> None:
    spec = replace(NULL_SPEC, vocab=vocab)
    parts = [Shard(spec, rank, size).vocab for rank in range(size)]
    assert [token for part in parts for token in range(part.first, part.end)] == list(range(vocab))
    assert all(len(part) <= len(parts[0]) for part in parts)
    assert all(part.whole == vocab for part in parts)


def saved(directory: Path, vocab: int, *, tied: bool) -> ModelSpec:
    torch.manual_seed(vocab)
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = torch.randn(vocab, HIDDEN)
    save_file(tensors, directory / "model.safetensors")
    return replace(NULL_SPEC, vocab=vocab, hidden=HIDDEN, tied=tied)


def opened(directory: Path, shard: Shard) -> Vocabulary:
    weights = Checkpoint(directory, lambda _stage, _done, _total: None)
    return vocabulary(shard, Reader(weights, torch.float32, "cpu"))


def said(
    directory: Path, shard: Shard, group: Collective, tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A rank's embeddings of the tokens, and its logits of these."""
    words = opened(directory, shard)
    found = words.embed(tokens, group)
    return found, words.logits(found, group)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "size"), [(40, 2), (41, 2), (41, 4), (5, 4)])
def test_a_group_embeds_and_judges_as_one_rank_does(
    tmp_path: Path, vocab: int, size: int, *, tied: bool
) -> None:
    """5 tokens on 4 ranks: the last has none."""
    spec = saved(tmp_path, vocab, tied=tied)
    tokens = torch.arange(vocab)
    whole, judged = said(tmp_path, Shard(spec), Solo(), tokens)
    assert judged is not None

    def as_rank(place: ranks.Place) -> tuple[Tensor, Tensor | None]:
        group = collective.join(place.rank, size, place.rendezvous, 10)
        return said(tmp_path, Shard(spec, place.rank, size), group, tokens)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(as_rank, places(tmp_path, size)))
    for embedded, _ in found:
        assert torch.equal(embedded, whole)
    assert found[0][1] is not None
    torch.testing.assert_close(found[0][1], judged)
    assert [logits for _, logits in found[1:]] == [None] * (size - 1)


def test_tied_rows_are_in_memory_once(tmp_path: Path) -> None:
    tied = opened(tmp_path, Shard(saved(tmp_path, 40, tied=True), 1, 2))
    assert tied.head.weight.data_ptr() == tied.embedding.data_ptr()
