"""Everything that crosses a process boundary between pdrt processes, and nothing else.

The promise: bytes from a socket become one of these messages or a BadMessage, never another
exception; sizes and depths are limited while unpacking. Adding: new fields go last and have
a default; unknown fields are ignored. Removing or re-typing a field: raise PROTOCOL. Lists
of tokens and blocks travel as little-endian int32 `bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Final, Literal, TypeAlias, TypeVar, cast, dataclass_transform

import msgpack
import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pdrt.errors import BadMessage, PdrtError, tree

T = TypeVar("T")
Top: TypeAlias = tuple[tuple[int, float], ...]  # token and log-probability, the likeliest first

PROTOCOL: Final = 3
MAX_MESSAGE_BYTES: Final = 1 << 24
# Between ranks: no arrays, small maps, and bulk in one bin only, for an empty list is one byte
# on the wire and 64 in memory.
MAX_PEER_BYTES: Final = (1 << 20) + (1 << 16)
_LIMITS: Final = {
    "max_bin_len": 1 << 23,
    "max_str_len": 1 << 16,
    "max_array_len": 1 << 14,
    "max_map_len": 1 << 12,
    "max_ext_len": 0,
}
_PEER_LIMITS: Final = _LIMITS | {"max_bin_len": 1 << 20, "max_array_len": 64, "max_map_len": 64}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def _wire(cls: type[T]) -> type[T]:
    """A frozen message; checkers see its fields, readers ignore fields they do not know."""
    make = dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
    return cast("type[T]", make(cls))


U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U31 = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]  # no integer here is too big for msgpack
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Room = Annotated[int, Field(ge=0, lt=1 << 63)]
Short = Annotated[str, Field(max_length=512)]
# Words for people are cut to size, not refused: an error must not fail on its way.
Words = Annotated[str, BeforeValidator(lambda value: _cut(value, 512))]
Text = Annotated[str, BeforeValidator(lambda value: _cut(value, 8192))]
Handle = Annotated[bytes, Field(max_length=65536)]
Finish: TypeAlias = Literal["stop", "length"]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def _cut(value: object, characters: int) -> object:
    if not isinstance(value, str):
        return value
    return value[:characters].encode(errors="replace").decode()  # no half of a surrogate pair


def pack_ids(ids: "np.typing.ArrayLike") -> bytes:
    """Tokens or blocks as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises BadMessage when the length is not a multiple of four."""
    if len(data) % 4:
        raise BadMessage(f"{len(data)} bytes are no list of int32")
    ids: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return ids


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian float32."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> list[float]:
    """Inverse of `pack_logprobs`. Raises BadMessage when the length is not a multiple of four."""
    if len(data) % 4:
        raise BadMessage(f"{len(data)} bytes are no list of float32")
    values: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return values


_ODD: Final = np.dtype([("token", "<i4"), ("logprob", "<f4")])


def pack_tops(tops: Sequence[Top]) -> bytes:
    """For each token the likeliest ones in its place: rows of the same number of pairs."""
    return np.array([pair for top in tops for pair in top], dtype=_ODD).tobytes()


def unpack_tops(data: bytes, rows: int) -> list[Top]:
    """Inverse of `pack_tops` for so many tokens. Raises BadMessage when they do not come out."""
    if rows < 1 or len(data) % (rows * _ODD.itemsize):
        raise BadMessage(f"{len(data)} bytes are no pairs of {rows} tokens")
    pairs = np.frombuffer(data, dtype=_ODD).tolist()
    width = len(pairs) // rows
    return [tuple(pairs[row * width : (row + 1) * width]) for row in range(rows)]


def pack_odds(logprobs: Sequence[float], tops: Sequence[Top]) -> bytes:
    """Log-probabilities of tokens, and beside each the likeliest ones in its place."""
    rows = [((-1, own), *top) for own, top in zip(logprobs, tops, strict=True)]
    return pack_tops(rows)


def unpack_odds(data: bytes, rows: int) -> list[tuple[float, Top]]:
    """Inverse of `pack_odds`. Raises BadMessage."""
    found = unpack_tops(data, rows)
    if not all(found):
        raise BadMessage(f"{len(data)} bytes are no odds of {rows} tokens")
    return [(row[0][1], row[1:]) for row in found]


# What several messages are made of.


@_wire
class KvLayout:
    """Shape of one KV block of one rank; both ends of a transfer must agree on all but `kv_heads`.

    And on `quantize`, which is no part of the shape: with other weights on one side the blocks
    would fit, and answers would be those of neither.

    A block is one contiguous run of bytes, [kv_heads, layers, 2 (k, v), block_size, head_dim]
    of `dtype`: each kv head's part of a block is contiguous, so that unequal tensor
    parallelism moves whole runs. A latent block (MLA) is [1, layers, 1, block_size, head_dim]
    and the same on every rank.
    """

    block_size: Annotated[int, Field(ge=1, le=4096)]
    dtype: Literal["float32", "bfloat16", "float16", "uint8"]
    layers: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=4096)]
    head_dim: Annotated[int, Field(ge=1, le=65536)]
    kind: Literal["heads", "latent"] = "heads"
    total_kv_heads: Annotated[int, Field(ge=0, le=4096)] = 0  # the model's; 0: all are here
    quantize: Literal["none", "int8"] = "none"  # of the weights that compute it

    @property
    def model_kv_heads(self) -> int:
        return self.total_kv_heads or self.kv_heads

    @property
    def head_bytes(self) -> int:
        """One kv head's part of a block."""
        width = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}[self.dtype]
        parts = 1 if self.kind == "latent" else 2
        return self.layers * parts * self.block_size * self.head_dim * width

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    def differences(self, other: "KvLayout") -> list[str]:
        """What no transfer can bridge, with both values; ranks may hold different heads."""
        mine, theirs = asdict(self), asdict(other)
        mine["kv_heads"], theirs["kv_heads"] = self.model_kv_heads, other.model_kv_heads
        return [
            f"{n}: {mine[n]} here, {theirs[n]} there"
            for n in mine
            if n != "total_kv_heads" and mine[n] != theirs[n]
        ]


