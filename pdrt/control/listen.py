"""Listening sockets: a taken port or a foreign address is told before anything starts."""

from __future__ import annotations

import errno
import socket

from pdrt.errors import ConfigError

BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket; port 0 takes a free one. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host!r} is no address of this host: {error.strerror}") from error
    found = socket.socket(family, kind, proto)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.setblocking(False)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ConfigError(_why(error, host, port)) from error
    return found


def _why(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            taken = f"port {port} on {host} is taken by another process"
            return f"{taken}: stop that, or choose another in [ports]"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this host"
        case errno.EACCES:
            return f"port {port} on {host} needs privileges that this process does not have"
        case _:
            return f"cannot listen on {host}:{port}: {error.strerror}"
