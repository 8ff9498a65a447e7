"""Where the cluster stands: free ports, and a private directory that does not outlive it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey
from pdrt.up.layout import Part


def check_free(parts: Sequence[Part]) -> None:
    """Raises ConfigError naming address and port of what is taken already."""
    for part in parts:
        beside = "ADMIN" if part.role == "router" else "BOOTSTRAP"
        for port in part.ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((part.host, port))
                except OSError as error:
                    raise ConfigError(
                        f"{part.name} needs port {port} on {part.host}: {error.strerror}; stop what"
                        " uses it (another `pdrt up`?), or choose another with"
                        f" PDRT_PORTS_{part.role.upper()} or PDRT_PORTS_{beside} (0: a free one)"
                    ) from error


def free_port(host: str) -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def new_key(file: Path) -> ClusterKey:
    """A fresh cluster key, written where only we can read it."""
    text = secrets.token_hex(32)
    file.touch(mode=0o600)
    file.write_text(text + "\n")
    return ClusterKey.from_text(text)
