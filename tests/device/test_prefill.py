"""Chunks of prompts through the compiled loops: what torch says, however they are cut and mixed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrt.device.batch import SeqStep
from pdrt.device.kv import DTYPES, KvPool
from pdrt.device.models import looped
from pdrt.device.models.looped import MOST_ROWS, Looped
from pdrt.device.models.waves import PanelWave, TableWave
from pdrt.device.torchrunner import TorchRunner
from pdrt.modelspec import Kernels, Quantize
from tests.device import tiny
from tests.device.loop import Loop, Sequence_
from tests.device.tiny import Tiny

pytest.importorskip("numba", reason="pdrt[cpu] is not installed")
from pdrt.device.jit import lines, tiles
from pdrt.device.jit.loops import Loops

LENGTHS = (100, 37, 2, 65, 1, 33, 16, 150)
CHUNKS = (33, 64, 17, 1, 64, 150)  # a step each: single tokens and chunks of all sizes


def _told(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], torch.Tensor]:
    """Logits of steps that mix prompts' chunks and decode steps, and the written KV after them.

    What follows a prompt is the same for everyone, whatever it draws.
    """
    logits, plain = list[Any](), runner.model.logits

    def noted(*args: Any) -> Any:
        logits.append(plain(*args))
        return logits[-1]

    with monkeypatch.context() as patched:
        patched.setattr(runner.model, "logits", noted)
        loop = Loop(runner, blocks=256)
        sequences = [loop.sequence(tiny.prompt(n), 8) for n in LENGTHS]
        for chunk in CHUNKS:
            loop.step([s for s in sequences if s.computed < len(s.history)], chunk)
            for each in sequences:
                each.history[len(each.prompt) :] = [7] * len(each.output)
    memory = torch.frombuffer(loop.memory, dtype=DTYPES[runner.layout.dtype])
    kept = memory.view(256, -1)[sorted(block for s in sequences for block in _full(s, runner))]
    return logits, kept.float()


def _full(sequence: Sequence_, runner: TorchRunner) -> list[int]:
    return sequence.blocks[: sequence.computed // runner.layout.block_size]


@pytest.mark.parametrize("name", ["llama_mha_biased", "llama_wide_heads", "qwen2", "qwen3"])
def test_mixed_steps_have_the_logits_and_leave_the_kv_that_torch_has(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory, _ = tiny_model(name)
    ours, kv = _told(tiny.runner(directory, kernels="compiled"), monkeypatch)
    torchs, their_kv = _told(tiny.runner(directory, kernels="torch"), monkeypatch)
    for found, wanted in zip(ours, torchs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv, their_kv, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama_wide_heads", "qwen2"])
def test_matrices_in_int8_are_those_that_torch_widens(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory, _ = tiny_model(name)

    def told(kernels: Kernels) -> list[torch.Tensor]:
        runner = tiny.runner(directory, kernels=kernels, quantize="int8")
        logits, kv = _told(runner, monkeypatch)
        return [*logits, kv]

    for found, wanted in zip(told("compiled"), told("torch"), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not tiles.are_usable(), reason="this processor has no AMX")
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_bfloat16_is_as_near_to_float32_as_torchs(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, quantize: Quantize
) -> None:
    directory, _ = tiny_model("llama_wide_heads")

    def told(dtype: str, kernels: Kernels) -> list[torch.Tensor]:
        runner = tiny.runner(directory, dtype, kernels=kernels, quantize=quantize)
        logits, kv = _told(runner, monkeypatch)
        return [*logits, kv]

    exact, ours = told("float32", "torch"), told("bfloat16", "compiled")
    for right, found, other in zip(exact, ours, told("bfloat16", "torch"), strict=True):
        assert (found - right).abs().mean() <= 1.1 * (other - right).abs().mean()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_agree_to_the_last_bit(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    found = []
    before = torch.get_num_threads()
    try:
        for count in (2, threads):
            torch.set_num_threads(count)
            runner = tiny.runner(tiny_model("llama")[0], kernels="compiled")
            found.append(_told(runner, monkeypatch))
    finally:
        torch.set_num_threads(before)
    (logits, kv), (others, their_kv) = found
    assert all(torch.equal(a, b) for a, b in zip(logits, others, strict=True))
    assert torch.equal(kv, their_kv)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_each_batch_is_laid_out_for_the_loops(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, quantize: Quantize
) -> None:
    waves = list[Any]()
    lay_out = Looped.lay_out

    def noted(self: Looped, batch: list[SeqStep], pool: Any) -> Any:
        wave = lay_out(self, batch, pool)
        waves.append(type(wave))
        return wave

    loop = Loop(tiny.runner(tiny_model("llama")[0], quantize=quantize), blocks=256)
    monkeypatch.setattr(Looped, "lay_out", noted)
    few = [loop.sequence(tiny.prompt(3), 8) for _ in range(2)]
    loop.run(few, 3)  # a prompt, and two steps
    assert waves == [PanelWave, TableWave, TableWave]
    many = [loop.sequence(tiny.prompt(3), 8) for _ in range(MOST_ROWS + 1)]
    loop.run(many, 2)
    assert waves[3:] == [PanelWave, PanelWave], "more than the decode loops take"


def test_torchs_threads_come_for_large_steps_and_for_torchs_own(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for torch's next call keeps a core busy that the crew needs."""
    seen, before = list[int](), torch.get_num_threads()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            found = call(*args)
            seen.append(torch.get_num_threads())
            return found

        return called

    def threads() -> list[int]:
        """For a prompt and for a single token, when they are laid out and when they are drawn."""
        torch.set_num_threads(3)
        runner = tiny.runner(tiny_model("llama")[0], kernels="compiled")
        loop = Loop(runner)
        seen.clear()
        loop.run([loop.sequence(tiny.prompt(3), 8)], 2)
        assert torch.get_num_threads() == 3, "as before the steps"
        return seen

    for name in ("lay_out", "judge"):
        monkeypatch.setattr(Looped, name, noted(getattr(Looped, name)))
    prepared, clear = list[int](), KvPool.clear

    def cleared(self: KvPool, blocks: list[int]) -> None:
        prepared.append(torch.get_num_threads())
        clear(self, blocks)

    monkeypatch.setattr(KvPool, "clear", cleared)
    try:
        assert threads() == [1] * 4, "laid out and drawn, a prompt and then a token"
        with monkeypatch.context() as patched:
            patched.setattr(Loops, "has_prefill", lambda _self, _head_dim: False)
            assert threads() == [3, 1, 1, 1], "torch computes the prompt"
        monkeypatch.setattr(looped, "LARGE", 1)
        assert threads() == [3] * 4
        assert prepared
        assert set(prepared) == {1}, "a block that a step begins is small"
    finally:
        torch.set_num_threads(before)