@_wire
class Grammar:
    """What an answer must be, in the words of one of these languages.

    `json` is a JSON schema, `choice` a JSON list of strings, `lark` a grammar in Lark's notation.
    """

    kind: Literal["json", "regex", "choice", "lark"]
    text: Annotated[str, Field(max_length=1 << 16)]


@_wire
class Sampling:
    """How tokens are drawn and when an answer ends. Stop strings are the leader's business."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 128
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: U31 = 0  # 0 = off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stop_token_ids: Annotated[tuple[U31, ...], Field(max_length=1024)] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    n: Annotated[int, Field(ge=1, le=128)] = 1  # sequences after one prompt, each with an end
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0  # likeliest tokens told beside each
    # Tokens, each once, and what is added to their logits.
    logit_bias: Annotated[tuple[tuple[U31, Bias], ...], Field(max_length=1024)] = ()
    grammar: Grammar | None = None  # tokens that break it are not drawn


@_wire
class Process:
    """Names one process for good: `host` is boot id and pid namespace, `started` in clock ticks."""

    host: Short
    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    started: Count


@_wire
class Rank:
    """A worker's place in its instance."""

    dp: U31 = 0
    cp: U31 = 0
    tp: U31 = 0

    def __str__(self) -> str:
        return f"{self.dp},{self.cp},{self.tp}"

    @property
    def is_head(self) -> bool:
        """Whether it has the scheduler of its group, which are all ranks of one dp rank."""
        return self.cp == self.tp == 0


