"""How likely tokens were, in the words of each dialect.

A token is told as it is written, special ones too. One that is no text by itself (part of a
character) is `bytes:\\xe4\\xbd` where a text must name it, and its bytes where they can be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdrt.control.detokenize import Pieces
from pdrt.control.http import Json
from pdrt.messages import Top, unpack_odds

LEAST: Final = -9999.0  # JSON has no minus infinity
MAX_PROMPT_ODDS: Final = 1 << 16  # of one prompt, alternatives included: some 3 MB of JSON

BytesOf: TypeAlias = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Odds:
    """A token's, and where its text begins in the text that the client reads."""

    token: int
    logprob: float | None  # None: nothing came before it
    top: Top
    at: int


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What an answer says of its prompt; `odds` has an entry a token where they are wanted."""

    text: str
    odds: tuple[Odds, ...] = ()


def prompt_part(text: str, ids: Sequence[int], scored: bytes | None, pieces: Pieces) -> PromptPart:
    """`scored` are the odds of all tokens but the first. Raises BadMessage when they are not."""
    if scored is None:
        return PromptPart(text)
    rows = unpack_odds(scored, len(ids) - 1) if len(ids) > 1 else []
    found, begin = list[Odds](), 0
    for token, (logprob, top) in zip(ids, [(None, ()), *rows], strict=True):
        found.append(Odds(token, logprob, top, min(begin, len(text))))
        begin += len(pieces.push(token))
    return PromptPart(text, tuple(found))


def said(ids: Sequence[int], pieces: Pieces) -> str:
    """The text of all these tokens."""
    return "".join([*map(pieces.push, ids), pieces.flush()])


def for_generate(odds: Sequence[Odds], bytes_of: BytesOf) -> list[Json | None]:
    """One entry a token; null for the prompt's first, which nothing came before."""
    return [_generated(one, bytes_of) for one in odds]


def _generated(odds: Odds, bytes_of: BytesOf) -> Json | None:
    if odds.logprob is None:
        return None
    top = [_plain(token, value, bytes_of) for token, value in odds.top]
    return {**_plain(odds.token, odds.logprob, bytes_of), "top_logprobs": top}


def _plain(token: int, logprob: float, bytes_of: BytesOf) -> Json:
    return {"id": token, "token": name_of(bytes_of(token)), "logprob": _number(logprob)}


def for_completion(odds: Sequence[Odds], bytes_of: BytesOf) -> Json:
    """OpenAI's columns. The token itself is among its `top_logprobs`, so these may be one more."""
    return {
        "tokens": [name_of(bytes_of(one.token)) for one in odds],
        "token_logprobs": [None if o.logprob is None else _number(o.logprob) for o in odds],
        "top_logprobs": [_named(one, bytes_of) for one in odds],
        "text_offset": [one.at for one in odds],
    }


def _named(odds: Odds, bytes_of: BytesOf) -> dict[str, float] | None:
    if odds.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, value in (*odds.top, (odds.token, odds.logprob)):
        found.setdefault(name_of(bytes_of(token)), _number(value))
    return found


def for_chat(odds: Sequence[Odds], bytes_of: BytesOf) -> Json:
    """OpenAI's entries, each with its bytes."""
    content: list[Json] = []
    for one in odds:
        assert one.logprob is not None, "a chat's prompt is not told"
        top = [_entry(token, value, bytes_of) for token, value in one.top]
        content.append({**_entry(one.token, one.logprob, bytes_of), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, bytes_of: BytesOf) -> Json:
    data = bytes_of(token)
    text = data.decode(errors="replace")
    return {"token": text, "logprob": _number(logprob), "bytes": list(data)}


def name_of(data: bytes) -> str:
    """A token's bytes as a text that names it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float) -> float:
    return round(max(logprob, LEAST), 6)
