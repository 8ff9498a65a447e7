"""The router: the one address that clients talk to. `main` runs it as a process."""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import setproctitle
import structlog
import uvloop

from pdrt import garbage, telemetry
from pdrt.config import RouterConfig, bracketed
from pdrt.control import order
from pdrt.control.about import About
from pdrt.control.accounts import Tell, tell_plainly
from pdrt.control.admin import Admin
from pdrt.control.dashboard.serve import Dashboard
from pdrt.control.fleet import Fleet
from pdrt.control.front import STAGE, Router
from pdrt.control.listen import listen
from pdrt.control.reload import Reload
from pdrt.control.rooms import Rooms, router_of
from pdrt.control.ticket import Clocks
from pdrt.control.tls import context_of, paths_of
from pdrt.control.wire.server import Server
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey
from pdrt.openfiles import allow_all
from pdrt.telemetry import LogLevel

CLOSE_S: Final = 1.0  # for connections whose requests have ended

log = structlog.get_logger(__name__)


def make_router(
    config: RouterConfig,
    key: ClusterKey | None,
    *,
    clocks: Clocks | None = None,
    mint: Callable[[], int] | None = None,
    tell: Tell = tell_plainly,
) -> Router:
    """A router with all its routes. With `policy.backends = "plain"` nobody needs a key."""
    shared = None if config.policy.is_plain else key
    if not config.policy.is_plain and shared is None:
        raise ConfigError(
            "[security] key_file: the router needs the cluster key of its instances"
            ' (or [policy] backends = "plain" in front of servers that are not pdrt)'
        )
    minted, fleet = mint or Rooms().mint, Fleet.of(config)
    router = Router(config, shared, clocks or Clocks(), minted, fleet, tell=tell)
    routes = router.routes
    for path in order.PATHS:
        routes.add_stream("POST", path, router.serve)
    for path in order.TOKEN_PATHS:
        routes.add("POST", path, router.ask_any)
    About(router).add_routes()
    Dashboard(router).add_routes()
    return router


def make_server(router: Router) -> Server:
    security = router.config.security
    server = Server(
        router,
        STAGE,
        max_body_bytes=security.max_body_bytes,
        max_head_bytes=security.max_header_bytes,
        slow_reader_s=router.config.timeouts.slow_reader_s,
        max_connections=security.max_connections,
    )
    server.mint_id = router.chance.request_id
    return server


def tls_of(router: Router, server: Server) -> ssl.SSLContext | None:
    """What connections are encrypted with, read again when its files change. Raises ConfigError."""
    security = router.config.security
    context = context_of(security)
    if context is not None:
        read = partial(context_of, security)
        reload = Reload("TLS certificate", paths_of(security), read, server.renew)
        reload.note()
        router.reloads.append(reload)
    return context


@asynccontextmanager
async def administered(router: Router, level: LogLevel | None = None) -> AsyncIterator[None]:
    """With its admin listener, if there is a key that can guard it. Raises ConfigError."""
    config = router.config
    key = config.security.cluster_key()
    if key is None:
        log.warning("no_admin_listener", reason="there is no cluster key")
        yield
        return
    host = config.admin.host or config.local_ip
    listening = listen(host, config.ports.admin)
    router.admin_url = f"http://{bracketed(host)}:{listening.getsockname()[1]}"
    server = Server(
        Admin(router, router.roster, key, level),
        "admin",
        max_body_bytes=1 << 16,
        max_head_bytes=config.security.max_header_bytes,
        slow_reader_s=config.timeouts.slow_reader_s,
    )
    await server.start(listening)
    try:
        log.info("admin_listening", url=router.admin_url)
        yield
    finally:
        await server.close(CLOSE_S)


async def serve(
    config: RouterConfig, say: Callable[[str], None], level: LogLevel | None = None
) -> int:
    """Serve until SIGTERM, SIGINT or a drain request; a second signal cuts what still runs.

    `say` is given the line with the real address. Raises ConfigError before anything starts.
    """
    lines = telemetry.Lines(sys.stderr, asyncio.get_running_loop().call_later, process="router")
    router = make_router(config, config.security.cluster_key(), tell=_teller(config, lines, level))
    server = make_server(router)
    tls = tls_of(router, server)
    async with router.lifetime(), administered(router, level):
        listening = listen(config.local_ip, config.ports.router)
        await server.start(listening, tls)
        try:
            scheme = "http" if tls is None else "https"
            url = f"{scheme}://{bracketed(config.local_ip)}:{listening.getsockname()[1]}"
            log.info("listening", url=url, router=router_of(router.mint_room()))
            say(f"router listening on {url}")
            garbage.settle_for_requests()
            return await _until_asked(router, config.timeouts.drain_s)
        finally:
            await server.close(CLOSE_S)
            lines.flush()


def _teller(config: RouterConfig, lines: telemetry.Lines, level: LogLevel | None) -> Tell:
    """How a request is told with which nothing was wrong; the level may change any time."""
    if telemetry.is_console(config.log.format):
        return tell_plainly

    def tell(event: str, fields: Mapping[str, object]) -> None:
        if level is None or level.name in ("debug", "info"):
            lines.info(event, fields)

    return tell


async def _until_asked(router: Router, drain_s: float) -> int:
    loop, hurry = asyncio.get_running_loop(), asyncio.Event()

    def asked() -> None:
        (hurry if router.drain_asked.is_set() else router.drain_asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    if not await _first(router.drain_asked.wait(), router.watched_over()):
        log.error("watching_failed")
        return 1
    log.info("draining", in_flight=router.admitted)
    if not await _first(router.drain(drain_s), hurry.wait()):
        router.cut()
    return 0


async def _first(one: Coroutine[None, None, object], other: Coroutine[None, None, object]) -> bool:
    """Wait for either; whether the first of them ended."""
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def main(config: RouterConfig) -> int:
    """Run a router in this process; its exit status. Raises ConfigError."""
    level = telemetry.configure(config.log.level, config.log.format, process="router")
    allow_all()
    setproctitle.setproctitle("pdrt router")

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, say, level))
