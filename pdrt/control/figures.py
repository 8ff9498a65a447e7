"""What a node's workers told last, as the status document and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdrt.control.http import Json
from pdrt.messages import Loading, Problem, Rank, Ready, Stats


class Told(Protocol):
    """The part of a worker handle that is shown."""

    @property
    def rank(self) -> Rank: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def ready(self) -> Ready | None: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def stats_at(self) -> float: ...
    @property
    def loading(self) -> Loading | None: ...
    @property
    def lives(self) -> int: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def last_problem(self) -> Problem | None: ...


_GAUGES = {
    "running": "Requests in the batch",
    "blocks_used": "KV blocks in use",
    "blocks_total": "KV blocks there are",
    "blocks_quarantined": "KV blocks that a peer may still write or read",
    "host_blocks_used": "Host blocks that hold KV of retracted requests",
    "host_blocks_total": "Host blocks there are",
    "slots_used": "Metadata slots in use",
    "rooms": "Requests that the worker knows",
}

_TOTALS = ("tokens_out", "prompt_tokens_computed", "transfers", "retractions")


def worker_status(worker: Told, now: float) -> Json:
    """One worker in /internal/status."""
    stats = worker.stats
    figures = {name: getattr(stats, name) for name in _GAUGES}
    loading, ready = worker.loading, worker.ready
    return {
        "rank": str(worker.rank),
        "state": str(worker.state),
        "pid": worker.pid,
        "endpoint": ready.endpoint if ready else None,
        "lives": worker.lives,
        "heard_s_ago": round(now - worker.stats_at, 3),
        "loading": None if loading is None else [loading.stage, loading.done, loading.total],
        "last_problem": worker.last_problem.message if worker.last_problem else None,
        "peers": stats.peers,
        "transports": stats.transports,
        "queues": stats.queues,
        **figures,
    }


def worker_health(worker: Told) -> Json:
    """One worker in /health."""
    return {
        "rank": str(worker.rank),
        "name": worker.name,
        "state": str(worker.state),
        "lives": worker.lives,
        "last_problem": worker.last_problem.message if worker.last_problem else None,
    }


def load_of(workers: Sequence[Told]) -> Json:
    """The sums that the router balances by and `pdrt up` shows; its head counts for a group."""
    stats = [worker.stats for worker in workers if worker.ready and worker.rank.is_head]
    return {
        "running": sum(s.running for s in stats),
        "waiting": sum(sum(s.queues.values()) for s in stats),
        "blocks_used": sum(s.blocks_used for s in stats),
        "blocks_total": sum(s.blocks_total for s in stats),
    }


def totals_of(workers: Sequence[Told]) -> Json:
    """Counters of the instance, which only rise while its workers live, and when they were read.

    `at` is by this process's clock: rates come out right however late the answer is read.
    """
    heads = [worker.stats.counters for worker in workers if worker.rank.is_head]
    every = [worker.stats.counters for worker in workers]
    return {
        "at": max((worker.stats_at for worker in workers), default=0.0),
        **{name: sum(c.get(name, 0) for c in heads) for name in _TOTALS},
        "sent_bytes": sum(c.get("sent_bytes", 0) for c in every),  # each rank sends its part
    }


_UNSERVED = ("bootstrap_queue", "prealloc_queue", "waiting_queue")


def pressure_of(workers: Sequence[Told], max_waiting: int) -> Json:
    """What routers weigh: tokens in the KV pools, and whether every rank's queue is full."""
    heads = [worker for worker in workers if worker.ready and worker.rank.is_head]
    sizes = [worker.ready.layout.block_size for worker in heads if worker.ready]
    stats = [worker.stats for worker in heads]
    waiting = [sum(s.queues.get(name, 0) for name in _UNSERVED) for s in stats]
    return {
        "kv_tokens": sum(s.blocks_used * b for s, b in zip(stats, sizes, strict=True)),
        "pool_tokens": sum(s.blocks_total * b for s, b in zip(stats, sizes, strict=True)),
        "is_full": bool(waiting) and min(waiting) >= max_waiting,
    }


@dataclass(slots=True, eq=False)
class WorkerFigures(Collector):
    """Reads the workers' last words when Prometheus asks."""

    workers: Sequence[Told]
    names: dict[str, str] = field(default_factory=lambda: dict(_GAUGES))

    def collect(self) -> Iterable[Metric]:
        for name, text in self.names.items():
            gauge = GaugeMetricFamily(f"pdrt_{name}", text, labels=("rank",))
            for worker in self.workers:
                gauge.add_metric((str(worker.rank),), float(getattr(worker.stats, name)))
            yield gauge
        yield from self._labelled()
        alive = GaugeMetricFamily("pdrt_worker_ready", "1 while it serves", labels=("rank",))
        lives = CounterMetricFamily("pdrt_worker_lives", "Times it was started", labels=("rank",))
        for worker in self.workers:
            alive.add_metric((str(worker.rank),), float(worker.ready is not None))
            lives.add_metric((str(worker.rank),), worker.lives)
        yield alive
        yield lives

    def _labelled(self) -> Iterable[Metric]:
        depth = GaugeMetricFamily("pdrt_queue", "Requests by queue", labels=("rank", "queue"))
        events = CounterMetricFamily("pdrt_events", "What happened", labels=("rank", "event"))
        step = GaugeMetricFamily("pdrt_step_seconds", "The last step took", labels=("rank",))
        for worker in self.workers:
            rank = str(worker.rank)
            step.add_metric((rank,), worker.stats.step_ms / 1000)
            for queue, count in worker.stats.queues.items():
                depth.add_metric((rank, queue), count)
            for event, number in worker.stats.counters.items():
                events.add_metric((rank, event), number)
        yield depth
        yield events
        yield step
