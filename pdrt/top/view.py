"""An overview as `pdrt top` reads it: what it lacks is nothing, what it has more is left out.

The promise: nothing in it can speak to the terminal, because whatever is no printable character
is taken out before it is shown.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from pdrt.errors import BadMessage

VERSION: Final = 1
_IGNORE = ConfigDict(extra="ignore")
_MOST: Final = 300


def printable(value: object) -> object:
    """Text without anything that a terminal would obey."""
    if not isinstance(value, str):
        return value
    return "".join(c if c.isprintable() else " " for c in value[:_MOST])


Words: TypeAlias = Annotated[str, BeforeValidator(printable)]
Column: TypeAlias = tuple[float | None, ...]


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class RouterView:
    pdrt: Words = ""
    now: float = 0.0
    started_at: float = 0.0
    is_ready: bool = False
    reason: Words = ""
    is_draining: bool = False
    in_flight: int = 0
    max_in_flight: int = 0


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class BlocksView:
    used: int = 0
    total: int = 0


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class InstanceView:
    name: Words
    role: Words = ""
    condition: Words = "unknown"
    reason: Words = ""
    legs: int = 0
    queued_tokens: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_blocks: BlocksView | None = None
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    sent_gb_per_s: float = 0.0
    retractions: int | None = None

    @property
    def reason_alone(self) -> str:
        """Without its own name, which stands beside it."""
        return self.reason.removeprefix(self.name).lstrip(": ")


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class RequestView:
    request_id: Words
    stage: Words = ""
    prefill: Words | None = None
    decode: Words = ""
    age_s: float = 0.0
    first_ms: float | None = None
    pieces: int = 0
    tries: int = 0


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class ErrorView:
    at: float = 0.0
    status: int = 0
    code: Words = ""
    stage: Words = ""
    message: Words = ""
    request_id: Words = ""


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class SharesView:
    """A median and a 99th percentile, in milliseconds."""

    p50: float | None = None
    p99: float | None = None


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class ColumnsView:
    p50: Column = ()
    p99: Column = ()


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class MinuteView:
    ttft_ms: SharesView = Field(default_factory=SharesView)
    itl_ms: SharesView = Field(default_factory=SharesView)


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class SeriesView:
    requests_per_s: Column = ()
    errors_per_s: Column = ()
    tokens_per_s: Column = ()
    sent_gb_per_s: Column = ()
    ttft_ms: ColumnsView = Field(default_factory=ColumnsView)
    itl_ms: ColumnsView = Field(default_factory=ColumnsView)
    last_minute: MinuteView = Field(default_factory=MinuteView)


@checked(frozen=True, slots=True, kw_only=True, config=_IGNORE)
class View:
    version: int
    router: RouterView
    models: tuple[Words, ...] = ()
    instances: tuple[InstanceView, ...] = ()
    requests: tuple[RequestView, ...] = ()
    requests_total: int = 0
    errors: tuple[ErrorView, ...] = ()
    series: SeriesView = Field(default_factory=SeriesView)


_VIEW: Final = TypeAdapter(View)


def read_view(body: object) -> View:
    """Raises BadMessage for what is no overview, or one of another version."""
    try:
        view = _VIEW.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadMessage(
            f"this is no overview of a pdrt router: {place}: {first['msg']}"
        ) from error
    if view.version != VERSION:
        raise BadMessage(
            f"the router tells version {view.version} of its overview, this pdrt reads {VERSION}:"
            " use the `pdrt top` of the router's own version"
        )
    return view
