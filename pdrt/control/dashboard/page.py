"""Puts the page together from its parts and says what it may do: run its own script, ask us.

The promise: a browser runs nothing on this page but the script whose hash stands in the header,
and the page loads nothing from anywhere else, so it works without the internet.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

_SCRIPTS: Final = ("core.js", "charts.js", "picture.js", "tables.js", "main.js")  # in this order
CONTENT_TYPE: Final = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    headers: tuple[tuple[str, str], ...]


def load() -> Page:
    """Read once at the start: the parts are small and do not change."""
    style = _part("style.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_part, _SCRIPTS)) + "})();\n"
    html = _part("page.html").replace("/*style*/", style, 1).replace("/*script*/", script, 1)
    return Page(
        html.encode(),
        (
            ("content-security-policy", policy(style, script)),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-cache"),
        ),
    )


def policy(style: str, script: str) -> str:
    allowed = {
        "default-src": "'none'",
        "style-src": f"'{_hash(style)}'",
        "script-src": f"'{_hash(script)}'",
        "connect-src": "'self'",
        "img-src": "data:",  # its icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{what} {where}" for what, where in allowed.items())


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")
