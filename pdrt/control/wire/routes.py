"""The route table: `(method, path)` to what serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdrt.control.wire.exchange import Exchange, Handler, Route
from pdrt.control.wire.request import Request
from pdrt.errors import NotAllowed, NotFound


@dataclass(slots=True)
class Routes:
    """Paths are exact, or have `{names}` that each take one segment; a last `{name*}` takes all."""

    _exact: dict[str, dict[str, Route]] = field(default_factory=dict)
    _patterns: list[tuple[list[str], dict[str, Route]]] = field(default_factory=list)

    def add(self, method: str, path: str, handler: Handler) -> None:
        """`handler` is given the whole request; a PdrtError that it raises is the answer."""
        self._put(method, Route(path, handler=handler))

    def add_stream(self, method: str, path: str, serves: Callable[[Exchange], None]) -> None:
        """`serves` is called, not awaited, and writes the answer as it comes."""
        self._put(method, Route(path, serves=serves))

    def _put(self, method: str, route: Route) -> None:
        if "{" not in route.path:
            methods = self._exact.setdefault(route.path, {})
        else:
            methods = {}
            self._patterns.append((route.path.split("/"), methods))
        methods[method] = route
        if method == "GET":
            methods.setdefault("HEAD", route)

    def find(self, request: Request) -> Route:
        """Raises NotFound or NotAllowed; what the path names is noted in the request."""
        methods = self._exact.get(request.path)
        if methods is None:
            methods = self._matching(request)
        route = methods.get(request.method)
        if route is None:
            if not methods:
                raise NotFound(f"there is no {request.path[:200]}")
            raise NotAllowed(request.method, sorted(methods))
        return route

    def _matching(self, request: Request) -> dict[str, Route]:
        found: dict[str, Route] = {}
        for names, methods in self._patterns:
            params = _params(names, request.path)
            if params is not None:
                found |= methods
                if request.method in methods:
                    request.params = params
        return found


def _params(names: list[str], path: str) -> dict[str, str] | None:
    parts = path.split("/", len(names) - 1 if names[-1].endswith("*}") else -1)
    if len(names) != len(parts):
        return None
    params = {}
    for name, part in zip(names, parts, strict=True):
        if name.startswith("{"):
            params[name.strip("{*}")] = part
        elif name != part:
            return None
    return params
