"""`pdrt generate`: one prompt answered in this process, with the same scheduler and device.

No sockets, no tasks: the steps of a worker in a plain loop. What it prints is what a hybrid
instance would answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from pdrt.config import NodeConfig
from pdrt.control.order import Chat
from pdrt.control.text import Text, open_text
from pdrt.device.backends import Progress, open_runner
from pdrt.device.batch import Runner
from pdrt.errors import BadRequest, PdrtError, TooLong
from pdrt.messages import Output, Sampling, Submit, pack_ids
from pdrt.modelspec import ModelSpec
from pdrt.sched.base import Scheduler
from pdrt.sched.effects import Say
from pdrt.sched.limits import Limits

_ROOM: Final = 1
_TIME_S: Final = 86400.0


@dataclass(slots=True)
class Answered:
    """What is known of the answer so far."""

    tokens: int = 0
    finish: str = ""
    first_s: float = 0.0


def answer(ids: list[int], runner: Runner, limits: Limits, sampling: Sampling) -> Iterator[Output]:
    """The outputs of one request, step by step. Raises PdrtError when it cannot be served."""
    size = limits.block_size
    blocks = -(-(len(ids) + sampling.max_tokens) // size)
    pool = bytearray(blocks * runner.layout.block_bytes)
    runner.bind(memoryview(pool), blocks)
    scheduler = Scheduler(limits, blocks, runner.eos_token_ids)
    scheduler.submit(
        Submit(
            room=_ROOM,
            attempt=0,
            request_id="offline",
            tokens=pack_ids(ids),
            prompt_tokens=len(ids),
            sampling=sampling,
            time_left=_TIME_S,
        ),
        time.monotonic(),
    )
    while not scheduler.is_idle or scheduler.outbox:
        while scheduler.outbox:
            effect = scheduler.outbox.popleft()
            if isinstance(effect, Say):
                yield effect.output
        plan = scheduler.plan(time.monotonic())
        if plan.batch:
            scheduler.commit(plan, runner.execute(plan.batch), time.monotonic())


def generate(
    prompt: str, config: NodeConfig, sampling: Sampling, console: Console, *, is_chat: bool
) -> int:
    """Print the answer as it comes; the exit status. Raises PdrtError."""
    spec = ModelSpec.of(config.model)
    text = open_text(config.model.path)
    ids = _ids(prompt, text, is_chat=is_chat)
    if len(ids) + sampling.max_tokens > spec.max_model_len:
        raise TooLong(
            f"{len(ids)} prompt tokens and --max-tokens {sampling.max_tokens} are more than the"
            f" {spec.max_model_len} that the model can hold"
        )
    runner = _load(config, Console(stderr=True))
    told, began, pieces = Answered(), time.perf_counter(), text.pieces()
    for output in answer(ids, runner, _limits(config), sampling):
        if output.problem is not None:
            raise PdrtError(output.problem.message)
        told.first_s = told.first_s or time.perf_counter() - began
        told.tokens += len(output.tokens)
        told.finish = output.finish or ""
        said = output.tokens[:-1] if output.finish == "stop" else output.tokens
        _write(console, "".join(map(pieces.push, said)))
    _write(console, pieces.flush() + "\n")
    if console.is_terminal:
        console.print(_summary(told, time.perf_counter() - began), style="dim")
    return 0


def _ids(prompt: str, text: Text, *, is_chat: bool) -> list[int]:
    ids = (
        text.encode_chat(Chat(({"role": "user", "content": prompt},), {}))
        if is_chat
        else text.encode(prompt)
    )
    if not ids:
        raise BadRequest("the prompt is empty")
    return ids


def _load(config: NodeConfig, console: Console) -> Runner:
    """The model, ready; how far it is shows on a terminal, and never among the answer."""
    if not console.is_terminal:
        return open_runner(config, _silent)
    with console.status("loading the model") as status:

        def progress(stage: str, done: int, total: int) -> None:
            status.update(f"{stage} {done}/{total}" if total else stage)

        shown: Progress = progress
        return open_runner(config, shown)


def _silent(_stage: str, _done: int, _total: int) -> None:
    return


def _limits(config: NodeConfig) -> Limits:
    sizes = config.scheduler
    return Limits(
        block_size=sizes.block_size,
        max_batch_size=1,
        max_prefill_tokens=sizes.max_prefill_tokens,
        reserved_tokens=1,
    )


def _write(console: Console, text: str) -> None:
    console.file.write(text)
    console.file.flush()


def _summary(told: Answered, seconds: float) -> str:
    after_first = max(seconds - told.first_s, 1e-9)
    rate = f", {(told.tokens - 1) / after_first:.0f} tokens/s" if told.tokens > 1 else ""
    return f"{told.tokens} tokens, first after {told.first_s * 1000:.0f} ms{rate}, {told.finish}"
