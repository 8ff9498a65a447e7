"""Small machines and loads, as the simulator's tests want them."""

from __future__ import annotations

from typing import Final

from pdrt.sim.cost import Cost
from pdrt.sim.run import Outcome

CURVE: Final = ((4096.0, 0.67, 6.1, 46.0), (67108864.0, 349.6, 192.0, 1724.0))


def cost(
    *,
    kv_tokens: int = 4096,
    context_ns: float = 0.0,
    lockstep: bool = False,
    cores: int = 0,
    request: dict[str, float] | None = None,
    **instance: int | bool | str,
) -> Cost:
    return Cost.model_validate(
        {
            "name": "small",
            "about": "made up",
            "model": {"kv_bytes_per_token": 4096},
            "instance": {
                "kv_tokens": kv_tokens,
                "max_prefill_tokens": 256,
                "max_batch_size": 16,
                **instance,
            },
            "step": {
                "base_ms": 1.0,
                "token_us": 20.0,
                "pair_ns": 1.0,
                "decode_ms": ((1, 3.0), (16, 7.3)),
                "context_ns": context_ns,
            },
            "request": {"front_ms": 0.7, "handshake_ms": 0.4, "token_ms": 0.3, **(request or {})},
            "dp": {"lockstep": lockstep, "exchange_ms": 2.0 if lockstep else 0.0},
            "transfer": {"curve": CURVE},
            "machine": {"cores": cores},
        }
    )


def is_clean(outcome: Outcome) -> bool:
    """Nothing is left anywhere."""
    books = [worker.book for leader in outcome.leaders for worker in leader.workers]
    return all(
        not book.requests
        and not book.rooms
        and not book.quarantine
        and book.blocks.used == book.slots.used == 0
        and book.reserved == book.seats == 0
        and not book.line
        for book in books
    )


def seen(outcome: Outcome) -> list[float]:
    """What each client saw, one number after the other."""
    answers = sorted(outcome.tally.answers, key=lambda one: one.number)
    return [each for a in answers for each in (a.number, a.ttft_s, a.e2e_s, a.slow)]


def gaps(outcome: Outcome) -> list[tuple[float, int]]:
    """How often each gap came, to the nanosecond."""
    counted: dict[float, int] = {}
    tally = outcome.tally
    for seconds, count in zip(tally.gaps, tally.counts, strict=True):
        key = round(seconds, 9)
        counted[key] = counted.get(key, 0) + count
    return sorted(counted.items())
