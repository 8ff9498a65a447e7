"""Prompts for a load: random token ids or words of given lengths, or those of a file.

No two are alike, neither in a run nor between runs, so that no prefix cache shortens the work;
servers that are compared get the same lengths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Literal, TypeAlias

from pdrt.errors import ConfigError

Kind: TypeAlias = Literal["ids", "words"]
LEAST_ID: Final = 3  # below are the special tokens of many vocabularies
USUAL_VOCAB: Final = 256  # ids that every vocabulary has
_MOST_TOKENS: Final = 1_000_000
_LEAST_ANSWER, _MOST_ANSWER = 4, 1024  # tokens of an answer in a file
_CHARS_A_TOKEN: Final = 4  # of English text, about
_WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "group", "country", "problem", "hand", "part", "place", "case"),
    *("week", "company", "system", "question", "work", "number", "night", "point", "home", "water"),
    *("room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book"),
    *("eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service"),
    *("friend", "father", "power", "hour", "game", "line", "end", "law", "car", "city"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be."""

    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly between two bounds."""

    least: int
    most: int

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        """`128` or `64..256`. Raises ConfigError."""
        match = re.fullmatch(r"(\d{1,7})(?:\.\.(\d{1,7}))?", text.strip())
        least = int(match[1]) if match else 0
        most = int(match[2] or match[1]) if match else 0
        if not 1 <= least <= most <= _MOST_TOKENS:
            raise ConfigError(f"{option} {text!r}: want tokens such as 128, or 64..256")
        return Lengths(least, most)

    def draw(self, random: Random) -> int:
        return random.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


@dataclass(frozen=True, slots=True)
class Prompts:
    """How the prompts of a load are made."""

    input: Lengths
    output: Lengths
    kind: Kind = "ids"
    vocab: int = USUAL_VOCAB
    shared_prefix: int = 0  # tokens that all begin with
    seed: int = 0
    talks: Sequence[Ask] = ()  # of a file, instead

    def draw(self, count: int, number: int, whose: str) -> list[Ask]:
        """The requests of a round: lengths do not depend on whose they are, contents do."""
        lengths = Random(f"{self.seed} {number}")
        if self.talks:
            return [lengths.choice(self.talks) for _ in range(count)]
        content = Random(f"{self.seed} {number} {whose}")
        shared = self._content(self.shared_prefix, Random(f"{self.seed} shared"))
        sizes = [(self.input.draw(lengths), self.output.draw(lengths)) for _ in range(count)]
        return [self._ask(shared[: most - 1], most, answer, content) for most, answer in sizes]

    def _content(self, tokens: int, random: Random) -> list[int]:
        known = range(len(_WORDS)) if self.kind == "words" else range(LEAST_ID, self.vocab)
        return random.choices(known, k=tokens)

    def _ask(self, shared: list[int], tokens: int, answer: int, random: Random) -> Ask:
        content = [*shared, *self._content(tokens - len(shared), random)]
        if self.kind == "words":
            return Ask(" ".join(_WORDS[each] for each in content), answer)
        return Ask(tuple(content), answer)


def kind_of(text: str) -> Kind:
    """Raises ConfigError."""
    match text:
        case "ids" | "words":
            return text
        case _:
            raise ConfigError(f"--prompts {text!r}: want ids or words")


def talks_of(file: str) -> Sequence[Ask]:
    """Those of `--dataset`, if it is given. Raises ConfigError."""
    return read_talks(Path(file).expanduser()) if file else ()


def read_talks(file: Path) -> list[Ask]:
    """First questions of a ShareGPT-style file, and answers as long as there. Raises ConfigError.

    Without the model's tokenizer an answer's tokens are a quarter of its characters.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            told = json.load(opened)
        talks = list(_talks(told))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f'--dataset {file}: want a list of {{"conversations": [{{"from": "human", "value":'
            f" ...}}, ...]}}: {type(error).__name__}: {error}"
        ) from error
    if not talks:
        raise ConfigError(f"--dataset {file}: no conversation begins with a question and an answer")
    return talks


def _talks(told: Sequence[dict[str, list[dict[str, str]]]]) -> Iterator[Ask]:
    for talk in told:
        match talk["conversations"][:2]:
            case [{"value": str(question)}, {"value": str(answer)}] if question and answer:
                tokens = len(answer) // _CHARS_A_TOKEN
                yield Ask(question, min(max(tokens, _LEAST_ANSWER), _MOST_ANSWER))
