"""Whole loads through a scheduler with a device that costs nothing but modelled time.

A step takes one unit, and another for each 256 prompt tokens: about what a CPU or GPU shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from pdrt.device.batch import Drawn
from pdrt.messages import Sampling, Submit, pack_ids
from pdrt.sched.base import Scheduler
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan

EOS: Final = 0
MAX_TOKENS: Final = 1024  # what clients allow, whatever they use of it
_TOKENS_A_UNIT: Final = 256
Lengths = tuple[int, int]  # of a prompt and its answer


def workload(name: str, count: int) -> list[Lengths]:
    rng = Random(count)
    prompts = [rng.randint(20, 200) for _ in range(count)]
    match name:
        case "short":
            return [(prompt, rng.randint(5, 40)) for prompt in prompts]
        case "long":
            return [(prompt, rng.randint(300, 900)) for prompt in prompts]
        case "bimodal":
            return [(prompt, rng.choice((10, 10, 10, 800))) for prompt in prompts]
        case "drifting":
            return [(prompt, 5 + 800 * i // count) for i, prompt in enumerate(prompts)]
        case "in step":
            return [(100, 400)] * count
        case _:
            return [(1200, 200)] * count


@dataclass(frozen=True, slots=True)
class Result:
    steps: int
    units: float
    retractions: int
    reserved_tokens: int  # R at the end


def simulate(load: Sequence[Lengths], blocks: int, reserved: int, *, adaptive: bool) -> Result:
    """All at once; the answers end when they have said what they wanted to."""
    limits = Limits(
        reserved_tokens=reserved,
        adaptive_reserve=adaptive,
        max_waiting=len(load),
        prefix_cache=False,
    )
    sched = Scheduler(limits, blocks, {EOS})
    for room, (prompt, _) in enumerate(load):
        sched.submit(_submit(room, prompt), 0.0)
    steps, units = 0, 0.0
    while not sched.is_idle:
        plan = sched.plan(0.0)
        assert plan.batch, "a step without progress"
        sched.commit(plan, _drawn(sched, plan, load), 0.0)
        sched.outbox.clear()
        steps += 1
        units += 1 + plan.prompt_tokens / _TOKENS_A_UNIT
    book = sched.book
    return Result(steps, units, book.counters["retractions"], book.limits.reserved_tokens)


def _submit(room: int, prompt: int) -> Submit:
    return Submit(
        room=room,
        attempt=0,
        request_id="",
        tokens=pack_ids([1] * prompt),
        prompt_tokens=prompt,
        sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0),
        time_left=1000.0,
    )


def _drawn(sched: Scheduler, plan: Plan, load: Sequence[Lengths]) -> list[Drawn]:
    drawn = []
    for step in plan.batch:
        if step.draw is not None:
            length = step.start + len(step.tokens) + 1
            is_last = length >= sum(load[sched.book.requests[step.key].room])
            drawn.append(Drawn(step.key, EOS if is_last else 7, -0.5))
    return drawn