@_wire
class Problem:
    """An error as a value: what the client will read."""

    code: Words
    message: Text
    stage: Words = ""

    @staticmethod
    def of(error: PdrtError, stage: str = "") -> "Problem":
        """An error as it travels; its own stage wins."""
        return Problem(code=error.code, message=str(error), stage=error.stage or stage)

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed elsewhere or later."""
        error = tree().get(self.code)
        return error is not None and error.retryable


@_wire
class Source:
    """Which prefill instance (its bootstrap server) and dp rank computes a prompt."""

    host: Short
    port: Annotated[int, Field(ge=1, le=65535)]
    dp_rank: Number = -1  # -1: not said, which is enough where there is one


@_wire
class Region:
    """A decode rank's memory, described once per peer and epoch.

    Slots lie at `slots_at`, 64 bytes each; block b at `pool_at + b * layout.block_bytes`; its
    checksums (when they are wanted), u32 a kv head, at `sums_at + b * 4 * layout.kv_heads`.
    `offers` maps each transport that reaches it to what that transport needs for it.
    """

    offers: Annotated[dict[Short, Handle], Field(max_length=8)]
    size: Count
    slots_at: Count
    slots: Count
    pool_at: Count
    blocks: Count
    sums_at: Count = 0
    probe_at: Count = 0  # bytes that anybody attached may write, to try the way
    probe_bytes: Count = 0


# Decode rank -> prefill rank.


@_wire
class Attach:
    """Sent once per (decode worker, prefill rank), before the first Handshake."""

    op: Literal["attach"] = "attach"
    protocol: Number = PROTOCOL
    session: Short  # names this decode worker's life
    endpoint: Short  # where its control socket is reached
    process: Process
    layout: KvLayout
    region: Region
    rank: Rank = Rank()
    tp: Annotated[int, Field(ge=1, le=1024)] = 1  # of the decode instance
    checksums: bool = False  # it checks each block's, so they must be written
    number: Count = 0  # of this meeting; one with a higher number begins anew, with a new trial


@_wire
class Handshake:
    """Here are my blocks for (room, attempt): fill them, then the slot.

    Without `writes` another rank fills them: this one has nothing to do for the attempt.
    """

    op: Literal["handshake"] = "handshake"
    room: Room
    attempt: U32
    session: Short
    blocks: Annotated[bytes, Field(max_length=1 << 20)]  # int32, from the prompt's first_block on
    first_block: U32  # leading blocks that decode holds already
    slot: U32
    prompt_tokens: U32
    prompt_hash: Annotated[bytes, Field(max_length=32)]
    decode_ranks: Annotated[int, Field(ge=1, le=1024)]
    expires: float  # wall clock, seconds
    token: Annotated[bytes, Field(max_length=64)]
    number: Count = 0  # rises in a session: what is late is refused
    writes: bool = True


@_wire
class AbortTransfer:
    op: Literal["abort"] = "abort"
    room: Room
    attempt: U32
    session: Short
    number: Count = 0
    reason: Words = ""
    is_served: bool = False  # decode has all that it needs: its answer ended with the first token
    is_leaving: bool = False  # the decode worker stops: another prefill would not help


@_wire
class Ping:
    op: Literal["ping"] = "ping"
    session: Short
    number: Number


FromDecode: TypeAlias = Annotated[
    Attach | Handshake | AbortTransfer | Ping, Field(discriminator="op")
]


# Prefill rank -> decode rank.


@_wire
class Attached:
    """The answer to Attach: transfers of this session may begin."""

    op: Literal["attached"] = "attached"
    session: Short
    rank: Rank
    process: Process
    transport: Short = ""  # the way that both can go, tried by a real transfer ...
    gb_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # ... that was so fast
    number: Count = 0  # the Attach's


@_wire
class Refused:
    """The answer to an Attach that can never work (layouts differ, no such transport)."""

    op: Literal["refused"] = "refused"
    session: Short
    problem: Problem
    process: Process | None = None  # who refuses
    number: Count = 0  # the Attach's


@_wire
class Accepted:
    """A handshake has arrived and its attempt is not over."""

    op: Literal["accepted"] = "accepted"
    session: Short
    room: Room
    attempt: U32
    rank: Rank


@_wire
class Started:
    """The prompt's computation has begun: the transfer's clock starts."""

    op: Literal["started"] = "started"
    session: Short
    room: Room
    attempt: U32
    rank: Rank


@_wire
class Firsts:
    """The first token of each of the n sequences, as soon as it is drawn; their KV comes later."""

    op: Literal["firsts"] = "firsts"
    session: Short
    room: Room
    attempt: U32
    rank: Rank
    tokens: Annotated[bytes, Field(max_length=1 << 12)]  # int32
    logprobs: Annotated[bytes, Field(max_length=1 << 12)]  # float32
    tops: Annotated[bytes, Field(max_length=1 << 16)] = b""  # `pack_tops` of `tokens`
    cached_tokens: U31 = 0


@_wire
class Progress:
    """A doorbell: blocks have been written; when `complete`, the slot too: look at it."""

    op: Literal["progress"] = "progress"
    session: Short
    room: Room
    attempt: U32
    rank: Rank
    done_bytes: Count = 0
    complete: bool = False


@_wire
class Failed:
    op: Literal["failed"] = "failed"
    session: Short
    room: Room
    attempt: U32
    rank: Rank
    problem: Problem


@_wire
class Quiesced:
    """No write of this attempt by this rank can happen any more."""

    op: Literal["quiesced"] = "quiesced"
    session: Short
    room: Room
    attempt: U32
    rank: Rank


@_wire
class Pong:
    op: Literal["pong"] = "pong"
    session: Short
    number: Number
    process: Process


@_wire
class Left:
    """This process writes nothing any more, for no attempt, and will not: it ends."""

    op: Literal["left"] = "left"
    session: Short
    process: Process


FromPrefill: TypeAlias = Annotated[
    Attached | Refused | Accepted | Started | Firsts | Progress | Failed | Quiesced | Pong | Left,
    Field(discriminator="op"),
]


# Supervisor -> worker.


@_wire
class Said:
    """What its client has of one sequence of an answer whose instance was lost."""

    index: Annotated[int, Field(ge=0, lt=128)]
    tokens: Annotated[bytes, Field(max_length=1 << 23)] = b""  # int32


@_wire
class Submit:
    """Serve this. `tokens` are prompt and, when prefill computes a lost answer again, what was
    said so far. Who goes on with an answer that another instance began gets that in `said`: an
    entry for each sequence that has not ended."""

    op: Literal["submit"] = "submit"
    room: Room
    attempt: U32
    request_id: Short
    tokens: Annotated[bytes, Field(max_length=1 << 23)]  # int32
    prompt_tokens: U32  # how many of `tokens` are the client's prompt
    sampling: Sampling
    time_left: Seconds
    source: Source | None = None  # decode only
    scoring: Annotated[int, Field(ge=-1, le=20)] = -1  # top of each prompt token's odds; -1: none
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0  # higher first
    salt: Short = ""  # whose cached prefixes may be used: those with the same
    is_trial: bool = False  # to prove the way: the first token waits for its KV
    said: Annotated[tuple[Said, ...], Field(max_length=128)] = ()


@_wire
class Rebind:
    """Decode only: the prefill side of this room is tried again, elsewhere or anew."""

    op: Literal["rebind"] = "rebind"
    room: Room
    attempt: U32
    source: Source


@_wire
class ResumeLocally:
    """Decode only: nobody will prefill this retracted room again; do it yourself."""

    op: Literal["resume_locally"] = "resume_locally"
    room: Room


@_wire
class AbortRoom:
    op: Literal["abort_room"] = "abort_room"
    room: Room
    reason: Words
    index: Annotated[int, Field(ge=-1, lt=128)] = -1  # one of its n sequences; -1: all of it


@_wire
class Drain:
    """No new work; tell when nothing is left."""

    op: Literal["drain"] = "drain"


@_wire
class Stop:
    op: Literal["stop"] = "stop"


ToWorker: TypeAlias = Annotated[
    Submit | Rebind | ResumeLocally | AbortRoom | Drain | Stop, Field(discriminator="op")
]


# Worker -> supervisor.


@_wire
class Loading:
    op: Literal["loading"] = "loading"
    stage: Short
    done: Number
    total: Number


@_wire
class Ready:
    op: Literal["ready"] = "ready"
    endpoint: Short  # control socket, tcp://host:port
    process: Process
    layout: KvLayout
    blocks: U32  # pool size
    eos_token_ids: tuple[Number, ...]


SpentMs: TypeAlias = tuple[
    tuple[Annotated[str, Field(max_length=16)], Annotated[float, Field(ge=0, allow_inf_nan=False)]],
    ...,
]  # phases of a request and how long they took, on the worker's clock


@_wire
class Output:
    """What a room gained in this step; `finish` or `problem` ends it.

    A prefill worker says finish="prefilled" when decode's memory holds the prompt.
    """

    room: Room
    tokens: tuple[Number, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: Finish | Literal["prefilled"] | None = None
    problem: Problem | None = None
    cached_tokens: Number = 0
    attempt: Annotated[int, Field(ge=-1, lt=1 << 32)] = -1  # else an older try's echo is dropped
    index: U31 = 0  # which of the n sequences; `finish` ends it, the last one's ends the room
    tops: Annotated[bytes, Field(max_length=1 << 23)] = b""  # `pack_tops` of `tokens`
    scored: Annotated[bytes, Field(max_length=1 << 23)] = b""  # `pack_odds` of the prompt
    spent_ms: Annotated[SpentMs, Field(max_length=16)] = ()  # with some: all of it until now


_validated: Final = TypeAdapter(Output).validator.validate_python


def token_out(room: int, attempt: int, token: int, logprob: float) -> Output:
    """One more token and nothing else: as an Output's constructor, at 0.6 of its price."""
    fields = {"room": room, "attempt": attempt, "tokens": (token,), "logprobs": (logprob,)}
    return cast("Output", _validated(fields))


