"""The compiled loops say what torch says, whatever shape they are given and on any threads."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdrt.config import NodeConfig
from pdrt.device.backends import open_runner
from pdrt.device.kv import DTYPES
from pdrt.device.torchrunner import TorchRunner
from pdrt.errors import ConfigError
from tests.device import tiny
from tests.device.loop import Loop
from tests.device.tiny import Tiny

pytest.importorskip("numba", reason="pdrt[cpu] is not installed")
import numba

from pdrt.device.jit import products, tiles
from pdrt.device.jit.crew import Crew, Job
from pdrt.device.jit.loops import Loops
from pdrt.device.jit.products import Scratch

Bytes = npt.NDArray[np.uint8]
ROWS = [1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64]
SHAPES = [(1, 32), (15, 64), (48, 32), (97, 96), (320, 64)]  # out, in


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def _pair(dtype: torch.dtype, rows: int, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rows + out)
    x = torch.randn(rows, width, generator=random).to(dtype)
    return x, torch.randn(out, width, generator=random).to(dtype)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_is_what_torch_finds(dtype: torch.dtype, threads: int) -> None:
    compiled = Loops(dtype, Crew(threads))
    for out, width in SHAPES:
        for rows in ROWS:
            x, w = _pair(dtype, rows, out, width)
            torch.testing.assert_close(
                compiled.linear(x, w), x.float() @ w.float().t(), atol=1e-4, rtol=1e-4
            )


def test_a_row_is_computed_alike_alone_and_among_others(dtype: torch.dtype) -> None:
    """What a request is told does not depend on who else is served."""
    compiled = Loops(dtype, Crew(2))
    x, w = _pair(dtype, 33, 97, 96)
    together = compiled.linear(x, w)
    for row in range(len(x)):
        assert torch.equal(compiled.linear(x[row : row + 1], w)[0], together[row])


def _in_int8(out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(out)
    w = torch.randint(-127, 128, (out, width), generator=random, dtype=torch.int8)
    return w, torch.rand(out, generator=random)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_with_int8_is_what_torch_finds_with_what_it_stands_for(
    dtype: torch.dtype, threads: int
) -> None:
    compiled = Loops(dtype, Crew(threads), quantized=True)
    for out, width in SHAPES:
        w, scale = _in_int8(out, width)
        for rows in ROWS:
            x, _ = _pair(dtype, rows, out, width)
            wanted = x.float() @ (w * scale[:, None]).t()
            torch.testing.assert_close(compiled.linear(x, w, scale), wanted, atol=2e-3, rtol=1e-4)


def test_a_row_times_int8_is_computed_alike_alone_and_among_others(dtype: torch.dtype) -> None:
    compiled = Loops(dtype, Crew(2), quantized=True)
    x, _ = _pair(dtype, 33, 97, 96)
    together = compiled.linear(x, *_in_int8(97, 96))
    for row in range(len(x)):
        assert torch.equal(compiled.linear(x[row : row + 1], *_in_int8(97, 96))[0], together[row])


with_amx = pytest.mark.skipif(not tiles.are_usable(), reason="this processor has no AMX")


@with_amx
def test_tiles_and_vectors_agree_on_numbers_that_are_bfloat16() -> None:
    plain = Loops(torch.bfloat16, Crew(1), tiled=False)
    x, w = _pair(torch.bfloat16, 17, 97, 96)
    found = Loops(torch.bfloat16, Crew(1)).linear(x, w)
    torch.testing.assert_close(found, plain.linear(x, w), atol=1e-4, rtol=1e-4)


def test_torchs_own_products_are_right_after_tiles_were_borrowed() -> None:
    """oneDNN configures a thread's tiles once, and would not see that they were changed."""
    x, w = _pair(torch.bfloat16, 64, 128, 64)
    before = torch.nn.functional.linear(x, w)
    Loops(torch.bfloat16, Crew(1)).linear(x, w)
    assert torch.equal(torch.nn.functional.linear(x, w), before)


def test_the_exponential_is_right_and_has_no_end() -> None:
    numbers = np.concatenate([np.linspace(-90, 90, 4001), [-np.inf, np.inf, -1e30, 1e30]])
    for number in numbers.astype(np.float32):
        found, bounded = products.exp(number), np.clip(number, -87, 88)
        assert found == pytest.approx(np.exp(np.float64(bounded)), rel=4e-7)


def test_each_thread_of_a_crew_does_its_part() -> None:
    crew, seen, lock = Crew(4), list[int](), threading.Lock()
    all_here = threading.Barrier(4)

    def job(me: int) -> None:
        with lock:
            seen.append(me)
        all_here.wait(timeout=10)

    for _ in range(20):
        crew.run(job)
    assert sorted(seen[:4]) == [0, 1, 2, 3]


