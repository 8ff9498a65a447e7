"""Server-sent events, as answers are streamed in them: how one ends, and how a stream does."""

from __future__ import annotations

import json
from typing import Final

from pdrt.control.http import error_body
from pdrt.errors import PdrtError

TYPE: Final = "text/event-stream"
_TYPE: Final = TYPE.encode()
END: Final = b"\n\n"  # of an event
DONE: Final = b"data: [DONE]\n\n"  # of a stream that is whole
ERROR: Final = b"event: error\n"  # begins the last event of a stream that is not
MAX_EVENT: Final = 1 << 26  # bytes that wait for an event's end: one may tell a long prompt's odds


def is_events(content_type: bytes) -> bool:
    """Types are the same in any case (RFC 9110, section 8.3.1)."""
    return content_type.lower().startswith(_TYPE)


def error_event(error: PdrtError, request_id: str, stage: str, last: bytes = END) -> bytes:
    """Why no more comes. `last` was sent before: an event that it left half written is ended."""
    gap = b"" if last.endswith(END) else END
    told = json.dumps(error_body(error, request_id, stage))
    return b"%b%bdata: %b\n\n" % (gap, ERROR, told.encode())
