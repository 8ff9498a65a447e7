"""A model's text: strings and chats to token ids, token ids to strings; never on the event loop.

Reads `tokenizer.json` and the chat template of a Hugging Face directory; no code from it runs,
and templates run in a sandbox. The path `null` stands for bytes: id = byte, 256 = end.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import tokenizers

from pdrt.control.detokenize import BytePieces, MarkedPieces, Pieces, WindowPieces
from pdrt.control.http import Json
from pdrt.control.order import Chat
from pdrt.control.template import ChatTemplate, continued
from pdrt.control.toolcalls import ToolFormat
from pdrt.control.toolformats import HERMES
from pdrt.errors import BadRequest, ConfigError, Overloaded
from pdrt.modelspec import NULL_PATH, NULL_SPEC

Prompt: TypeAlias = str | Sequence[int] | Chat
X = TypeVar("X")
Y = TypeVar("Y")
_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")  # a byte's token where text is the rule
_SPACE: Final = "\u2581"


class Text(Protocol):
    """All calls take time in proportion to the text and may run in any thread."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a prompt, with the tokens that the model wants at its start if `special`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        ...

    def encode_chat(self, chat: Chat) -> list[int]:
        """The ids of a conversation. Raises BadRequest when the template refuses it."""
        ...

    def pieces(self, shown: Collection[str] = ()) -> Pieces:
        """A fresh decoder for one answer; special tokens are no text, but for those in `shown`."""
        ...

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None where it is offered no tools."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """One token as it is written, special ones too; empty when there is no such token."""
        ...


class ByteText:
    """For the null device: a token is a byte, and a chat is its turns, one a line."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def encode_chat(self, chat: Chat) -> list[int]:
        lines = [f"tool: {json.dumps(tool)}\n" for tool in chat.tools]
        for turn in chat.turns:
            calls = "".join(map(_called, turn.get("tool_calls", ())))
            lines.append(f"{turn['role']}: {turn['content'] or ''}{calls}\n")
        text = "".join(lines) + "assistant: " * chat.begins_answer
        if chat.continues_last:
            text = continued(text, chat.turns[-1]["content"])
        return self.encode(text)

    def pieces(self, shown: Collection[str] = ()) -> Pieces:
        return BytePieces(lambda token: bytes((token,)) if token < 256 else b"")

    @property
    def tool_format(self) -> ToolFormat | None:
        return HERMES

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

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._ids(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        # As with encoding, only this form lets other threads run meanwhile.
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return text

    def encode_chat(self, chat: Chat) -> list[int]:
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; use /v1/completions")
        return self._ids(self._template.render(chat), special=False)

    def pieces(self, shown: Collection[str] = ()) -> Pieces:
        told = {id_: text for text in shown if (id_ := self._special_id(text)) is not None}
        if self._is_byte_level:
            return BytePieces(self._bytes_of if not told else partial(self._bytes_or, told))
        pieces = partial(WindowPieces, self._tokenizer.decode, self._special.__contains__)
        return MarkedPieces(pieces, told) if told else pieces()

    @property
    def tool_format(self) -> ToolFormat | None:
        return None if self._template is None else self._template.tool_format

    def _special_id(self, text: str) -> int | None:
        found = self._tokenizer.token_to_id(text)
        return found if found in self._special else None

    def _bytes_or(self, told: Mapping[int, str], token: int) -> bytes:
        return told[token].encode() if token in told else self._bytes_of(token)

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


def _called(call: Json) -> str:
    return f"<tool_call>{json.dumps(call['function'])}</tool_call>"


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

    def pieces(self, shown: Collection[str] = ()) -> Pieces:
        return self._text.pieces(shown)

    @property
    def tool_format(self) -> ToolFormat | None:
        return self._text.tool_format

    def bytes_of(self, token: int) -> bytes:
        return self._text.bytes_of(token)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """In this thread, for `run`."""
        return self._text.encode(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        """In this thread, for `run`."""
        return self._text.decode(ids)

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
