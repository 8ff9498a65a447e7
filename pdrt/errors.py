"""One tree of errors: each has a code for programs, an HTTP status for clients and a stage.

Foreign errors are mapped to one of these once, at the edge where they appear. Expected
outcomes travel as values (`messages.Problem`), not as exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class PdrtError(Exception):
    """Base of all. `retryable` says whether the same request may succeed elsewhere or later."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    stage: str = ""  # where it arose, when the one who raised it knows
    retry_after: int = 0  # seconds, when the one who raised it knows


class Illegal(PdrtError):
    """A bug of ours: a state machine met an event that cannot happen there."""

    code = "illegal_transition"

    def __init__(self, machine: str, state: object, event: object) -> None:
        super().__init__(f"{machine}: {type(event).__name__} cannot happen in {state}: {event!r}")


class ConfigError(PdrtError):
    """A setting that cannot work; the message names file, key, value and what is allowed."""

    code = "bad_config"


class BadMessage(PdrtError):
    """Bytes from a socket that are not one of our messages. Counted and dropped."""

    code = "bad_message"
    status = 400


class BadRequest(PdrtError):
    """The client's request cannot be served as it is; the message names the field."""

    code = "bad_request"
    status = 400


class TooLong(BadRequest):
    """Prompt and answer together can never fit the model or the KV pool."""

    code = "too_long"


class TooLarge(BadRequest):
    """The request's body is over the limit."""

    code = "too_large"
    status = 413


class HeadTooLarge(BadRequest):
    """The request's line and headers are over the limit."""

    code = "head_too_large"
    status = 431


class Stalled(BadRequest):
    """The request did not arrive whole in time."""

    code = "stalled"
    status = 408


class Unauthorized(PdrtError):
    """Missing or wrong key or token."""

    code = "unauthorized"
    status = 401


class NotFound(PdrtError):
    """No such route, model or room."""

    code = "not_found"
    status = 404


class NotAllowed(PdrtError):
    """The path exists, and not with this method."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not served here; {', '.join(allowed)} is")
        self.allowed = allowed


class Conflict(PdrtError):
    """The room is in flight already, or a registration disagrees with what is known."""

    code = "conflict"
    status = 409


class Overloaded(PdrtError):
    """A bounded queue is full. Answered with Retry-After."""

    code = "overloaded"
    status = 429
    retryable = True


class RateLimited(Overloaded):
    """This API key has used up what it may; others are served. Answered with Retry-After."""

    code = "rate_limited"


class Unavailable(PdrtError):
    """Nobody healthy can serve this now."""

    code = "unavailable"
    status = 503
    retryable = True


class NoPrefill(Unavailable):
    code = "no_prefill"


class NoDecode(Unavailable):
    code = "no_decode"


class Draining(Unavailable):
    code = "draining"


class PeerLost(Unavailable):
    """A process, actor or connection that was needed is gone."""

    code = "peer_lost"


class TransferFailed(Unavailable):
    """KV could not be moved; the message names room, peer, rank, transport and bytes done."""

    code = "transfer_failed"


class PromptMismatch(PdrtError):
    """The two legs of a request do not agree on its prompt: a bug or a forged leg."""

    code = "prompt_mismatch"


class BadLogits(PdrtError):
    """The device computed what is no number: damaged KV or weights. Never a token."""

    code = "bad_logits"


class GrammarFailed(PdrtError):
    """The grammar cannot say what may come next: it became too complex on the way."""

    code = "grammar_failed"


class DeadlinePassed(PdrtError):
    """The request's own deadline came first."""

    code = "deadline"
    status = 504


class Cancelled(PdrtError):
    """The client left or the router withdrew the request. Never seen by a client."""

    code = "cancelled"
    status = 499


def tree(root: type[PdrtError] = PdrtError) -> dict[str, type[PdrtError]]:
    """All error classes by code, to give a code from the wire its HTTP status again."""
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= tree(child)
    return found


def first_of(error: BaseException) -> BaseException:
    """What really went wrong in a task: the innermost first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
