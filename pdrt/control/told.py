"""What a leader tells of its work beside its load: totals that rise, and its workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

_IGNORE = ConfigDict(extra="ignore")


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