@_wire
class Outputs:
    """One message a step for the whole batch."""

    op: Literal["outputs"] = "outputs"
    items: tuple[Output, ...]


@_wire
class AskPrefill:
    """A retracted room wants its prompt and output computed again on the prefill side."""

    op: Literal["ask_prefill"] = "ask_prefill"
    room: Room
    attempt: U32  # the new one
    tokens: Annotated[bytes, Field(max_length=1 << 23)]
    of_room: Annotated[int, Field(ge=-1, lt=1 << 63)] = -1  # `room` is a part of this one's
    index: U31 = 0  # which of its sequences


@_wire
class Stats:
    """Sent every half second and soon after changes; counters only rise."""

    op: Literal["stats"] = "stats"
    running: Number = 0
    queues: dict[str, Number] = Field(default_factory=dict)
    blocks_used: Number = 0
    blocks_total: Number = 0
    blocks_quarantined: Number = 0
    slots_used: Number = 0
    rooms: Number = 0
    peers: dict[str, str] = Field(default_factory=dict)
    counters: dict[str, float] = Field(default_factory=dict)
    step_ms: float = 0.0
    draining: bool = False
    transports: dict[str, str] = Field(default_factory=dict)  # peer -> its, and GB/s at its trial
    host_blocks_used: Number = 0
    host_blocks_total: Number = 0


