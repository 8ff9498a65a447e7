"""Checks of what guards the router's clients: the file of API keys, and the certificate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pdrt.config import is_loopback
from pdrt.control.keyfile import read_keys
from pdrt.control.tls import Certificate, certificate_of, context_of, paths_of
from pdrt.errors import ConfigError
from pdrt.findings import Finding, fine, note, wrong
from pdrt.security import SecuritySection

_DAY_S: Final = 86400.0
_SOON_DAYS: Final = 14


def check_door(security: SecuritySection, host: str, now: float | None = None) -> Iterator[Finding]:
    """One finding a thing; what is not configured is worth knowing where others reach it."""
    yield from check_keys(security, host)
    yield from _tls(security, host, time.time() if now is None else now)


def check_keys(security: SecuritySection, host: str) -> Iterator[Finding]:
    """Of a router, or of a hybrid leader that clients talk to."""
    if not security.api_keys_file:
        if not security.api_keys and not is_loopback(host):
            yield note(
                "API keys: none, so whoever reaches the router may ask", "pdrt keys add NAME"
            )
        return
    path = Path(security.api_keys_file).expanduser()
    try:
        count = len(read_keys(path))
    except ConfigError as error:
        yield wrong(f"API keys: {error}", "pdrt keys add NAME --file FILE makes it")
        return
    yield fine(f"API keys: {count} in {path}")
    yield from _is_exposed("API keys", path)


def _tls(security: SecuritySection, host: str, now: float) -> Iterator[Finding]:
    if not security.tls_cert:
        if not is_loopback(host):
            yield note("TLS: none; what clients send can be read on the way", "[security] tls_cert")
        return
    try:
        context_of(security)
        told = certificate_of(security)
    except ConfigError as error:
        yield wrong(f"TLS: {error}", "correct the path, or the file")
        return
    yield _certificate(told, now)
    yield from _is_exposed("TLS key", paths_of(security)[1])


def _certificate(told: Certificate, now: float) -> Finding:
    if told.problem:
        return wrong(f"TLS: no client will take the certificate: {told.problem}", "renew it")
    days = (told.expires - now) / _DAY_S
    what = f"TLS: a certificate for {', '.join(told.names) or 'no name'}, for {days:.0f} more days"
    if not told.names:
        return wrong(what, "clients want a subjectAltName: make it with one")
    return fine(what) if days > _SOON_DAYS else note(what, "renew it; no restart is needed")


def _is_exposed(what: str, path: Path) -> Iterator[Finding]:
    if path.stat().st_mode & 0o044:
        yield note(f"{what}: other users of this host may read {path}", f"chmod 600 {path}")
