"""How long a planned step lasts, from what is in it."""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.sched.plan import Plan
from pdrt.sim.cost import StepCost, chunk_pairs, decode_ms, step_s


@dataclass(frozen=True, slots=True)
class Work:
    """What is in a step."""

    prompt_tokens: int = 0
    pairs: float = 0.0
    decoding: int = 0
    context: int = 0


def work_of(plan: Plan) -> Work:
    """A step of one token counts as decoding, as it does on a device."""
    prompt = decoding = context = 0
    pairs = 0.0
    for step in plan.batch:
        count = len(step.tokens)
        if count > 1:
            prompt += count
            pairs += chunk_pairs(step.start, count)
        else:
            decoding += 1
            context += step.start + 1
    return Work(prompt, pairs, decoding + plan.steady, context + plan.context)


class StepTimes:
    """`step_s`, with what the batch costs looked up."""

    def __init__(self, cost: StepCost, max_batch_size: int) -> None:
        self._cost = cost
        self._base = step_s(cost)
        self._decode = [decode_ms(cost, n) * 1e-3 for n in range(max_batch_size + 1)]

    def of(self, work: Work) -> float:
        cost = self._cost
        prompt = work.prompt_tokens * cost.token_us * 1e-6 + work.pairs * cost.pair_ns * 1e-9
        if work.decoding >= len(self._decode):  # prompts of one token each
            decode = decode_ms(cost, work.decoding) * 1e-3
        else:
            decode = self._decode[work.decoding]
        return self._base + prompt + decode + work.context * cost.context_ns * 1e-9

    def ends(self, began: float, decoding: int, context: int, steps: int) -> list[float]:
        """When so many steps of the same sequences end, one after the other."""
        each, slope = self._base + self._decode[decoding], self._cost.context_ns * 1e-9
        found, now = list[float](), began
        for _ in range(steps):
            now += each + context * slope
            context += decoding
            found.append(now)
        return found
