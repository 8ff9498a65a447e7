"""The way to one peer: its writes, striped over a few connections with a thread for each.

When one connection is lost all are cut: nothing more leaves from here, and what had left
before is the peer's to drop, whose revocation does not ask us. The next write connects again,
once. A connection that was idle is tried before it is trusted, for a network may have forgotten
it without a word. A stuck peer holds up its own threads alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pdrt.data.memory import HostMemory
from pdrt.data.transport.promise import Ended, Write
from pdrt.data.transport.tcp_cuts import FRAME
from pdrt.data.transport.tcp_outbox import Outbox
from pdrt.data.transport.tcp_outgoing import Dialer, Outgoing
from pdrt.data.transport.tcp_socket import cut, words
from pdrt.data.transport.tcp_wire import NAME_BYTES, Head, Kind, Status
from pdrt.errors import BadMessage, TransferFailed


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a peer is waited for."""

    connect_s: float = 2.0  # to be reached, and again to greet
    idle_s: float = 1.0  # a connection that was silent for longer is tried first ...
    pong_s: float = 2.0  # ... and answers within this
    last_word_s: float = 1.0  # of a peer that is let go: that it places nothing more


@dataclass(slots=True, eq=False)
class _Link:
    """The connections of one life: cut together, closed when no thread uses them."""

    stripes: list[Outgoing]
    users: int = 0
    is_cut: bool = False


