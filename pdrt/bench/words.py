"""What the two ends of `pdrt bench transfer` say to each other over encrypted sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from pdrt.messages import Count, Process, Region, Short, Words

BENCH_PROTOCOL: Final = 1
_Names = Annotated[tuple[Short, ...], Field(max_length=16)]


# The writer asks; each question has a number, and its answer the same one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Make a pool of this size, and open these transports over it."""

    op: Literal["hello"] = "hello"
    number: Count
    endpoint: Short  # where the answers go
    protocol: Count = BENCH_PROTOCOL
    pool_bytes: Annotated[int, Field(ge=4096, lt=1 << 40)]
    transports: _Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is the checksum over the blocks of this stretch?"""

    op: Literal["check"] = "check"
    number: Count
    block_bytes: Annotated[int, Field(ge=1, lt=1 << 40)]
    first: Count
    count: Annotated[int, Field(ge=0, le=1 << 24)]
    turn: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """Nothing more is asked."""

    op: Literal["bye"] = "bye"
    number: Count


Question: TypeAlias = Annotated[Hello | Check | Bye, Field(discriminator="op")]
QUESTION: TypeAdapter[Hello | Check | Bye] = TypeAdapter(Question)


# The target answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The pool is there. `refused` says why a transport is not."""

    op: Literal["welcome"] = "welcome"
    number: Count
    process: Process
    region: Region
    refused: Annotated[dict[Short, Words], Field(max_length=16)]
    plain_port: Annotated[int, Field(ge=1, le=65535)]
    plain_token: Annotated[bytes, Field(max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    op: Literal["sum"] = "sum"
    number: Count
    value: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorry:
    """The question cannot be answered."""

    op: Literal["sorry"] = "sorry"
    number: Count
    reason: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    op: Literal["farewell"] = "farewell"
    number: Count


Answer: TypeAlias = Annotated[Welcome | Sum | Sorry | Farewell, Field(discriminator="op")]
ANSWER: TypeAdapter[Welcome | Sum | Sorry | Farewell] = TypeAdapter(Answer)
