"""The lives of a node and of each of its workers, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdrt.machine import Edge, Table


class NodeState(StrEnum):
    STARTING = "starting"  # sockets are being bound
    LOADING = "loading"  # workers load the model
    REGISTERING = "registering"  # prefill: ranks make themselves known
    READY = "ready"  # takes work
    DRAINING = "draining"  # finishes what it has
    STOPPED = "stopped"
    FAILED = "failed"  # exits non-zero and says why


class Bound: ...


class AllLoaded: ...


class AllRegistered: ...


class WorkerGone: ...


class DrainAsked: ...


class Drained: ...


@dataclass(frozen=True, slots=True)
class GaveUp:
    reason: str


NODE_EVENTS = (Bound, AllLoaded, AllRegistered, WorkerGone, DrainAsked, Drained, GaveUp)
_OVER = "the node is over"
_N = NodeState

NODE: Table[NodeState, object, object] = Table(
    "node",
    edges={
        (_N.STARTING, Bound): Edge(_N.LOADING),
        (_N.LOADING, AllLoaded): Edge(_N.REGISTERING),
        (_N.REGISTERING, AllRegistered): Edge(_N.READY),
        (_N.REGISTERING, WorkerGone): Edge(_N.LOADING),
        (_N.READY, WorkerGone): Edge(_N.LOADING),
        (_N.STARTING, DrainAsked): Edge(_N.DRAINING),
        (_N.LOADING, DrainAsked): Edge(_N.DRAINING),
        (_N.REGISTERING, DrainAsked): Edge(_N.DRAINING),
        (_N.READY, DrainAsked): Edge(_N.DRAINING),
        (_N.DRAINING, Drained): Edge(_N.STOPPED),
        (_N.STARTING, GaveUp): Edge(_N.FAILED),
        (_N.LOADING, GaveUp): Edge(_N.FAILED),
        (_N.REGISTERING, GaveUp): Edge(_N.FAILED),
        (_N.READY, GaveUp): Edge(_N.FAILED),
        (_N.DRAINING, GaveUp): Edge(_N.FAILED),
    },
    ignored={
        (_N.STARTING, WorkerGone): "nothing was promised yet",
        (_N.LOADING, WorkerGone): "it is being started again",
        (_N.DRAINING, WorkerGone): "its requests were failed; nothing new comes",
        (_N.DRAINING, DrainAsked): "said twice",
        (_N.DRAINING, AllLoaded): "too late to serve",
        (_N.DRAINING, AllRegistered): "too late to serve",
        (_N.REGISTERING, AllLoaded): "a worker came back before its loss was told",
        (_N.READY, AllLoaded): "a worker came back before its loss was told",
        (_N.READY, AllRegistered): "a lease was renewed",
        (_N.LOADING, AllRegistered): "the others are registered; one is missing",
        **{(s, e): _OVER for s in (_N.STOPPED, _N.FAILED) for e in NODE_EVENTS},
    },
)


class WorkerState(StrEnum):
    SPAWNING = "spawning"
    LOADING = "loading"
    READY = "ready"
    WAITING = "waiting"  # died; started again after a pause
    STOPPED = "stopped"
    FAILED = "failed"  # died too often


class Spawned: ...


class SaidReady: ...


class Exited: ...


class PauseOver: ...


class TooOften: ...


class StopAsked: ...


WORKER_EVENTS = (Spawned, SaidReady, Exited, PauseOver, TooOften, StopAsked)
_W = WorkerState

WORKER: Table[WorkerState, object, object] = Table(
    "worker",
    edges={
        (_W.SPAWNING, Spawned): Edge(_W.LOADING),
        (_W.SPAWNING, Exited): Edge(_W.WAITING),
        (_W.LOADING, SaidReady): Edge(_W.READY),
        (_W.LOADING, Exited): Edge(_W.WAITING),
        (_W.READY, Exited): Edge(_W.WAITING),
        (_W.WAITING, PauseOver): Edge(_W.SPAWNING),
        (_W.WAITING, TooOften): Edge(_W.FAILED),
        (_W.SPAWNING, StopAsked): Edge(_W.STOPPED),
        (_W.LOADING, StopAsked): Edge(_W.STOPPED),
        (_W.READY, StopAsked): Edge(_W.STOPPED),
        (_W.WAITING, StopAsked): Edge(_W.STOPPED),
    },
    ignored={
        (_W.SPAWNING, SaidReady): "said by a life that is over",
        (_W.READY, SaidReady): "said twice",
        (_W.WAITING, SaidReady): "read from its socket after its death",
        **{(s, e): "the worker is over" for s in (_W.STOPPED, _W.FAILED) for e in WORKER_EVENTS},
    },
)
