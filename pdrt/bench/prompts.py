"""Prompts for a load: random token ids or words of given lengths, or those of a file.

They make conversations, of one turn unless more are asked for: a later turn's prompt is its
question, which follows on what was said before (talk.py). No two are alike, neither in a run nor
between runs, so that no prefix cache shortens the work;
servers that are compared get the same lengths.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Literal, TypeAlias

from pdrt.errors import ConfigError
from pdrt.sim.lengths import ONE, Lengths

Kind: TypeAlias = Literal["ids", "words"]
LEAST_ID: Final = 3  # below are the special tokens of many vocabularies
USUAL_VOCAB: Final = 256  # ids that every vocabulary has
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


Asks: TypeAlias = Sequence[Ask]  # the turns of a conversation


@dataclass(frozen=True, slots=True)
class Prompts:
    """How the prompts of a load are made."""

    input: Lengths
    output: Lengths
    kind: Kind = "ids"
    vocab: int = USUAL_VOCAB
    shared_prefix: int = 0  # tokens that all begin with
    seed: int = 0
    talks: Sequence[Asks] = ()  # of a file, instead
    turns: Lengths = ONE
    prefixes: int = 1  # so many are shared, each by an equal part of all

    def draw(self, count: int, number: int, whose: str) -> list[Asks]:
        """A round's conversations, that many turns in all.

        Lengths do not depend on whose they are, contents do.
        """
        lengths = Random(f"{self.seed} {number}")
        turns = Random(f"{self.seed} {number} turns")
        if self.talks:
            return list(self._of_file(count, lengths, turns))
        content = Random(f"{self.seed} {number} {whose}")
        prefixes = [self._prefix(each) for each in range(self.prefixes)]
        sizes = iter([(self.input.draw(lengths), self.output.draw(lengths)) for _ in range(count)])
        found = list[Asks]()
        for place, most in enumerate(self._turns(count, turns)):
            asks = list[Ask]()
            for tokens, answer in itertools.islice(sizes, most):
                shared = [] if asks else prefixes[place % self.prefixes][: tokens - 1]
                asks.append(self._ask(shared, tokens, answer, content))
            found.append(asks)
        return found

    def _turns(self, count: int, random: Random) -> Iterator[int]:
        """Of one conversation after the other; the last one ends with the count."""
        while count > 0:
            turns = min(self.turns.draw(random), count)
            count -= turns
            yield turns

    def _of_file(self, count: int, choice: Random, turns: Random) -> Iterator[Asks]:
        while count > 0:
            asks = choice.choice(self.talks)[: min(self.turns.draw(turns), count)]
            count -= len(asks)
            yield asks

    def _prefix(self, place: int) -> list[int]:
        return self._content(
            self.shared_prefix, Random(f"{self.seed} shared {place or ''}".strip())
        )

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


def talks_of(file: str) -> Sequence[Asks]:
    """Those of `--dataset`, if it is given. Raises ConfigError."""
    return read_talks(Path(file).expanduser()) if file else ()


def read_talks(file: Path) -> Sequence[Asks]:
    """Questions of a ShareGPT-style file, and answers as long as there. Raises ConfigError.

    Without the model's tokenizer an answer's tokens are a quarter of its characters.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            told = json.load(opened)
        talks = [asks for talk in told if (asks := _asks(talk["conversations"]))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f'--dataset {file}: want a list of {{"conversations": [{{"from": "human", "value":'
            f" ...}}, ...]}}: {type(error).__name__}: {error}"
        ) from error
    if not talks:
        raise ConfigError(f"--dataset {file}: no conversation begins with a question and an answer")
    return talks


def _asks(said: Sequence[Mapping[str, object]]) -> list[Ask]:
    """Its turns, up to one that has no question or no answer."""
    asks = list[Ask]()
    for pair in zip(said[::2], said[1::2], strict=False):
        match pair:
            case {"value": str(question)}, {"value": str(answer)} if question and answer:
                tokens = len(answer) // _CHARS_A_TOKEN
                asks.append(Ask(question, min(max(tokens, _LEAST_ANSWER), _MOST_ANSWER)))
            case _:
                break
    return asks