def test_what_a_thread_of_a_crew_met_is_raised_with_the_next_job() -> None:
    crew, failed = Crew(2), threading.Event()

    def fails(me: int) -> None:
        if me:
            failed.set()
            raise MemoryError("no room")

    crew.run(fails)
    assert failed.wait(timeout=10)
    with pytest.raises(MemoryError):
        _run_on(crew)
    crew.run(lambda _me: None)


def _run_on(crew: Crew) -> None:
    """Until what failed is told, which takes the other thread a moment."""
    while True:
        crew.run(lambda _me: None)


class Late(Crew):
    """The other threads have no core until somebody lets them run."""

    def __init__(self, size: int) -> None:
        super().__init__(1)
        self.size, self._missed = size, list[Job]()

    def run(self, job: Job) -> None:
        self._missed.append(job)
        super().run(job)

    def let_run(self) -> None:
        for me in range(1, self.size):
            for job in self._missed:
                job(me)


def test_a_thread_that_has_no_core_holds_nobody_up_and_harms_nobody_when_it_comes(
    dtype: torch.dtype,
) -> None:
    crew = Late(3)
    compiled = Loops(dtype, crew)
    x, w = _pair(dtype, 17, 97, 96)
    wanted = Loops(dtype, Crew(1)).linear(x, w)
    first, second = compiled.linear(x, w), compiled.linear(x[:5], w)
    kept = first.clone()
    crew.let_run()
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted[:5])
    assert torch.equal(first, kept)


class Seen(Loops):
    """What each call works in is seen."""

    def __init__(self, dtype: torch.dtype, crew: Crew) -> None:
        super().__init__(dtype, crew)
        self.scratches = list[Scratch]()

    def _scratch(self, phases: int, rows: int, width: int) -> Scratch:
        self.scratches.append(super()._scratch(phases, rows, width))
        return self.scratches[-1]


def test_a_thread_that_comes_when_a_call_is_over_writes_nothing(dtype: torch.dtype) -> None:
    crew = Late(2)
    compiled = Seen(dtype, crew)
    compiled.linear(*_pair(dtype, 17, 97, 96))
    [scratch] = compiled.scratches
    for memory in (scratch.packed, scratch.portion, scratch.room):
        memory.fill(7)  # what the next call has there
    all_but_the_door = scratch._replace(sync=scratch.sync[1:])._asdict()
    before = {name: memory.copy() for name, memory in all_but_the_door.items()}
    crew.let_run()
    changed = {name for name, memory in all_but_the_door.items() if (memory != before[name]).any()}
    assert changed == set()


class Behind(Late):
    """Something has happened when the caller's own thread begins."""

    def __init__(self, size: int, before: Callable[[], object]) -> None:
        super().__init__(size)
        self._before = before

    def run(self, job: Job) -> None:
        self._before()
        super().run(job)


def test_a_call_is_not_over_before_the_last_portion_is_given_whoever_has_it() -> None:
    x, w = _pair(torch.float32, 5, 97, 96)
    portions, taken, order = products.portions_of(len(w)), list[int](), list[str]()
    begun, back = threading.Event(), threading.Event()

    def take_one() -> None:
        taken.append(products.take(compiled.scratches[-1], 0, 1, portions))
        begun.set()

    def call() -> None:
        compiled.linear(x, w)
        order.append("back")
        back.set()

    compiled = Seen(torch.float32, Behind(2, take_one))
    threading.Thread(target=call, daemon=True).start()
    assert begun.wait(timeout=25), "compiled"
    try:
        while not products.is_over(compiled.scratches[-1], 0, portions - 1):
            back.wait(timeout=0.001)  # compiled code sets no event
        back.wait(timeout=0.2)  # it does not come
        order.append("given")
    finally:
        products.give(compiled.scratches[-1], 0)
    assert back.wait(timeout=10)
    assert order == ["given", "back"]
    assert taken[0] < portions


# In a model.


_load_tiles = numba.njit(lambda address: tiles.load_tiles(address))
_save_tiles = numba.njit(lambda address: tiles.save_tiles(address))


def _saved() -> Bytes:
    found = np.zeros(64, np.uint8)
    _save_tiles(found.ctypes.data)
    return found


