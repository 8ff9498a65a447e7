"""What workers told last, as operators, the router and Prometheus see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest

from pdrt.control.figures import WorkerFigures, load_of, totals_of, worker_health, worker_status
from pdrt.messages import Loading, Problem, Rank, Ready, Stats
from tests.control.leader_rig import READY


@dataclass(slots=True)
class Worker:
    rank: Rank
    state: str = "ready"
    ready: Ready | None = READY
    stats: Stats = field(default_factory=Stats)
    stats_at: float = 100.0
    loading: Loading | None = None
    lives: int = 1
    pid: int | None = 42
    last_problem: Problem | None = None

    @property
    def name(self) -> str:
        return f"worker {self.rank}"


BUSY = Stats(
    running=3,
    queues={"waiting_queue": 2, "inflight_queue": 1},
    blocks_used=5,
    blocks_total=9,
    host_blocks_used=2,
    host_blocks_total=4,
    blocks_quarantined=1,
    slots_used=2,
    rooms=6,
    peers={"127.0.0.2:5000": "alive"},
    counters={"tokens_out": 70, "retractions": 1, "sent_bytes": 4096},
    step_ms=12.5,
    transports={"127.0.0.2:5000": "tcp, 2.4 GB/s"},
)
DEAD = Problem(code="peer_lost", message="worker 1,0,0 ended with exit status -9")


def test_the_status_of_a_worker_tells_all_that_it_told() -> None:
    assert worker_status(Worker(Rank(dp=1), stats=BUSY), now=100.25) == {
        "rank": "1,0,0",
        "state": "ready",
        "pid": 42,
        "endpoint": READY.endpoint,
        "lives": 1,
        "heard_s_ago": 0.25,
        "loading": None,
        "last_problem": None,
        "peers": {"127.0.0.2:5000": "alive"},
        "transports": {"127.0.0.2:5000": "tcp, 2.4 GB/s"},
        "queues": {"waiting_queue": 2, "inflight_queue": 1},
        "running": 3,
        "blocks_used": 5,
        "blocks_total": 9,
        "host_blocks_used": 2,
        "host_blocks_total": 4,
        "blocks_quarantined": 1,
        "slots_used": 2,
        "rooms": 6,
    }


def test_a_death_is_visible_with_its_reason_while_the_next_life_loads() -> None:
    loading = Loading(stage="weights", done=1, total=4)
    worker = Worker(
        Rank(dp=1), "loading", None, loading=loading, lives=2, pid=None, last_problem=DEAD
    )
    status = worker_status(worker, now=100.0)
    assert (status["loading"], status["last_problem"]) == (["weights", 1, 4], DEAD.message)
    assert worker_health(worker) == {
        "rank": "1,0,0",
        "name": "worker 1,0,0",
        "state": "loading",
        "lives": 2,
        "last_problem": DEAD.message,
    }


def test_tp_0_counts_for_its_group() -> None:
    group = [Worker(Rank(), stats=BUSY), Worker(Rank(tp=1), stats=BUSY)]
    assert load_of(group) == load_of(group[:1])


def test_the_load_is_the_sum_over_those_that_serve() -> None:
    workers = [Worker(Rank(), stats=BUSY), Worker(Rank(dp=1), stats=BUSY), Worker(Rank(dp=2))]
    workers[1].ready = None
    assert load_of(workers) == {"running": 3, "waiting": 3, "blocks_used": 5, "blocks_total": 9}
    assert load_of([]) == {"running": 0, "waiting": 0, "blocks_used": 0, "blocks_total": 0}


def test_totals_count_requests_once_and_what_every_rank_sends() -> None:
    group = [Worker(Rank(), stats=BUSY), Worker(Rank(tp=1), stats=BUSY, stats_at=100.5)]
    assert totals_of(group) == {
        "at": 100.5,
        "tokens_out": 70,
        "prompt_tokens_computed": 0,
        "transfers": 0,
        "retractions": 1,
        "sent_bytes": 8192,
    }
    assert totals_of([])["at"] == 0


def test_prometheus_gets_every_figure_by_rank() -> None:
    workers = [Worker(Rank(), stats=BUSY), Worker(Rank(dp=1), ready=None, lives=4)]
    registry = CollectorRegistry()
    registry.register(WorkerFigures(workers))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'pdrt_running{rank="0,0,0"} 3.0',
        'pdrt_running{rank="1,0,0"} 0.0',
        'pdrt_blocks_quarantined{rank="0,0,0"} 1.0',
        'pdrt_queue{queue="waiting_queue",rank="0,0,0"} 2.0',
        'pdrt_events_total{event="retractions",rank="0,0,0"} 1.0',
        'pdrt_step_seconds{rank="0,0,0"} 0.0125',
        'pdrt_worker_ready{rank="0,0,0"} 1.0',
        'pdrt_worker_ready{rank="1,0,0"} 0.0',
        'pdrt_worker_lives_total{rank="1,0,0"} 4.0',
    ):
        assert line in lines, line