@_wire
class Fatal:
    """The worker cannot go on and ends; the supervisor shows why."""

    op: Literal["fatal"] = "fatal"
    problem: Problem


FromWorker: TypeAlias = Annotated[
    Loading | Ready | Outputs | AskPrefill | Stats | Fatal, Field(discriminator="op")
]


# Between the ranks of a group (one dp rank: cp x tp), tp 0 of cp 0 and its followers.


@_wire
class Join:
    """All followers are there: meet the others' forward passes there.

    A file of one node, or `tcp://host:port` for a group that spans nodes.
    """

    op: Literal["join"] = "join"
    rendezvous: Annotated[str, Field(max_length=4096)]


@_wire
class Step:
    """Compute this batch: columns with a value for each sequence, then their lists end to end."""

    op: Literal["step"] = "step"
    number: Count  # from 1
    keys: Annotated[bytes, Field(max_length=1 << 23)]  # int64
    starts: Annotated[bytes, Field(max_length=1 << 23)]  # int32, as all that follow
    token_counts: Annotated[bytes, Field(max_length=1 << 23)]
    block_counts: Annotated[bytes, Field(max_length=1 << 23)]
    draws: Annotated[bytes, Field(max_length=1 << 23)]  # 1 where a token is drawn, by tp 0
    tokens: Annotated[bytes, Field(max_length=1 << 23)]
    blocks: Annotated[bytes, Field(max_length=1 << 23)]
    copies: Annotated[bytes, Field(max_length=1 << 23)] = b""  # `copy_from`; empty: none has one
    targets: Annotated[bytes, Field(max_length=1 << 23)] = b""  # rows scored; empty: nowhere
    saves: Count = 0  # so many of the moves (see `device.moves`) are saves, the rest loads
    move_keys: Annotated[bytes, Field(max_length=1 << 23)] = b""  # int64
    move_counts: Annotated[bytes, Field(max_length=1 << 23)] = b""
    move_sources: Annotated[bytes, Field(max_length=1 << 23)] = b""
    move_targets: Annotated[bytes, Field(max_length=1 << 23)] = b""


