"""One answer as it grows: a worker's outputs become text, ids, odds, counts and times.

The promise: text, ids, odds and usage are the same however the outputs were grouped, there are
as many odds as ids, and nothing counts that came after the end of its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pdrt.control.detokenize import Pieces, StopScanner
from pdrt.control.http import Json
from pdrt.control.likely import Odds, PromptPart
from pdrt.control.times import Times as Times
from pdrt.control.toolcalls import CallPiece, ToolReader, joined
from pdrt.errors import BadMessage, PdrtError
from pdrt.messages import Finish, Output, unpack_tops

End: TypeAlias = Finish | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output added to choice `index`; `finish` is set on its last."""

    text: str
    ids: tuple[int, ...]
    finish: End | None = None
    index: int = 0
    odds: tuple[Odds, ...] = ()  # one an id, where they are wanted
    calls: tuple[CallPiece, ...] = ()


@dataclass(slots=True)
class Choice:
    """One of the n sequences after a prompt."""

    pieces: Pieces
    scanner: StopScanner
    with_odds: bool = False
    is_silent: bool = False  # its tokens are dropped: only the prompt is asked for
    reached: int = 0  # characters decoded, on top of what comes before them
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    odds: list[Odds] = field(default_factory=list)
    finish: End | None = None
    said_at: float = 0.0  # when its last token came
    tools: ToolReader | None = None  # where its text may be calls
    calls: list[CallPiece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, output: Output) -> Delta:
        """Add what a worker said. After `finish` nothing may be added."""
        assert self.finish is None, "the choice has ended"
        if self.is_silent:
            delta = Delta("", (), "length" if output.tokens or output.finish else None)
        else:
            delta = self._add(output)
        self.ids += delta.ids
        self.texts.append(delta.text)
        self.odds += delta.odds
        self.calls += delta.calls
        self.finish = delta.finish
        return delta

    def _add(self, output: Output) -> Delta:
        spoken, silent = _spoken(output)
        text: list[str] = []
        calls: list[CallPiece] = []
        begins: list[int] = []  # where each token's text does
        tools = self.tools
        for token in spoken:
            begins.append(self.reached)
            piece = self.pieces.push(token)
            self.reached += len(piece)
            said, is_stopped = self.scanner.feed(piece)
            if tools is not None:
                said = _listen(tools, said, calls)
            text.append(said)
            if is_stopped or (tools is not None and tools.is_done):
                return self._delta(text, calls, output, begins, "stop")
        if output.finish is None:
            return self._delta(text, calls, output, begins, None)
        begins += [self.reached] * len(silent)
        said, is_stopped = self.scanner.feed(self.pieces.flush())
        said += "" if is_stopped else self.scanner.rest()
        text.append(said if tools is None else _listen(tools, said, calls))
        is_length = output.finish == "length" and not is_stopped
        return self._delta(text, calls, output, begins, "length" if is_length else "stop")

    def _delta(
        self,
        text: list[str],
        calls: list[CallPiece],
        output: Output,
        begins: list[int],
        finish: End | None,
    ) -> Delta:
        """Of the output's tokens as many as have a beginning."""
        if finish and self.tools is not None:
            rest, more = self.tools.rest()
            text.append(rest)
            calls += more
            finish = "tool_calls" if finish == "stop" and self.tools.has_called else finish
        odds = _odds(output, begins) if self.with_odds else ()
        ids, told = output.tokens[: len(begins)], tuple(joined(calls)) if calls else ()
        return Delta("".join(text), ids, finish, output.index, odds, told)


def _listen(tools: ToolReader, said: str, calls: list[CallPiece]) -> str:
    """The part of a text that is no call."""
    text, more = tools.feed(said)
    calls += more
    return text


@dataclass(slots=True)
class Answer:
    """All of it: one choice, or n; of more that were drawn, the `best` likeliest are told."""

    prompt_tokens: int
    choices: Sequence[Choice]
    times: Times
    prompt: PromptPart | None = None  # what is told of the prompt, before the choices
    cached_tokens: int = 0
    is_resumed: bool = False  # another instance began it, and said how many were cached
    best: int = 0  # 0: all
    likely: dict[int, float] = field(default_factory=dict)  # of each choice, where `best` is set

    @property
    def told(self) -> Sequence[Choice]:
        """Those with the highest mean log-probability a token first, or all as they were drawn."""
        if not self.best:
            return self.choices
        ranked = sorted(range(len(self.choices)), key=self._mean, reverse=True)
        return [self.choices[index] for index in ranked[: self.best]]

    def _mean(self, index: int) -> float:
        return self.likely.get(index, 0.0) / max(len(self.choices[index].ids), 1)

    @property
    def is_over(self) -> bool:
        return all(choice.finish for choice in self.choices)

    @property
    def has_begun(self) -> bool:
        return any(choice.ids or choice.finish for choice in self.choices)

    @property
    def odds(self) -> int:
        """How many tokens it tells the odds of."""
        prompt = len(self.prompt.odds) if self.prompt is not None else 0
        return prompt + sum(len(choice.odds) for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def take(self, output: Output, now: float) -> Delta:
        """Add what a worker said to the choice that it names."""
        choice = self.choices[output.index]
        if output.tokens:
            self.times.said(now, choice.said_at, len(output.tokens))
            choice.said_at = now
        self.times.last = now
        if output.spent_ms:
            self.times.spent_ms = output.spent_ms
        if not self.is_resumed:
            cached = max(self.cached_tokens, output.cached_tokens)
            self.cached_tokens = min(cached, self.prompt_tokens)
        delta = choice.take(output)
        if self.best:
            told = output.logprobs[: len(delta.ids)]
            if len(told) < len(delta.ids):
                raise PdrtError("the worker told no odds, by which the best answers are chosen")
            self.likely[output.index] = self.likely.get(output.index, 0.0) + sum(told)
        return delta


def _spoken(output: Output) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens that are text, and the one that said stop, which is only an id."""
    if output.finish == "stop":
        return output.tokens[:-1], output.tokens[-1:]
    return output.tokens, ()


def _odds(output: Output, begins: Sequence[int]) -> tuple[Odds, ...]:
    """One for each beginning. Raises PdrtError when the worker did not tell them."""
    count = len(begins)
    if not count:
        return ()
    try:
        tops = unpack_tops(output.tops, len(output.tokens))
    except BadMessage as error:
        raise PdrtError(f"the worker told no odds: {error}") from error
    if len(output.logprobs) != len(output.tokens):
        raise PdrtError(f"{len(output.logprobs)} odds came with {len(output.tokens)} tokens")
    columns = (output.tokens[:count], output.logprobs[:count], tops[:count], begins)
    return tuple(map(Odds, *columns))
