"""What a router says of itself: that it lives, whether it is ready, its models and its metrics."""

from __future__ import annotations

from pdrt.control import openai
from pdrt.control.fleet import listed
from pdrt.control.front import Router
from pdrt.control.http import Json
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.errors import NotFound


class About:
    def __init__(self, router: Router) -> None:
        self._router = router

    def add_routes(self) -> None:
        routes = self._router.routes
        routes.add("GET", "/v1/models", self.models)
        routes.add("GET", "/v1/models/{name}", self.model)
        routes.add("GET", "/v1/models/{owner}/{name}", self.model)
        routes.add("GET", "/health", self.health)
        routes.add("GET", "/ready", self.ready)
        routes.add("GET", "/metrics", self.metrics_text)
        routes.add("POST", "/admin/drain", self.drain_moved)

    async def health(self, _request: Request) -> Reply:
        """Liveness: the loop turns and the instances are being watched."""
        if self._router.watching is not None and self._router.watching.done():
            return Reply.json({"status": "failed", "reason": "see the log"}, 503)
        return Reply.json({"status": "ok", **self._state()})

    async def ready(self, _request: Request) -> Reply:
        reason = "draining" if self._router.draining else self._router.fleet.why_not_ready()
        body = {"ready": not reason, "reason": reason, **self._state()}
        return Reply.json(body, 503 if reason else 200)

    def _state(self) -> Json:
        return {
            "draining": self._router.draining,
            "in_flight": self._router.admitted,
            "instances": [
                {
                    "name": each.name,
                    "health": each.health,
                    "state": each.status.state if each.status else None,
                    "legs": each.load.requests,
                    "reason": each.why_not,
                }
                for each in self._router.fleet.instances
            ],
            "pairs": [
                {"name": pair.name, "trust": pair.trust, "reason": pair.reason}
                for pair in self._router.fleet.pairs
            ],
        }

    async def models(self, _request: Request) -> Reply:
        served = self._router.fleet.models
        return Reply.json(openai.models([self._model(name) for name in served]))

    async def model(self, request: Request) -> Reply:
        named = "/".join(request.params.values())  # a model's name may have an owner's before it
        served = self._router.fleet.models
        if named not in served:
            raise NotFound(f"model {named!r} is not served here; {listed(served)}")
        return Reply.json(self._model(named))

    def _model(self, name: str) -> Json:
        return openai.model(name, 0, self._router.fleet.length_of(name))

    async def metrics_text(self, _request: Request) -> Reply:
        router, metrics = self._router, self._router.metrics
        metrics.in_flight.set(router.admitted)
        metrics.ready.set(router.fleet.is_ready and not router.draining)
        metrics.instance_up.clear()  # who has left must not be told of any more
        metrics.instance_requests.clear()
        for each in router.fleet.instances:
            metrics.instance_up.labels(each.name).set(each.is_routable)
            metrics.instance_requests.labels(each.name).set(each.load.requests)
        return Reply.metrics(metrics.registry)

    async def drain_moved(self, _request: Request) -> Reply:
        raise NotFound(
            f"POST /admin/drain is on the admin listener: {self._router.admin_url or 'none here'}"
        )
