"""The listening side of tcp: who is let in, and a thread for each connection.

Promises: nothing that a network sends raises out of a thread, or ends another connection than
those of its own link; strangers are few at a time and gone in two seconds; after `close` there
is neither thread nor socket left, and no byte is placed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import structlog

from pdrt.data.memory import HostMemory
from pdrt.data.transport.tcp_arrivals import Arrivals
from pdrt.data.transport.tcp_grants import Grants
from pdrt.data.transport.tcp_place import Incoming
from pdrt.data.transport.tcp_socket import cut, listen, read_exactly, tune
from pdrt.data.transport.tcp_wire import (
    HELLO_BYTES,
    NAME_BYTES,
    Greeting,
    Offer,
    SessionKeys,
    Verdict,
)
from pdrt.errors import BadMessage, PeerLost
from pdrt.keys import ClusterKey

MAX_CONNECTIONS: Final = 1024
MAX_STRANGERS: Final = 64  # connections that have not shown the key yet
GREETING_S: Final = 2.0
_BREATH_S: Final = 0.1  # without a free descriptor, before accepting is tried again

_log = structlog.get_logger()


@dataclass(eq=False)
class _Link:
    """All connections of one writer to us; they live and die together."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    sockets: set[socket.socket] = field(default_factory=set)


class Receiver:
    """Listens once somebody asks where; `counts` says what was refused and dropped."""

    def __init__(self, memory: HostMemory, local_ip: str, key: ClusterKey) -> None:
        self.grants = Grants(memory.size, memory.probe_at, memory.probe_bytes)
        self.counts: Counter[str] = Counter()
        self._memory, self._local_ip, self._key = memory, local_ip, key
        self._name = os.urandom(NAME_BYTES)
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()  # guards all that follows
        self._is_closed = False
        self._links: dict[bytes, _Link] = {}
        self._sockets: set[socket.socket] = set()
        self._strangers: set[socket.socket] = set()  # those that have not shown the key yet
        self._threads: list[threading.Thread] = []

    def offer(self) -> Offer:
        """Where writers find us; listens from the first call on. Raises ConfigError."""
        if self._listener is None:
            self._listener = listen(self._local_ip)
            self._loop.add_reader(self._listener.fileno(), self._accept)
        host, port = self._listener.getsockname()[:2]
        return Offer(host, port, self._name)

    async def close(self) -> None:
        """What the module promises."""
        if self._listener is not None and not self._is_closed:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        with self._lock:
            self._is_closed = True
            for sock in self._sockets:
                cut(sock)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _accept(self) -> None:
        """On the loop: each newcomer gets a thread, and little time to show the key."""
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._rest()
            return
        if not self._enter(sock):
            self._count("crowded_out")
            sock.close()
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._run, args=(sock,), name="pdrt-tcp-in", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            self._leave(sock)
        else:
            self._threads.append(thread)

    def _rest(self) -> None:
        """No descriptor is free: a listener that stays readable must not spin."""
        assert self._listener is not None
        self._count("accept_failed")
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_BREATH_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None and not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _run(self, sock: socket.socket) -> None:
        """A thread: one connection from its first byte to its last."""
        is_known = False
        try:
            tune(sock)
            keys, link = self._greet(sock)
            is_known = True
            Incoming(sock, keys, link.arrivals, self._memory, self.grants, self._count).serve()
        except (BadMessage, PeerLost) as error:
            count = self._count("bad_frames" if is_known else "refused")
            if count.bit_count() == 1:  # 1, 2, 4, ...: nobody can fill the log from outside
                _log.warning("tcp_dropped", reason=str(error), is_known=is_known, count=count)
        except OSError:
            self._count("lost" if is_known else "refused")
        finally:
            self._leave(sock)

    def _greet(self, sock: socket.socket) -> tuple[SessionKeys, _Link]:
        """Raises BadMessage, PeerLost or OSError for who is not let in."""
        deadline = time.monotonic() + GREETING_S
        greeting = Greeting(self._key)
        sock.settimeout(GREETING_S)
        sock.sendall(greeting.banner())
        memory, name = greeting.heard(read_exactly(sock, HELLO_BYTES, deadline))
        if memory != self._name:
            sock.sendall(greeting.verdict(Verdict.OTHER_MEMORY))
            raise PeerLost("a writer that looks for another memory")
        with self._lock:
            self._strangers.discard(sock)
            link = self._links.setdefault(name, _Link())
            link.sockets.add(sock)
        sock.sendall(greeting.verdict(Verdict.WELCOME))
        sock.setblocking(False)
        return greeting.keys(), link

    def _enter(self, sock: socket.socket) -> bool:
        """Whether there is room for one more that may be anybody."""
        with self._lock:
            is_full = len(self._strangers) >= MAX_STRANGERS or len(self._sockets) >= MAX_CONNECTIONS
            if is_full or self._is_closed:
                return False
            self._sockets.add(sock)
            self._strangers.add(sock)
            return True

    def _leave(self, sock: socket.socket) -> None:
        """The connection is over, and with it its link: no write can be whole without it."""
        with self._lock:
            self._sockets.discard(sock)
            self._strangers.discard(sock)
            for name, link in list(self._links.items()):
                if sock in link.sockets:
                    link.sockets.discard(sock)
                    for sibling in link.sockets:
                        cut(sibling)
                    if not link.sockets:
                        del self._links[name]
            sock.close()

    def _count(self, what: str) -> int:
        with self._lock:
            self.counts[what] += 1
            return self.counts[what]
