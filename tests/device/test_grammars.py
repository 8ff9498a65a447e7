"""Which tokens may come next follows from the grammar and the output alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from pdrt.device import sampler
from pdrt.device.batch import Draw
from pdrt.device.compiler import open_vocabulary
from pdrt.device.grammars import Grammars
from pdrt.device.null import EOS, NullRunner
from pdrt.errors import BadRequest
from pdrt.messages import Grammar, Sampling
from pdrt.modelspec import ModelSpec
from tests.device import tiny, worded
from tests.device.loop import Loop, Sequence_

VOCAB = 257
PROMPT = [65, 66]
DIGITS = Grammar(kind="regex", text="[0-9]{2,4}")


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(kind="json", text=json.dumps(value))


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}
WANTED = [
    DIGITS,
    Grammar(kind="choice", text='["yes", "no", "n\\u00e9"]'),
    Grammar(kind="lark", text='start: "<" /[a-c]{1,5}/ ">"'),
    Grammar(kind="lark", text='root ::= "a" [b-d] "e"?'),
    schema(PERSON),
]


@cache
def grammars(vocab: int = VOCAB) -> Grammars:
    return Grammars(partial(open_vocabulary, "null", vocab, (EOS,)), vocab)


def drawing(grammar: Grammar, output: list[int], **fields: Any) -> Draw:
    sampling = Sampling(**{"grammar": grammar, "temperature": 1.0, **fields})
    return Draw(sampling, [*PROMPT, *output], len(PROMPT))


def allowed(draw: Draw, vocab: int = VOCAB) -> set[int]:
    return set(np.flatnonzero(~grammars(vocab).forbidden([draw])[0]).tolist())


def walk(grammar: Grammar, seed: int, most: int = 400) -> list[int]:
    """Tokens that the grammar allows, drawn at random, to its end or so many."""
    rng, draw = random.Random(seed), drawing(grammar, [])
    history = draw.history
    assert isinstance(history, list)
    while len(history) < most:
        token = rng.choice(sorted(allowed(draw)))
        if token == EOS:
            break
        history.append(token)
    return history[len(PROMPT) :]


def test_the_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    digits = set(range(ord("0"), ord("9") + 1))
    assert allowed(drawing(DIGITS, [])) == digits
    assert allowed(drawing(DIGITS, [48])) == digits
    assert allowed(drawing(DIGITS, [48, 49])) == digits | {EOS}
    assert allowed(drawing(DIGITS, [48] * 4)) == {EOS}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WANTED), st.integers(0, 1000), st.data())
def test_a_matcher_made_anew_from_the_tokens_is_the_one_that_saw_them_come(
    grammar: Grammar, seed: int, data: st.DataObject
) -> None:
    """After a transfer, a retraction, on another instance: whatever part it saw before."""
    output = walk(grammar, seed, most=40)
    kept, history = drawing(grammar, []), list[int]()
    kept.history = history
    kept.prompt_tokens = 0
    for token in output:
        if data.draw(st.booleans()):
            allowed(kept)
        history.append(token)
    assert allowed(kept) == allowed(drawing(grammar, output))
    history.clear()  # a draw never goes back, and if it did, nothing would be wrong
    assert allowed(kept) == allowed(drawing(grammar, []))


@pytest.mark.parametrize("grammar", WANTED, ids=lambda grammar: grammar.kind)
def test_company_changes_nothing(grammar: Grammar) -> None:
    output = walk(grammar, 3, most=6)
    draws = [drawing(one, []) for one in WANTED] + [drawing(grammar, output)]
    assert set(np.flatnonzero(~grammars().forbidden(draws)[-1])) == allowed(
        drawing(grammar, output)
    )


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.7, 1.5]))
def test_whatever_the_logits_are_what_is_drawn_is_what_the_schema_says(
    seed: int, temperature: float
) -> None:
    noise = torch.Generator().manual_seed(seed)
    draw = drawing(schema(PERSON), [], temperature=temperature, seed=seed, top_p=0.9, top_k=30)
    history = draw.history
    assert isinstance(history, list)
    for _ in range(600):
        logits = 4 * torch.randn(1, VOCAB, generator=noise)
        ((token, said),) = sampler.draw(logits, [draw], grammars())
        assert said == pytest.approx(float(logits.log_softmax(-1)[0, token]), abs=1e-4)
        if token == EOS:
            break
        history.append(token)
    else:
        pytest.fail("it has no end")
    text = bytes(history[len(PROMPT) :]).decode()
    jsonschema.validate(json.loads(text), PERSON)


def test_white_space_has_an_end() -> None:
    """A weak model would say nothing else until it is out of tokens."""
    output = list(b"{\n" + b" " * 40)
    assert allowed(drawing(schema({"type": "object"}), output)) == {ord('"'), ord("}")}
    assert allowed(drawing(schema({"type": "object"}), list(b"{ "))) == {ord('"'), ord("}")}


def test_a_bias_cannot_break_a_grammar() -> None:
    draw = drawing(DIGITS, [], temperature=0.0, logit_bias=((65, 100.0), (ord("7"), 50.0)))
    ((token, _),) = sampler.draw(torch.zeros(1, VOCAB), [draw], grammars())
    assert token == ord("7")


def test_rows_without_a_grammar_are_drawn_as_ever() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    plain = replace(Sampling(), seed=5)
    draws = [Draw(plain, PROMPT, 2), drawing(DIGITS, []), Draw(plain, PROMPT, 2)]
    together = sampler.draw(logits, draws, grammars())
    assert together[::2] == sampler.draw(logits[::2], draws[::2])


@pytest.mark.parametrize("vocab", [300, 200])
def test_a_model_may_have_more_logits_than_tokens_or_fewer(vocab: int) -> None:
    """What is beyond the tokenizer is padding: no token."""
    draw = drawing(Grammar(kind="regex", text="(?s:.)*"), [])
    assert max(allowed(draw, vocab)) == min(EOS, vocab - 1)
    logits = torch.zeros(1, vocab)
    logits[0, -1] = 9.0
    ((token, _),) = sampler.draw(logits, [drawing(DIGITS, [])], grammars(vocab))
    assert chr(token) in "0123456789"


def test_a_grammar_that_becomes_too_complex_ends_its_own_answer_by_name() -> None:
    """2^17 states; the limits are less."""
    rng = random.Random(1)
    output = [rng.choice(b"ab") for _ in range(30_000)]
    deep = drawing(Grammar(kind="regex", text="(?s:.)*a(?s:.){17}"), output)
    logits = torch.zeros(2, VOCAB)
    drawn = sampler.draw(logits, [deep, drawing(DIGITS, [])], grammars())
    assert "too many" in deep.fault
    assert np.isnan(drawn[0][1])
    assert not np.isnan(drawn[1][1])


def test_output_that_breaks_the_grammar_is_a_fault() -> None:
    broken = drawing(DIGITS, list(b"x"))
    sampler.draw(torch.zeros(1, VOCAB), [broken], grammars())
    assert broken.fault


def test_one_that_was_dropped_is_compiled_again_and_a_bad_one_is_a_fault() -> None:
    few = Grammars(partial(open_vocabulary, "null", VOCAB, (EOS,)), VOCAB, kept=1)
    for grammar in (DIGITS, WANTED[1], DIGITS):
        few.prepare(grammar)
        assert (~few.forbidden([drawing(DIGITS, [])])[0]).sum() == 10
    bad = Grammar(kind="regex", text="(")
    with pytest.raises(BadRequest, match="regular expression"):
        few.prepare(bad)
    draw = drawing(bad, [])
    few.forbidden([draw])
    assert "regular expression" in draw.fault


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_null_device_says_what_the_grammar_says(temperature: float) -> None:
    wanted = Sampling(temperature=temperature, seed=4, grammar=schema(PERSON))
    said = Loop(NullRunner(16)).answer(b"Who is it?", 600, sampling=wanted)
    jsonschema.validate(json.loads(bytes(said[: said.index(EOS)])), PERSON)


def test_a_group_of_answers_is_bound_each_by_itself() -> None:
    """n draws from one row, none of which sees the others."""
    draws = [drawing(DIGITS, [], seed=seed) for seed in range(8)]
    logits = torch.zeros(1, VOCAB).expand(8, -1).contiguous()
    tokens = {token for token, _ in sampler.draw(logits, draws, grammars())}
    assert len(tokens) > 1
    assert tokens <= set(b"0123456789")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    worded.write_model(directory := tmp_path_factory.mktemp("model") / "words")
    return directory


@pytest.mark.timeout(120)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_real_model_of_random_weights_says_what_the_schema_says(
    model: Path, temperature: float
) -> None:
    """Alone, in company, and handed over after its first token, where all is made anew."""
    spec = ModelSpec.read(model)
    assert (spec.eos_token_ids, spec.vocab) == (frozenset({worded.END}), tiny.VOCAB)
    wanted = Sampling(temperature=temperature, seed=6, grammar=schema(PERSON))
    prompts = [tiny.prompt(length, 5) for length in (3, 20)]
    one, other = (
        Loop(tiny.runner(model, kernels="torch")),
        Loop(tiny.runner(model, kernels="torch"), seed=2),
    )
    alone = [finished(one, [one.sequence(prompt, 200, wanted)])[0] for prompt in prompts]
    text = Tokenizer.from_file(str(model / "tokenizer.json"))
    for said in alone:
        jsonschema.validate(json.loads(text.decode(said)), PERSON)

    assert finished(other, [other.sequence(p, 200, wanted) for p in prompts], chunk=7) == alone

    here = one.sequence(prompts[1], 200, wanted)
    one.run([here], 1)
    there = one.hand_over(here, other, len(alone[1]) + 1)
    assert finished(other, [there]) == [alone[1]]


def finished(loop: Loop, sequences: list[Sequence_], chunk: int = 512) -> list[list[int]]:
    """What they say before their end."""
    while lacking := [s for s in sequences if not s.output or s.output[-1] != worded.END]:
        loop.step(lacking, chunk)
    return [s.output[:-1] for s in sequences]


def test_the_models_tokens_are_read_once_and_may_be_read_before_any_grammar() -> None:
    """It takes a second in which no other Python runs: workers do it before they are ready."""
    opened = 0

    def open_once() -> LLTokenizer:
        nonlocal opened
        opened += 1
        return open_vocabulary("null", VOCAB, (EOS,))

    early = Grammars(open_once, VOCAB)
    early.prepare(None)
    assert opened == 1
    for grammar in WANTED:
        early.prepare(grammar)
    assert opened == 1
