"""What a client wants, as the relay sees it: two bodies to send and a weight to count."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

from pdrt.config import Role
from pdrt.control.http import Json
from pdrt.control.merge import Merge
from pdrt.control.order import Chat, Order, Pin, leg_body
from pdrt.control.policy import weight_of
from pdrt.control.schema import Leg


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

    def body(self, side: Role, leg: Leg) -> bytes:
        """What one leader is sent."""
        ...

    def merge(self, request_id: str, created: int) -> Merge | None:
        """What is to be done where an answer has a part that prefill tells."""
        ...


@dataclass(frozen=True, slots=True)
class OrderJob:
    """A checked request for pdrt's instances; `seed` is for both legs if the client gave none."""

    order: Order
    seed: int

    @property
    def stream(self) -> bool:
        return self.order.stream

    @property
    def sequences(self) -> int:
        return self.order.drawn

    @property
    def prompt(self) -> object:
        prompt = self.order.prompt
        if isinstance(prompt, Chat):  # templates put tools at the beginning
            return [*map(json.dumps, prompt.tools), *prompt.turns]
        return prompt

    @property
    def prompt_weight(self) -> int:
        return weight_of(self.prompt)

    @property
    def answer_weight(self) -> int:
        each = self.order.max_tokens or self.order.default_tokens or 0
        return self.prompt_weight + each * self.order.drawn

    def body(self, side: Role, leg: Leg) -> bytes:
        return _dumped(leg_body(side, self.order, leg, self.seed))

    def merge(self, request_id: str, created: int) -> Merge | None:
        return Merge(self.order, request_id, created) if self.order.is_prompt_told else None


@dataclass(frozen=True, slots=True)
class PlainJob:
    """A request for plain backends: the client's fields as they came, and where to meet."""

    fields: Json

    @property
    def stream(self) -> bool:
        return self.fields.get("stream") is True

    @property
    def sequences(self) -> int:
        return 1

    @property
    def prompt(self) -> object:
        names = ("prompt", "text", "input_ids", "messages")
        return next((self.fields[n] for n in names if n in self.fields), None)

    @property
    def prompt_weight(self) -> int:
        return weight_of(self.prompt)

    @property
    def answer_weight(self) -> int:
        return self.prompt_weight

    @property
    def pin(self) -> Pin | None:
        host, port = self.fields.get("bootstrap_host"), self.fields.get("bootstrap_port")
        return Pin(host, port) if isinstance(host, str) and isinstance(port, int) else None

    def body(self, side: Role, leg: Leg) -> bytes:
        if side == "hybrid":
            return _dumped(self.fields)
        meet: Json = {
            "bootstrap_room": leg.bootstrap_room,
            "bootstrap_host": leg.bootstrap_host,
            "bootstrap_port": leg.bootstrap_port,
        }
        fields = self.fields | meet
        if side == "prefill":
            fields = {k: v for k, v in fields.items() if k not in ("stream", "stream_options")}
        return _dumped(fields)

    def merge(self, request_id: str, created: int) -> Merge | None:
        """Plain backends see to it themselves."""
        return None


def _dumped(fields: Json) -> bytes:
    """As small as what the client sent: what the router took, no leader's limit refuses."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
