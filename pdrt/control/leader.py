"""What a leader's HTTP side needs to know and to reach, given by its supervisor as one record."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pdrt.config import Role
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.grammarcheck import GrammarCheck
from pdrt.control.http import Json
from pdrt.control.keydoor import KeyDoor
from pdrt.control.text import TextPool
from pdrt.control.traces import Tracing
from pdrt.errors import BadRequest, TooLong
from pdrt.keys import ClusterKey
from pdrt.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`pool_tokens` is asked anew each time: it is known once a worker is ready, 0 before."""

    max_model_len: int
    vocab: int
    pool_tokens: Callable[[], int] = lambda: 0
    max_body_bytes: int = 8 << 20
    request_s: float = 600.0

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises BadRequest for an empty prompt and for ids that the model does not know."""
        if not ids:
            raise BadRequest("prompt is empty")
        if (largest := max(ids)) >= self.vocab:
            raise BadRequest(f"prompt: token {largest} is outside the vocabulary of {self.vocab}")

    def check_bias(self, sampling: Sampling) -> None:
        """Raises BadRequest for a token that the model does not know."""
        if sampling.logit_bias and (largest := max(sampling.logit_bias)[0]) >= self.vocab:
            raise BadRequest(
                f"logit_bias: token {largest} is outside the vocabulary of {self.vocab}"
            )

    def total(self, role: Role, prompt_tokens: int) -> int:
        """Most tokens of prompt and answer together. Raises TooLong when the prompt cannot fit.

        A prefill instance holds the prompt only, whatever the answer's length.
        """
        pool = self.pool_tokens()
        if pool and prompt_tokens > pool:
            raise TooLong(f"the prompt has {prompt_tokens} tokens; the KV pool holds {pool}")
        return min(self.max_model_len, pool) if pool and role != "prefill" else self.max_model_len


@dataclass(slots=True, kw_only=True)
class Leader:
    """`status` answers /internal/status; `why_not_ready` is empty when a request would succeed."""

    role: Role
    model: str  # what clients call it
    dispatcher: DPDispatcher
    text: TextPool
    grammars: GrammarCheck
    limits: Limits
    key: ClusterKey | None
    registry: CollectorRegistry
    status: Callable[[], Json]
    why_not_ready: Callable[[], str]
    health: Callable[[], Json] = dict  # what operators should see: dead workers, lapsed leases
    stalled_s: Callable[[], float] = lambda: 0.0  # since the event loop last turned
    served: Callable[[], None] = lambda: None  # called when a request has succeeded
    drain: Callable[[], None] = lambda: None
    takes_prompts: bool = False  # decode: its workers may compute a prompt that no prefill will
    tracing: Tracing | None = None
    keydoor: KeyDoor | None = (
        None  # for the clients of a hybrid instance; None: no keys are asked for
    )
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    mint: Callable[[], int] = lambda: secrets.randbits(63)  # rooms, and seeds nobody gave

    def is_member(self, authorization: str) -> bool:
        """Whether the cluster asks, for whom no client's limits are."""
        return self.key is not None and self.key.is_bearer(authorization)
