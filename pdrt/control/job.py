"""What a client wants, as the relay sees it: two bodies to send and a weight to count."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Final, Protocol

from pdrt.config import Role
from pdrt.control.http import Json
from pdrt.control.merge import Merge
from pdrt.control.order import Chat, Order, Pin, leg_body
from pdrt.control.policy import weight_of
from pdrt.control.schema import LegFields

UNNAMED_TOKENS: Final = 256  # that an answer is taken to have when nobody says how many
_STREAMING: Final = frozenset({"stream", "stream_options"})
_MEET: Final = frozenset({"bootstrap_room", "bootstrap_host", "bootstrap_port"})
_NOTHING: Final = frozenset[str]()
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')


class Meeting(Protocol):
    """Where and as what the two legs of a request meet."""

    @property
    def room(self) -> int: ...

    @property
    def bootstrap(self) -> tuple[str, int] | None: ...

    def leg(self) -> LegFields:
        """All that pdrt's leaders are told of it."""
        ...


class Job(Protocol):
    """A request that can be sent to leaders."""

    @property
    def stream(self) -> bool: ...

    @property
    def sequences(self) -> int:
        """Answers to one prompt."""
        ...

    @property
    def prompt(self) -> object:
        """Text, ids or turns."""
        ...

    @property
    def prompt_weight(self) -> int:
        """Tokens that prefill computes, about."""
        ...

    @property
    def answer_weight(self) -> int:
        """Tokens that decode will hold, about."""
        ...

    def body(self, side: Role, meeting: Meeting) -> bytes:
        """What one leader is sent."""
        ...

    def merge(self, request_id: str, created: int) -> Merge | None:
        """What is to be done where an answer has a part that prefill tells."""
        ...


class OrderJob:
    """A checked request for pdrt's instances; `seed` is for both legs if the client gave none."""

    def __init__(self, order: Order, seed: int) -> None:
        self.order, self.seed = order, seed
        self.stream, self.sequences = order.stream, order.drawn
        prompt = order.prompt
        self.prompt: object = prompt
        if isinstance(prompt, Chat):  # templates put tools at the beginning
            self.prompt = [*map(json.dumps, prompt.tools), *prompt.turns]
        self.prompt_weight = weight_of(self.prompt)
        each = order.max_tokens
        if each is None:
            each = order.default_tokens or UNNAMED_TOKENS
        self.answer_weight = self.prompt_weight + each * order.drawn

    def body(self, side: Role, meeting: Meeting) -> bytes:
        return _dumped(leg_body(side, self.order, meeting.leg(), self.seed))

    def merge(self, request_id: str, created: int) -> Merge | None:
        return Merge(self.order, request_id, created) if self.order.is_prompt_told else None


def cost_of(order: Order) -> int:
    """Tokens that an order may come to, all its prompts and answers together."""
    return sum(OrderJob(part, seed=0).answer_weight for part in order.parts())


_PROMPTS: Final = ("prompt", "text", "input_ids", "messages")


class PlainJob:
    """A request for plain backends: the client's own bytes, and where to meet spliced in."""

    def __init__(self, fields: Json, raw: bytes) -> None:
        self.fields, self._raw = fields, raw
        self.stream = bool(fields.get("stream"))  # as lenient servers read it
        self.sequences = 1
        self.prompt: object = None
        for name in _PROMPTS:
            if name in fields:
                self.prompt = fields[name]
                break
        self.prompt_weight = self.answer_weight = weight_of(self.prompt)
        self._met: tuple[int, tuple[str, int]] | None = None
        self._for_both: bytes | None = None  # where neither leg is streamed

    @property
    def pin(self) -> Pin | None:
        host, port = self.fields.get("bootstrap_host"), self.fields.get("bootstrap_port")
        return Pin(host, port) if isinstance(host, str) and isinstance(port, int) else None

    def body(self, side: Role, meeting: Meeting) -> bytes:
        where, room = meeting.bootstrap, meeting.room
        if where is None:
            return self._raw
        if self._met != (room, where):
            self._met, self._for_both = (room, where), None
        if self._for_both is not None:
            return self._for_both
        is_for_both = not self.stream and "stream_options" not in self.fields
        left_out = _STREAMING if side == "prefill" and not is_for_both else _NOTHING
        raw = self._without_stream() if left_out else self._raw
        if raw is not None and self._is_open:
            end = raw.rindex(b"}")
            body = b'%b,"bootstrap_room":%d,%b}' % (raw[:end], room, _told(where))
        else:
            meet = json.loads(b'{"bootstrap_room":%d,%b}' % (room, _told(where)))
            body = _dumped({k: v for k, v in self.fields.items() if k not in left_out} | meet)
        if is_for_both:
            self._for_both = body
        return body

    @property
    def _is_open(self) -> bool:
        """Whether fields can be put at the end of the client's bytes."""
        raw = self._raw
        is_utf8 = raw[:1] == b"{" and raw[1:2] != b"\0"
        return is_utf8 and bool(self.fields) and _MEET.isdisjoint(self.fields)

    def _without_stream(self) -> bytes | None:
        """The bytes for a leg that is not streamed; None when only encoding anew would do.

        A body that says "stream" once, and escapes nothing, says it where the field is.
        """
        fields, raw = self.fields, self._raw
        if "stream_options" in fields or raw.count(b'"stream"') != 1 or b"\\u" in raw:
            return None
        without, count = _STREAM.subn(b'"stream":false', raw, count=1)
        return without if count else None

    def merge(self, request_id: str, created: int) -> Merge | None:
        """Plain backends see to it themselves."""
        return None


@lru_cache(64)
def _told(where: tuple[str, int]) -> bytes:
    """Where the legs of a plain request meet, as fields of a JSON object."""
    host = encode_basestring_ascii(where[0]).encode()
    return b'"bootstrap_host":%b,"bootstrap_port":%d' % (host, where[1])


def _dumped(fields: Json) -> bytes:
    """As small as what the client sent: what the router took, no leader's limit refuses."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
