"""`pdrt generate`: the scheduler and a device in a plain loop."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdrt.config import ModelSection, NodeConfig
from pdrt.device.null import NullRunner
from pdrt.errors import BadRequest, TooLong
from pdrt.messages import Sampling
from pdrt.offline import answer, generate
from pdrt.sched.limits import Limits

NULL = NodeConfig(model=ModelSection(path="null"))


SAMPLING = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)


def tokens_of(prompt: list[int], limits: Limits) -> list[int]:
    outputs = list(answer(prompt, NullRunner(limits.block_size), limits, SAMPLING))
    assert [bool(one.finish) for one in outputs] == [False] * (len(outputs) - 1) + [True]
    return [token for one in outputs for token in one.tokens]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 43])
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_the_answer_depends_neither_on_chunks_nor_on_the_block_size(
    length: int, chunk: int
) -> None:
    """CASES 59: an answer with a chunked prompt equals the unchunked one."""
    prompt = list(range(length))
    plain = tokens_of(prompt, Limits())
    assert len(plain) == 20
    limits = Limits(block_size=4, max_prefill_tokens=chunk, max_batch_size=1, reserved_tokens=1)
    assert tokens_of(prompt, limits) == plain


def run(prompt: str, config: NodeConfig, max_tokens: int = 8) -> str:
    console = Console(file=io.StringIO(), highlight=False)
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    assert generate(prompt, config, sampling, console, is_chat=False) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_answer_is_printed_and_ends_the_line() -> None:
    out = run("hello", NULL)
    assert out.endswith("\n")
    assert out.strip()
    assert out == run("hello", NULL)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        run("", NULL)


def test_what_the_model_cannot_hold_is_refused_before_it_is_loaded() -> None:
    short = NodeConfig(model=ModelSection(path="null", max_model_len=10))
    run("12345", short, max_tokens=5)
    with pytest.raises(TooLong, match="10"):
        run("123456", short, max_tokens=5)
