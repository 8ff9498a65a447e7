"""What a leader tells of its work: what it carries, totals that rise, and its workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

_IGNORE = ConfigDict(extra="ignore")


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class LoadTold:
    """What a leader carries, all its routers' requests together."""

    tokens: int = 0  # of the requests in hand: prompts, and in decode what may follow them
    kv_tokens: int = 0  # that its KV pools hold for requests
    pool_tokens: int = 0  # that they could hold; 0: not known
    is_full: bool = False  # one more request would be refused with 429
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class TotalsTold:
    """Counters that rise while its workers live, as they were at `at` by the leader's clock."""

    at: float = 0.0
    tokens_out: float = 0.0
    prompt_tokens_computed: float = 0.0
    sent_bytes: float = 0.0
    transfers: float = 0.0
    retractions: float = 0.0


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class WorkerTold:
    """`transports` says of each prefill rank's endpoint what carries its KV, and how fast."""

    rank: str = ""
    state: str = ""
    endpoint: str | None = None
    queues: Annotated[dict[str, int], Field(max_length=64)] = Field(default_factory=dict)
    transports: Annotated[dict[str, str], Field(max_length=4096)] = Field(default_factory=dict)
    last_problem: str | None = None
