"""What one null device answers by itself: the measure of each answer that came from a cluster."""

from __future__ import annotations

from typing import Any

from pdrt.control.order import parse
from pdrt.device.batch import Draw, SeqStep
from pdrt.device.null import NullRunner

_BLOCK, _BLOCKS = 16, 128


class Colocated:
    """One sequence at a time, in blocks of its own; no scheduler, no transfer, no cluster."""

    def __init__(self) -> None:
        self._runner = NullRunner(_BLOCK)
        self._runner.bind(memoryview(bytearray(_BLOCKS * self._runner.layout.block_bytes)), _BLOCKS)

    def answer(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        order = parse("generate", {"prompt": prompt, "sampling_params": sampling})
        wanted = order.settle(len(prompt), _BLOCK * _BLOCKS, 0)
        history, said = list(prompt), 0
        while said < wanted.max_tokens:
            start = 0 if not said else len(history) - 1
            draw = Draw(wanted, tuple(history), len(prompt))
            step = SeqStep(0, history[start:], start, range(_BLOCKS), draw)
            (drawn,) = self._runner.execute([step])
            history.append(drawn.token)
            said += 1
            if drawn.token in self._runner.eos_token_ids and not wanted.ignore_eos:
                break
        return history[len(prompt) :]
