"""Stand-ins for `pdrt node` and `pdrt router`, run as real processes by the tests of `pdrt up`.

    python fake_parts.py BEHAVIOUR HOST PORT

`node` is ready when asked a few times, so that its loading is seen, and ends on SIGTERM;
`router` is no different; `refusing` is never ready, `deaf` ignores SIGTERM, `broken` says why it
cannot start and exits 3, `shm` says what carries KV to it, and any of them dies on GET /die, ends
as if drained on GET /leave and changes its mind about being ready on GET /turn.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType

LOAD = {"running": 3, "waiting": 1, "blocks_used": 5, "blocks_total": 9}

ENDS = {"/die": 9, "/leave": 0}
LOADING = {"rank": "0,0,0", "state": "loading", "loading": ["weights", 1, 4]}


class Handler(BaseHTTPRequestHandler):
    asked = 0
    is_told = False  # what carries KV to it
    is_well = True

    def do_GET(self) -> None:
        if self.path in ENDS:
            os._exit(ENDS[self.path])
        if self.path == "/turn":
            Handler.is_well = not Handler.is_well
        Handler.asked += 1
        is_ready = Handler.is_well and Handler.asked > 3
        state: dict[str, object] = (
            {"state": "ready", "load": LOAD} if is_ready else {"workers": [LOADING]}
        )
        if Handler.is_told and is_ready:
            state["workers"] = [{"state": "ready", "transports": {"a#1": "shm, 3.2 GB/s"}}]
        state["reason"] = "no healthy decode instance"
        body = json.dumps(state).encode()
        self.send_response(200 if is_ready or self.path != "/ready" else 503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def say(**told: object) -> None:
    sys.stderr.write(json.dumps(told) + "\n")
    sys.stderr.flush()


def main(behaviour: str, host: str, port: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else leave)
    Handler.is_well = behaviour != "refusing"
    Handler.is_told = behaviour == "shm"
    if behaviour == "broken":
        say(event="cannot start", error="no such model")
        sys.exit(3)
    say(event="listening", port=port)
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
