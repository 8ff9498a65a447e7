"""The router: the one address that clients talk to. `main` runs it as a process."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

import setproctitle
import structlog
import uvloop
from aiohttp import web

from pdrt import garbage, telemetry
from pdrt.config import RouterConfig, bracketed
from pdrt.control import order
from pdrt.control.fleet import Fleet
from pdrt.control.front import NO_PATH, STAGE, Router
from pdrt.control.http import PATH_HEADER, add_request_id, error_middleware, listen
from pdrt.control.relay import Clocks
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey
from pdrt.openfiles import allow_all

ROUTER: Final = web.AppKey("router", Router)
CLOSE_S: Final = 1.0  # for connections whose requests have ended

log = structlog.get_logger(__name__)


def mint_room() -> int:
    """63 random bits: no client can choose or guess a room."""
    return secrets.randbits(63)


def make_router(
    config: RouterConfig,
    key: ClusterKey | None,
    *,
    clocks: Clocks | None = None,
    mint: Callable[[], int] = mint_room,
) -> web.Application:
    """The application. With `policy.canary = false` instances are plain backends: no token.

    Run it with `handler_cancellation=True`, so that a client that leaves frees both legs.
    """
    shared = key if config.policy.canary else None
    if config.policy.canary and shared is None:
        raise ConfigError(
            "[security] key_file: the router needs the cluster key of its instances"
            " (or [policy] canary = false in front of plain backends)"
        )
    router = Router(config, shared, clocks or Clocks(), mint, Fleet.of(config))
    app = web.Application(
        middlewares=[router.count, error_middleware(STAGE), router.check_key],
        client_max_size=config.security.max_body_bytes,
    )
    app[ROUTER] = router
    app.cleanup_ctx.append(router.lifetime)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(_add_path)
    for path in order.PATHS:
        app.router.add_post(path, router.serve)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_get("/ready", router.ready)
    app.router.add_get("/metrics", router.metrics_text)
    app.router.add_post("/admin/drain", router.ask_drain)
    return app


async def _add_path(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault(PATH_HEADER, NO_PATH)


async def serve(config: RouterConfig, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM, SIGINT or a drain request; a second signal cuts what still runs.

    `say` is given the line with the real address. Raises ConfigError before anything starts.
    """
    app = make_router(config, config.security.cluster_key())
    router = app[ROUTER]
    runner, port = await listen(app, config.local_ip, config.ports.router, CLOSE_S)
    try:
        url = f"http://{bracketed(config.local_ip)}:{port}"
        log.info("listening", url=url)
        say(f"router listening on {url}")
        garbage.settle()
        return await _until_asked(router, config.timeouts.drain_s)
    finally:
        await runner.cleanup()


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
    telemetry.configure(config.log.level, config.log.format, process="router")
    allow_all()
    setproctitle.setproctitle("pdrt router")

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, say))
