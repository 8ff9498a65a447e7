"""What the nodes of an instance must have alike, so that each request is answered alike on each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdrt.config import DisaggConfig, NodeConfig, Place
from pdrt.fronts import Setting
from pdrt.keys import ClusterKey
from pdrt.modelspec import NULL_SPEC, ModelSpec


def setting(spec: ModelSpec = NULL_SPEC, **tables: object) -> Setting:
    config = NodeConfig.model_validate({"model": {"path": "null"}, **tables})
    place = Place.of(config.parallel, 0)
    disagg = DisaggConfig.derive("hybrid", config, place)
    return Setting("hybrid", config, place, ClusterKey(b"k" * 32), disagg, spec, 1)


OTHERS = {
    "[model] dtype": setting(model={"path": "null", "dtype": "bfloat16"}),
    "[model] backend": setting(replace(NULL_SPEC, backend="transformers")),
    "the model": setting(replace(NULL_SPEC, vocab=NULL_SPEC.vocab + 1)),
    "[scheduler] block_size": setting(scheduler={"block_size": 32}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nodes_that_would_answer_otherwise_do_not_fit(name: str) -> None:
    ours, theirs = setting().must_agree(), OTHERS[name].must_agree()
    assert {key for key in ours if ours[key] != theirs[key]} == {name}
