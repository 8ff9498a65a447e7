"""Grammars as llguidance reads them: whose tokens, what language, within which bounds.

The library is an extra (`structured`) and is loaded when it is needed. A schema is a few
lines that may stand for gigabytes of automata, so whatever comes from a client is compiled in a
process that can be ended (see `control.grammarcheck`) before any worker compiles it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdrt.errors import BadRequest
from pdrt.messages import Grammar
from pdrt.modelspec import NULL_PATH, NULL_SPEC

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Find = Callable[[str], object | None]

LIBRARY: Final = "llguidance"
# One space, or a new line and what it is indented by: enough for all JSON that people write. With
# any white space a weak model may say nothing else until it is out of tokens.
_SPACE: Final = r"[ ]|\r?\n([ ]{0,40}|\t{0,10})"
_STATES: Final = 10_000  # of a sequence's automaton, at 1 to 2 KB
_CALLED: Final = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the choice",
    "lark": "the grammar",
}


def check_library(find: Find = importlib.util.find_spec) -> None:
    """Raises BadRequest where it is not installed."""
    if find(LIBRARY) is None:
        raise BadRequest(
            "response_format and structured_outputs need llguidance, which is not installed here:"
            " pip install llguidance (pdrt's extra `structured`)"
        )


class _Bytes:
    """The null model's tokens, as the library wants a tokenizer of Python's."""

    eos_token_id = min(NULL_SPEC.eos_token_ids)
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes((byte,)) for byte in range(256)), b"<eos>"]
    special_token_ids = (eos_token_id,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def open_vocabulary(path: str, vocab: int, eos: Collection[int]) -> LLTokenizer:
    """The tokens of the model in this directory. Takes a second for a large one.

    Raises BadRequest when the library cannot use them: no answer can be bound to a grammar then.
    """
    check_library()
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos:
        raise BadRequest("this model has no end token, so that no answer can end where it should")
    if path == NULL_PATH:
        return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=sorted(eos))
    try:
        text = (Path(path) / "tokenizer.json").read_text("utf-8")
        fits = max(vocab, _tokens_in(text))
        return LLTokenizer(text, n_vocab=fits, eos_token=sorted(eos))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadRequest(f"llguidance cannot use this model's tokenizer: {error}"[:500]) from error


def _tokens_in(text: str) -> int:
    """One more than the largest token's number."""
    told = json.loads(text)
    model, added = told["model"]["vocab"], told.get("added_tokens") or ()
    known = range(len(model)) if isinstance(model, list) else model.values()
    numbers: list[int] = [*known, *(token["id"] for token in added)]
    return max(numbers, default=-1) + 1


def compiled(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher before its first token. Raises BadRequest with the library's words."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=_STATES)
    try:
        matcher = LLMatcher(vocabulary, _written(grammar), log_level=0, limits=limits)
    except ValueError as error:
        raise BadRequest(f"{_CALLED[grammar.kind]}: {error}"[:1000]) from error
    if not matcher.is_error():
        matcher.compute_bitmask()  # one that nothing can match shows here
    if matcher.is_error():
        raise BadRequest(f"{_CALLED[grammar.kind]}: {words_of(matcher)}")
    return matcher


def words_of(matcher: LLMatcher) -> str:
    """What the library says is wrong."""
    said = matcher.get_error().replace("<non-verbose/>", "").strip()[:1000]
    return "nothing matches it" if said.startswith("NoExtension") else said


def _written(grammar: Grammar) -> str:
    """Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": _SPACE}
        )
    if grammar.kind == "lark":
        return grammar_from("grammar", grammar.text)  # llama.cpp's notation, too
    return grammar_from(grammar.kind, grammar.text)
