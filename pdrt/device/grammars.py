"""Which tokens may come next: one matcher for each sequence that a grammar binds.

The promise: a matcher follows from the grammar and the output tokens alone. It is kept with the
sequence's `Draw` from step to step, and made anew from the tokens wherever that is lost: after a
transfer, a retraction, on another instance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.device.batch import Draw
from pdrt.device.compiler import compiled, words_of
from pdrt.errors import BadRequest
from pdrt.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Forbidden: TypeAlias = npt.NDArray[np.bool_]  # [rows, vocabulary]

_KEPT: Final = 16  # compiled grammars
_AT_ONCE: Final = 256  # tokens, at 10 us each


@dataclass(slots=True)
class _Bound:
    """A sequence's matcher, and how many output tokens it has seen."""

    matcher: LLMatcher
    seen: int = 0


class Grammars:
    """Those of one model. `open_` makes its vocabulary, when it is first needed."""

    def __init__(self, open_: Callable[[], LLTokenizer], vocab: int, kept: int = _KEPT) -> None:
        self._open, self._vocab, self._kept = open_, vocab, kept
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock, self._opening = Lock(), Lock()

    def prepare(self, grammar: Grammar | None) -> None:
        """Compile it, in whatever thread has the time; None: read the model's tokens only.

        Raises BadRequest.
        """
        self._tokens() if grammar is None else self._fresh(grammar)

    def forbidden(self, draws: Sequence[Draw]) -> Forbidden:
        """What each of these may not say next. `fault` is set where that is not known."""
        rows = np.ones((len(draws), self._vocab), np.uint8)
        for row, draw in zip(rows, draws, strict=True):
            allowed = np.frombuffer(self._mask(draw), np.uint8)
            bits = np.unpackbits(~allowed, bitorder="little")
            known = min(len(row), len(bits))  # a model may have more logits than tokens, or fewer
            row[:known] = bits[:known]
        return rows.view(np.bool_)

    def _mask(self, draw: Draw) -> bytes:
        try:
            matcher = self._bound(draw)
        except BadRequest as error:  # it was compiled before, but a step must not fail for it
            draw.fault = str(error)
            return b""
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            draw.fault = words_of(matcher)
        return mask

    def _bound(self, draw: Draw) -> LLMatcher:
        grammar, bound = draw.sampling.grammar, draw.kept
        assert grammar is not None, "only who is bound is asked"
        said = len(draw.history) - draw.prompt_tokens
        if not isinstance(bound, _Bound) or bound.seen > said:
            bound = draw.kept = _Bound(self._fresh(grammar))
        if bound.seen < said:
            _tell(bound.matcher, draw.history[draw.prompt_tokens + bound.seen :])
            bound.seen = said
        return bound.matcher

    def _fresh(self, grammar: Grammar) -> LLMatcher:
        """A matcher before its first token. Raises BadRequest."""
        with self._lock:
            first = self._compiled.get(grammar)
        if first is None:  # without the lock: a step of others must not wait for it
            first = compiled(grammar, self._tokens())
        with self._lock:
            self._compiled[grammar] = first
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return first.deep_copy()

    def _tokens(self) -> LLTokenizer:
        with self._opening:
            if self._vocabulary is None:
                self._vocabulary = self._open()
            return self._vocabulary


def _tell(matcher: LLMatcher, output: Sequence[int]) -> None:
    """In pieces, for the library holds Python's lock: a long answer that came from elsewhere."""
    for first in range(0, len(output), _AT_ONCE):
        matcher.consume_tokens(list(output[first : first + _AT_ONCE]))


def no_vocabulary() -> LLTokenizer:
    """For a runner that was made without its model's directory."""
    raise BadRequest("grammars: this device has no tokenizer")