def test_powers_of_two_are_right_and_end_in_nothing_and_the_infinite() -> None:
    """As softmax shares: the largest score has 1."""
    scores = torch.linspace(-140, 0, 2048).view(128, 16).contiguous()
    wanted = torch.exp2((scores - scores.max(0).values).double())
    state = torch.zeros(3, 16)
    state[0] = -torch.inf
    _softmax(scores, state)
    torch.testing.assert_close(scores.double(), wanted, atol=2e-38, rtol=3e-7)
    torch.testing.assert_close(state[1].double(), wanted.sum(0), atol=0, rtol=1e-6)
    assert (state[2] == 0).all()


def _softmax(scores: torch.Tensor, state: torch.Tensor) -> None:
    import numba
    import numpy as np

    @numba.njit  # type: ignore[untyped-decorator]
    def call(place: int, count: int, kept: int) -> None:
        lines.softmax(np.float32(0), place, count, kept, place)

    call(scores.data_ptr(), len(scores), state.data_ptr())


@pytest.mark.parametrize("features", [["avx2"], []], ids=["8 lanes", "4 lanes"])
def test_hidden_keys_have_no_share_with_short_vectors_either(
    tmp_path: Path, features: list[str]
) -> None:
    """Only the longest have an instruction that makes 0 of 2 to the power of minus infinity."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.narrow", *features],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},  # which does not know the features
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
