"""What a scheduler asks of a device: one batch of sequence steps, and what comes back.

Plain data without torch, so that schedulers, the null device and tests can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdrt.device.places import Rendezvous
from pdrt.messages import Grammar, KvLayout, Sampling


@dataclass(slots=True)  # not frozen: as SeqStep
class Draw:
    """How to draw the token that follows the last one of a step.

    `history` is prompt and output so far (a view that nobody changes while the step runs),
    `prompt_tokens` of it are the client's prompt: penalties on output count the rest.
    """

    sampling: Sampling
    history: Sequence[int]
    prompt_tokens: int
    kept: object = field(default=None, repr=False, compare=False)  # the device's, between steps
    fault: str = ""  # why what was drawn means nothing
    is_plain: bool = field(init=False)  # its logits are drawn from as they are

    def __post_init__(self) -> None:
        s = self.sampling
        self.is_plain = (
            s.repetition_penalty == 1.0
            and s.presence_penalty == s.frequency_penalty == 0.0
            and not s.logit_bias
            and s.grammar is None
        )

    @property
    def position(self) -> int:
        """Index of the token to be drawn: with the seed it names the random number."""
        return len(self.history)


ELSEWHERE: Final = Draw(Sampling(), (), 0)
"""In a follower's step where rank 0's has a draw: a token is drawn, by rank 0, which knows how."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Also say how likely prompt tokens were: row i of the step is asked for `targets[i]`.

    The step's last row may have no target; `top` likeliest tokens are told beside each.
    """

    targets: Sequence[int]
    top: int = 0


@dataclass(slots=True)  # not frozen: one is made for each sequence and step, at a fifth of the cost
class SeqStep:
    """Compute `tokens` at positions `start`.. of one sequence and write their KV to `blocks`.

    `blocks` is the block table from position 0 and covers `start + len(tokens)` tokens;
    positions below `start` hold valid KV. `draw` is None when no token is wanted (a chunk
    that is not the prompt's last). A group's followers get `ELSEWHERE` for any other draw.
    `further` are more draws from the same row, of a sampling group's other sequences (n > 1).
    With `copy_from`, the block of position `start` begins as a copy of that block.
    """

    key: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: Draw | None
    further: tuple[Draw, ...] = ()
    copy_from: int = -1
    scoring: Scoring | None = None


@dataclass(frozen=True, slots=True)
class Odds:
    """A token's log-probability, and the likeliest tokens in its place with theirs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token drawn for a step, with the log-probability of the unscaled distribution.

    `top` holds as many of the likeliest tokens as its sampling asked for. `further` answers the
    step's further draws. `scored` answers `Scoring`, one for each target; a step that was only
    scored has the token -1.
    """

    key: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    further: tuple["Drawn", ...] = ()
    scored: tuple[Odds, ...] = ()
    fault: str = ""  # why `logprob` is NaN, when it is not the logits' fault


class Runner(Protocol):
    """A device with a model. All calls block; the worker makes them in its device thread."""

    @property
    def layout(self) -> KvLayout:
        """Shape of one KV block of this rank's shard."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def vocab(self) -> int:
        """Every token that it is given or draws is less."""
        ...

    def bind(self, pool: memoryview, blocks: int) -> None:
        """Use `pool` (writable, `blocks * layout.block_bytes` bytes) as KV memory."""
        ...

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Meet the other ranks of the group (see `collective.join`), before the first `execute`.

        Loading needs no others, so it comes first. A group of one need not join.
        """
        ...

    def prepare(self, grammar: Grammar | None) -> None:
        """Compile what answers will be bound to, in any thread; None: read the model's tokens only.

        Raises BadRequest.
        """
        ...

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        """Run one step; one `Drawn` for each entry with a `draw` or a `scoring`, in order.

        All ranks of a tensor-parallel group execute the same steps in the same order; followers
        (ranks above 0) draw nothing. Raises PeerLost when the group has lost a rank.
        """
        ...