@with_amx
def test_a_thread_has_its_tiles_after_a_call_as_they_were_before_it(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a configuration that is not ours: oneDNN's may be the same, and hide a mistake."""
    theirs, after = np.zeros(64, np.uint8), dict[str, Bytes]()
    theirs[0], theirs[16:32:2], theirs[48:56] = 1, 64, 8  # palette, bytes of a row, rows

    def watched(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object) -> object:
            torchs = _saved()
            _load_tiles(theirs.ctypes.data)
            result = call(*args)
            after[name] = _saved()
            _load_tiles(torchs.ctypes.data)
            return result

        return called

    calls: dict[str, Callable[..., object]] = {
        "decode": Loops.decode,
        "linear": Loops.linear,
        "prefill": Loops.prefill,
    }
    for name, call in calls.items():
        monkeypatch.setattr(Loops, name, watched(name, call))
    directory, _ = tiny_model("llama_wide_heads")
    _decoded(tiny.runner(directory, "bfloat16", kernels="compiled"))
    assert after.keys() == calls.keys()
    for found in after.values():
        np.testing.assert_array_equal(found, theirs)


def _decoded(runner: TorchRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a step of sequences of several lengths, and the pool's numbers after it."""
    loop = Loop(runner)
    logits = tiny.decode_logits(loop, (1, 15, 16, 40))
    return logits, torch.frombuffer(loop.memory, dtype=DTYPES[runner.layout.dtype]).float()


BIASED_AND_NORMED = ["llama_mha_biased", "qwen2", "qwen3", "llama3_rope"]


@pytest.mark.parametrize("name", BIASED_AND_NORMED)
def test_a_step_has_the_logits_and_leaves_the_kv_that_torch_has(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    directory, _ = tiny_model(name)
    ours = _decoded(tiny.runner(directory, kernels="compiled"))
    torchs = _decoded(tiny.runner(directory, kernels="torch"))
    for found, wanted in zip(ours, torchs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BIASED_AND_NORMED)
def test_bfloat16_is_as_near_to_float32_as_torchs(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    directory, _ = tiny_model(name)
    exact = _decoded(tiny.runner(directory, kernels="torch"))
    ours = _decoded(tiny.runner(directory, "bfloat16", kernels="compiled"))
    torchs = _decoded(tiny.runner(directory, "bfloat16", kernels="torch"))
    for right, found, other in zip(exact, ours, torchs, strict=True):
        assert (found - right).abs().mean() <= 1.1 * (other - right).abs().mean()


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "narrow"])
def test_what_cannot_be_compiled_is_said_when_it_was_asked_for(
    tmp_path: Path, tiny_model: Callable[[str], Tiny], name: str
) -> None:
    if name == "narrow":
        shape = tiny.SHAPE | {"head_dim": 10}
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    directory = tmp_path if name == "narrow" else tiny_model(name)[0]
    with pytest.raises(ConfigError, match="kernels = 'compiled'"):
        tiny.runner(directory, kernels="compiled")
    tiny.runner(directory)  # auto: on torch


def test_context_parallel_ranks_are_not_compiled(tiny_model: Callable[[str], Tiny]) -> None:
    model = {"path": str(tiny_model("llama")[0])}
    parallel = {"world_size": 2, "cp": 2, "devices_per_node": 2}
    tables = {"model": model, "parallel": parallel, "device": {"kernels": "compiled"}}
    config = NodeConfig.model_validate(tables)
    with pytest.raises(ConfigError, match="context-parallel"):
        open_runner(config, lambda _stage, _done, _total: None, 0, 2)


def test_without_numba_torch_computes_and_who_asks_for_more_hears_what_to_install(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, oracle = tiny_model("llama")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    prompt = tiny.prompt(9)
    assert Loop(tiny.runner(directory)).answer(prompt, 4) == tiny.answer(oracle, prompt, 4)
    with pytest.raises(ConfigError, match="numba is not installed"):
        tiny.runner(directory, kernels="compiled")


# Loops that are wrong.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loops_that_compute_something_else_are_not_used(
    dtype: str, tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler made them once, for one kind of processor: without attention."""
    right = Loops.decode

    def wrong(self: Loops, weights: Any, shape: Any, pool: Any, rows: Any, wide: int) -> None:
        ends = np.zeros_like(rows.positions)  # nobody looks back
        right(self, weights, shape, pool, rows._replace(positions=ends), wide)

    monkeypatch.setattr(Loops, "decode", wrong)
    directory, _ = tiny_model("llama_wide_heads")
    with pytest.raises(ConfigError, match=r"they are wrong: logits of single tokens are off"):
        tiny.runner(directory, dtype, kernels="compiled")
    torchs = tiny.decode_logits(Loop(tiny.runner(directory, dtype, kernels="torch")), (1, 15, 40))
    auto = tiny.decode_logits(Loop(tiny.runner(directory, dtype)), (1, 15, 40))
    assert torch.equal(auto, torchs)