@_wire
class Order:
    """Do this transfer command (see `data.relay`) once so many steps are computed."""

    op: Literal["order"] = "order"
    after: Count
    command: Annotated[bytes, Field(max_length=1 << 23)]


ToFollower: TypeAlias = Annotated[Join | Step | Order, Field(discriminator="op")]


@_wire
class Hello:
    """A follower has loaded its shard and made its memory."""

    op: Literal["hello"] = "hello"
    process: Process
    layout: KvLayout
    blocks: U32
    host_blocks: U32 = 0


@_wire
class Joined:
    op: Literal["joined"] = "joined"


@_wire
class Stepped:
    """This step is computed."""

    op: Literal["stepped"] = "stepped"
    number: Count
    lost: tuple[Count, ...] = ()  # keys of moves that failed here


@_wire
class Told:
    """A transfer event (see `data.relay`) of this rank."""

    op: Literal["told"] = "told"
    event: Annotated[bytes, Field(max_length=1 << 23)]


FromFollower: TypeAlias = Annotated[Hello | Joined | Stepped | Told, Field(discriminator="op")]


# Between the nodes of an instance: its leader, and those that only run workers.


@_wire
class NodeHello:
    """A worker node wants to be one of its leader's (JSON over HTTP)."""

    protocol_version: Number = PROTOCOL
    node: U31  # counted within the instance
    epoch: Count  # of this life of it
    http: Short  # its own address, for operators
    settings: dict[str, Short]  # what both must have alike


@_wire
class NodeWelcome:
    """Where the leader listens for this node, once."""

    endpoint: Short
    epoch: Count  # of the leader's life


@_wire
class GroupPlace:
    """Where tp 0 of a group listens for its followers of other nodes (JSON over HTTP)."""

    epoch: Count  # of this life of it
    endpoints: dict[str, Short]  # by number in the group


@_wire
class RankSaid:
    """A worker of this node said so."""

    op: Literal["rank_said"] = "rank_said"
    rank: Rank
    message: FromWorker


@_wire
class RankIs:
    """How a worker is, as its node's supervisor sees it."""

    op: Literal["rank_is"] = "rank_is"
    rank: Rank
    state: Short
    lives: Count
    pid: Count | None = None
    last_problem: Problem | None = None


@_wire
class RankLost:
    """A worker's process has ended; the node may start it again."""

    op: Literal["rank_lost"] = "rank_lost"
    rank: Rank
    problem: Problem


@_wire
class Leaving:
    """The node is being drained: it wants to go once its workers have nothing to do."""

    op: Literal["leaving"] = "leaving"


@_wire
class Beat:
    """Still here."""

    op: Literal["beat"] = "beat"