class Lane:
    """Made on the running loop, which reads the answers and is told the ends."""

    def __init__(
        self,
        memory: HostMemory,
        size: int,
        dialer: Dialer,
        tell: Callable[[Ended], None],
        stripes: int,
        patience: Patience,
    ) -> None:
        self.size = size  # of the peer's memory
        self._memory, self._dialer, self._patience = memory, dialer, patience
        self._loop = asyncio.get_running_loop()
        self._quiet = asyncio.Event()
        self._lock = threading.Lock()  # guards all that follows
        self._work = threading.Condition(self._lock)
        self._pong = threading.Condition(self._lock)
        self._outbox = Outbox(tell)
        self._link: _Link | None = None
        self._is_dialling = False
        self._closing: str | None = None  # why
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"pdrt-tcp-{n}", daemon=True)
            for n in range(stripes)
        ]

    def open(self) -> None:
        """Connect, which may take a while, then serve. Raises TransferFailed."""
        link = self._connect()
        with self._lock:
            self._adopt(link)
        for thread in self._threads:
            thread.start()

    def start(self, write: Write) -> None:
        with self._lock:
            self._outbox.add(write)
            self._work.notify(1 if write.size <= FRAME else len(self._threads))

    def abort(self, write: int) -> None:
        with self._lock:
            self._outbox.stop(write, "aborted")
            self._work.notify_all()

    async def close(self, reason: str) -> None:
        """Every write ends: with the peer's word if it comes soon, else without."""
        with self._lock:
            self._closing = reason
            self._outbox.stop_all(reason)
            self._work.notify_all()
            self._look_quiet()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience.last_word_s):
                await self._quiet.wait()
        with self._lock:
            self._is_over = True
            self._dialer.cut()
            if self._link:
                self._lose(self._link, reason)
            self._work.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                await asyncio.to_thread(thread.join)

    def _serve(self, stripe: int) -> None:
        """A thread: one turn after the other."""
        while self._wait():
            link = self._borrow()
            if link is None:
                self._dial()
                continue
            try:
                if self._is_trusted(link, stripe):
                    self._send(link, stripe)
            except OSError as error:
                self._fail(link, error)
            finally:
                self._give_back(link)

    def _wait(self) -> bool:
        """Until there is something to send; False when there never will be."""
        with self._lock:
            while not self._is_over:
                if self._outbox.has_frame and (self._link or not self._is_dialling):
                    return True
                self._work.wait()
            return False

    def _borrow(self) -> _Link | None:
        with self._lock:
            if self._link:
                self._link.users += 1
            return self._link

    def _give_back(self, link: _Link) -> None:
        with self._lock:
            link.users -= 1
            self._bury(link)

    def _is_trusted(self, link: _Link, stripe: int) -> bool:
        """Whether a frame may go: an idle connection is tried first. Raises OSError."""
        outgoing = link.stripes[stripe]
        if not self._outbox.is_idle:
            return True
        if outgoing.is_cut():
            raise ConnectionResetError("the connection was closed")
        if outgoing.idle_s() > self._patience.idle_s:
            pongs = outgoing.pongs
            outgoing.send(Head(Kind.PING))
            with self._lock:
                is_told = self._pong.wait_for(
                    lambda: link.is_cut or outgoing.pongs > pongs, self._patience.pong_s
                )
                if not is_told:
                    raise TimeoutError("it does not answer any more")
        return not link.is_cut

    def _send(self, link: _Link, stripe: int) -> None:
        """One frame, if there is still one. Raises OSError."""
        with self._lock:
            if link.is_cut or not self._outbox.has_frame:
                return
            frame = self._outbox.next()
        try:
            base = self._memory.address
            link.stripes[stripe].send(frame.head, base, frame.runs, frame.slot)
        finally:
            with self._lock:
                self._outbox.sent(frame.job)
                self._look_quiet()

    def _dial(self) -> None:
        """Connect again, once: all writes that wait for it learn why it failed."""
        with self._lock:
            if self._is_dialling or self._link:
                return
            self._is_dialling = True
        link: _Link | None = None
        error = ""
        try:
            link = self._connect()
        except TransferFailed as failed:
            error = str(failed)
        with self._lock:
            self._is_dialling = False
            if link:
                self._adopt(link)
            else:
                self._outbox.unreachable(error)
            self._work.notify_all()
            self._look_quiet()

    def _connect(self) -> _Link:
        name = os.urandom(NAME_BYTES)
        link = _Link([])
        try:
            for _ in self._threads:
                link.stripes.append(self._dialer.dial(name))
        except TransferFailed:
            for stripe in link.stripes:
                stripe.sock.close()
            raise
        return link

    def _adopt(self, link: _Link) -> None:
        self._link = link
        self._on_loop(self._watch, link)
        if self._is_over:
            self._lose(link, self._closing or "")

    def _fail(self, link: _Link, error: Exception) -> None:
        with self._lock:
            self._lose(link, f"tcp to {self._dialer.offer}: {words(error)}")

    def _lose(self, link: _Link, reason: str) -> None:
        """Cut it. What it had begun ends when no thread sends of it any more."""
        if link.is_cut:
            return
        link.is_cut = True
        self._link = None
        for stripe in link.stripes:
            cut(stripe.sock)
        self._outbox.lost(reason)
        self._work.notify_all()
        self._pong.notify_all()
        self._bury(link)
        self._look_quiet()

    def _bury(self, link: _Link) -> None:
        """A descriptor is closed when nobody uses it: its number may be another's at once."""
        if link.is_cut and not link.users:
            self._on_loop(self._close, link)

    def _look_quiet(self) -> None:
        if self._closing is not None and self._outbox.is_empty:
            self._on_loop(self._quiet.set)

    def _on_loop(self, call: Callable[..., None], *arguments: _Link) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(call, *arguments)

    def _watch(self, link: _Link) -> None:
        for stripe in link.stripes:
            self._loop.add_reader(stripe.sock.fileno(), self._read, link, stripe)

    def _close(self, link: _Link) -> None:
        for stripe in link.stripes:
            if stripe.sock.fileno() >= 0:
                self._loop.remove_reader(stripe.sock.fileno())
                stripe.sock.close()

    def _read(self, link: _Link, stripe: Outgoing) -> None:
        """On the loop: the peer has answered, or is gone."""
        try:
            answers = stripe.read()
            with self._lock:
                for answer in answers:
                    if answer.status is Status.PONG:
                        stripe.pongs += 1
                        self._pong.notify_all()
                    elif not link.is_cut:
                        self._outbox.answered(answer)
                if self._outbox.has_frame:
                    self._work.notify_all()
                self._look_quiet()
        except (OSError, BadMessage) as error:
            self._loop.remove_reader(stripe.sock.fileno())
            self._fail(link, error)
