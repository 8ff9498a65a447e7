"""The attention interface of transformers, answered by the step that a model's forward runs in.

A model calls once a layer, with the queries, keys and values of all rows and with what it asks of
attention: `Terms`. Its mask stays a function, so a step can ask it about true positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME: Final = "pdrt_paged"
Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of batch, head, query and key index: whether the query sees the key."""


class Unserved(Exception):
    """The model asks something of attention that is not served; says what."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Travels through a model where its mask tensor would."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Terms:
    """What a layer asks of its attention."""

    scaling: float
    rule: Rule | None = None  # None: all that came before
    window: int = 0  # 0: none
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [heads]: a further score of each row, without a value


class Step(Protocol):
    """A forward pass: over a pool, or one that only looks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """[rows, heads, head_dim] for q, and k and v [rows, kv_heads, head_dim], of a layer."""
        ...


_STEP: Final[ContextVar[Step]] = ContextVar("step")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Models called in here attend in this step."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def register() -> None:
    """Make `NAME` an attention implementation of transformers; again changes nothing."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, mask_function: Rule, **_: object) -> Mask:
    return Mask(mask_function)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    **asked: object,
) -> tuple[Tensor, None]:
    """What transformers calls, with tensors [1, heads, rows, head_dim]."""
    if not getattr(module, "is_causal", True):
        raise Unserved("its attention looks ahead")
    if isinstance(attention_mask, Tensor):
        raise Unserved("it makes an attention mask of its own")
    if asked.get("position_bias") is not None:
        raise Unserved("it adds a position bias to its attention")
    sinks, scaling = asked.get("s_aux"), asked.get("scaling")
    terms = Terms(
        scaling=query.shape[-1] ** -0.5 if scaling is None else _number(scaling),
        rule=attention_mask.rule if attention_mask else None,
        window=int(_number(asked.get("sliding_window"))),
        softcap=_number(asked.get("softcap")),
        sinks=sinks if isinstance(sinks, Tensor) else None,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _STEP.get().attend(q, k, v, terms).unsqueeze(0), None


def _number(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, int | float):
        return value
    raise Unserved(f"its attention gives {type(value).__name__} where a number is understood")


@dataclass(slots=True)
class Shapes:
    """A step that only notes what each layer brings; its tensors need no memory (meta)."""

    layers: list[tuple[int, int, int]]  # kv heads, width of a key, of a value

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _terms: Terms) -> Tensor:
        self.layers.append((k.shape[1], k.shape[2], v.shape[2]))
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])