FromNode: TypeAlias = Annotated[
    RankSaid | RankIs | RankLost | Leaving | Beat, Field(discriminator="op")
]


@_wire
class TellRank:
    """For a worker of this node."""

    op: Literal["tell_rank"] = "tell_rank"
    rank: Rank
    message: ToWorker


@_wire
class MayLeave:
    """No request is on the workers of this node any more, nor will be."""

    op: Literal["may_leave"] = "may_leave"


ToNode: TypeAlias = Annotated[TellRank | MayLeave | Beat, Field(discriminator="op")]


# Bootstrap server bodies (JSON over HTTP).


@_wire
class RegisterRank:
    protocol_version: Number = PROTOCOL
    attn_tp_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    attn_cp_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    dp_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    rank: Rank
    rank_ip: Short
    rank_port: Annotated[int, Field(ge=1, le=65535)]
    instance_epoch: Room  # a rising number of 63 bits
    fingerprint: KvLayout
    max_prompt_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    process: Process


@_wire
class RegisterDpRank:
    """This dp rank computes that room."""

    bootstrap_room: Room
    dp_rank: Annotated[int, Field(ge=0, lt=1 << 20)]


@_wire
class QueryDpRanks:
    bootstrap_rooms: Annotated[tuple[Room, ...], Field(max_length=1024)]


@_wire
class Leased:
    status: Short
    lease_s: Annotated[float, Field(gt=0, le=86400)]


@_wire
class BootstrapHealth:
    status: Short
    ready: bool
    instance_epoch: Number
    missing: tuple[str, ...] = ()  # ranks without a live lease, with the reason
    http: Short = ""  # where the leader's API is reached


@_wire
class RankAddress:
    rank_ip: Short
    rank_port: Number
    process: Process
    instance_epoch: Number = 0


@_wire
class Route:
    """What a decode rank learns of a prefill instance; `ranks` is keyed "dp,cp,tp"."""

    attn_tp_size: Number
    attn_cp_size: Number
    dp_size: Number
    block_size: Number
    kv_cache_dtype: Short
    fingerprint: KvLayout
    instance_epoch: Number
    ranks: dict[str, RankAddress]


FROM_DECODE: Final[TypeAdapter[FromDecode]] = TypeAdapter(FromDecode)
FROM_PREFILL: Final[TypeAdapter[FromPrefill]] = TypeAdapter(FromPrefill)
TO_WORKER: Final[TypeAdapter[ToWorker]] = TypeAdapter(ToWorker)
FROM_WORKER: Final[TypeAdapter[FromWorker]] = TypeAdapter(FromWorker)
TO_FOLLOWER: Final[TypeAdapter[ToFollower]] = TypeAdapter(ToFollower)
FROM_FOLLOWER: Final[TypeAdapter[FromFollower]] = TypeAdapter(FromFollower)
FROM_NODE: Final[TypeAdapter[FromNode]] = TypeAdapter(FromNode)
TO_NODE: Final[TypeAdapter[ToNode]] = TypeAdapter(ToNode)


def decode(adapter: TypeAdapter[T], frame: bytes) -> T:
    """The message in `frame`. Raises BadMessage for anything else, whatever the bytes."""
    between_ranks = adapter is FROM_DECODE or adapter is FROM_PREFILL
    limit = MAX_PEER_BYTES if between_ranks else MAX_MESSAGE_BYTES
    if len(frame) > limit:
        raise BadMessage(f"{len(frame)} bytes are over the limit of {limit}")
    try:
        value = msgpack.unpackb(frame, **(_PEER_LIMITS if between_ranks else _LIMITS))
        return adapter.validate_python(value)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise BadMessage(_reason(error)[:500]) from error


def _reason(error: Exception) -> str:
    """What is wrong, without the bytes themselves: they may be secret, and long to print."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'message'}: {first['msg']}"


def encode(adapter: TypeAdapter[T], message: T) -> bytes:
    """The frame for a message of the adapter's direction."""
    frame: bytes = msgpack.packb(adapter.dump_python(message))
    return frame
