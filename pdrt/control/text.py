"""A model's text: strings and chats to token ids, token ids to strings; never on the event loop.

Reads `tokenizer.json` and the chat template of a Hugging Face directory; no code from it runs,
and templates run in a sandbox. The path `null` stands for bytes: id = byte, 256 = end.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import tokenizers

from pdrt.control.detokenize import BytePieces, Pieces, WindowPieces
from pdrt.control.order import Chat
from pdrt.control.template import ChatTemplate
from pdrt.errors import BadRequest, ConfigError, Overloaded
from pdrt.modelspec import NULL_PATH, NULL_SPEC

Prompt: TypeAlias = str | Sequence[int] | Chat
X = TypeVar("X")
Y = TypeVar("Y")
_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")  # a byte's token where text is the rule
_SPACE: Final = "\u2581"


class Text(Protocol):
    """All calls take time in proportion to the text and may run in any thread."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the tokens that the model wants at its start."""
        ...

    def encode_chat(self, chat: Chat) -> list[int]:
        """The ids of a conversation. Raises BadRequest when the template refuses it."""
        ...

    def pieces(self) -> Pieces:
        """A fresh decoder for one answer."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """One token as it is written, special ones too; empty when there is no such token."""
        ...


class ByteText:
    """For the null device: a token is a byte, and a chat is its turns, one a line."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, chat: Chat) -> list[int]:
        lines = [f"{turn['role']}: {turn['content']}\n" for turn in chat.turns]
        return self.encode("".join(lines) + "assistant: ")

    def pieces(self) -> Pieces:
        return BytePieces(lambda token: bytes((token,)) if token < 256 else b"")

    def bytes_of(self, token: int) -> bytes:
        if token in NULL_SPEC.eos_token_ids:
            return b"<eos>"
        return bytes((token,)) if token < 256 else b""


class ModelText:
    """A Hugging Face tokenizer with its chat template, if the model has one."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._is_byte_level = _decoder_type(tokenizer) == "ByteLevel"

    def encode(self, text: str) -> list[int]:
        return self._ids(text, special=True)

    def encode_chat(self, chat: Chat) -> list[int]:
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; use /v1/completions")
        return self._ids(self._template.render(chat), special=False)

    def pieces(self) -> Pieces:
        if self._is_byte_level:
            return BytePieces(self._bytes_of)
        return WindowPieces(self._tokenizer.decode, self._special.__contains__)

    def bytes_of(self, token: int) -> bytes:
        if self._is_byte_level and token not in self._special:
            return self._bytes_of(token)
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._special:
            return piece.encode()
        if fallback := _FALLBACK.fullmatch(piece):
            return bytes((int(fallback[1], 16),))
        return piece.replace(_SPACE, " ").encode()

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # Of all encode calls only the batch ones let other threads run meanwhile.
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found[0].ids
        return ids

    def _bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        try:
            return bytes(_BYTE_OF[char] for char in piece)
        except KeyError:  # an added token, written as it is
            return piece.encode()


def open_text(path: str) -> Text:
    """The text of the model at this path. Raises ConfigError when its files cannot be used."""
    if path == NULL_PATH:
        return ByteText()
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"[model] path: {file} is missing; pdrt needs a fast tokenizer's file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{file}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()  # a prompt that is too long is refused, never cut
    tokenizer.no_padding()
    return ModelText(tokenizer, ChatTemplate.read(Path(path)))


def _decoder_type(tokenizer: tokenizers.Tokenizer) -> str:
    decoder: Mapping[str, Any] | None = json.loads(tokenizer.to_str())["decoder"]
    return str(decoder["type"]) if decoder else ""


def _byte_chars() -> dict[str, int]:
    """GPT-2's printable character for each byte, reversed."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF: Final[Mapping[str, int]] = _byte_chars()


_SHORT: Final = 512  # characters: some 50 us of work, less than a thread takes to wake up


class TextPool:
    """A text's encoding in a few threads of its own, with a bounded queue before them.

    What is short is encoded at once.
    """

    def __init__(self, text: Text, threads: int = 2, depth: int = 512) -> None:
        self._text, self._depth = text, depth
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self.waiting = self.most_waiting = 0

    def pieces(self) -> Pieces:
        return self._text.pieces()

    def bytes_of(self, token: int) -> bytes:
        return self._text.bytes_of(token)

    async def ids(self, prompt: Prompt) -> Sequence[int]:
        """The prompt's token ids. Raises BadRequest, and Overloaded when too many wait."""
        match prompt:
            case str() if len(prompt) <= _SHORT:
                return self._text.encode(prompt)
            case str():
                return await self.run(self._text.encode, prompt)
            case Chat():
                return await self.run(self._text.encode_chat, prompt)
            case _:
                return prompt

    async def run(self, work: Callable[[X], Y], on: X) -> Y:
        """Beside the loop. Raises Overloaded, and what the work raises."""
        if self.waiting >= self._depth:
            raise Overloaded(f"{self.waiting} prompts wait for their tokens")
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, work, on)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
