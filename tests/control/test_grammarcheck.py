"""A grammar is found good or refused within a bound, whatever it is, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdrt.control.grammarcheck import GrammarCheck
from pdrt.errors import BadRequest, Overloaded
from pdrt.messages import Grammar
from tests.control.leader_rig import out, rigged

HUGE = {"type": "integer", "multipleOf": 15_485_863}  # an automaton of 15 million states


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(kind="json", text=json.dumps(value))


@asynccontextmanager
async def checking(**options: Any) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck("null", 257, (256,), **options)
    try:
        yield check
    finally:
        await check.close()


REFUSED = [
    (schema({"type": "strang"}), "the JSON schema: Invalid type: strang"),
    (schema({"not": {}}), 'the JSON schema: Unimplemented keys: ["not"]'),
    (schema({"$ref": "#"}), "the JSON schema: nothing matches it"),
    (schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "'a'"),
    (Grammar(kind="json", text="[" * 5000), "the JSON schema"),
    (Grammar(kind="regex", text="("), "the regular expression"),
    (Grammar(kind="lark", text="start: nobody"), "nobody"),
    (Grammar(kind="lark", text="root ::= ((("), "the grammar: "),
    (Grammar(kind="lark", text="root ::= " + "(" * 30_000), "the grammar: "),
]


async def test_what_cannot_be_compiled_is_refused_in_the_librarys_words() -> None:
    async with checking() as check:
        await check.check(schema({"type": "object"}))
        child = check.pid
        for grammar, said in REFUSED:
            with pytest.raises(BadRequest) as caught:
                await check.check(grammar)
            assert said in str(caught.value)
        assert check.pid == child, "what was wrong hurt nobody"
        await check.close()
        await check.check(schema({"type": "object"}))
        assert check.pid is None, "what was good once is not compiled again"


async def test_a_small_schema_that_would_take_minutes_and_gigabytes_is_refused_soon() -> None:
    """The loop turns meanwhile, and the next one finds another child."""
    async with checking(within_s=0.5) as check:
        await check.check(schema({"type": "object"}))
        began, turns = time.monotonic(), 0
        trying = asyncio.create_task(check.check(schema(HUGE)))
        while not trying.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(BadRequest, match="too large"):
            await trying
        assert time.monotonic() - began < 5.0
        assert turns > 10
        await check.check(nested(30))


def nested(levels: int) -> Grammar:
    """Each level names the one below twice: written out, it would have a billion parts."""
    found: dict[str, Any] = {"a0": {"type": "string"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/a{level - 1}"}
        found[f"a{level}"] = {"anyOf": [below, below]}
    return schema({"$defs": found, "$ref": f"#/$defs/a{levels - 1}"})


async def test_a_check_that_is_given_up_leaves_no_answer_for_the_next_one() -> None:
    async with checking() as check:
        await check.check(schema({"type": "object"}))
        given_up = asyncio.create_task(check.check(schema(HUGE)))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await check.check(schema({"type": "array"}))


async def test_without_the_library_a_grammar_is_refused_before_any_work() -> None:
    async with checking(find=lambda _name: None) as check:
        with pytest.raises(BadRequest, match="pip install llguidance"):
            await check.check(schema({"type": "object"}))
        assert check.pid is None


async def test_a_leader_refuses_before_its_worker_hears_of_it() -> None:
    """And what is good reaches the worker as it was written, in the words of each dialect."""
    wanted = {"type": "object", "properties": {"b": {}, "a": {}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
    async with rigged() as rig:
        for bad in ({"regex": "("}, {"json": {"type": "strang"}}):
            answer = await rig.post("/v1/completions", {"prompt": "a", "structured_outputs": bad})
            assert answer.status == 400
        assert not rig.worker.submitted
        rig.worker.script = [out("{}", "stop")]
        await rig.post("/v1/completions", {"prompt": "a", "response_format": asked})
        params = {"structured_outputs": {"choice": ["ja", "nein"]}}
        await rig.post("/generate", {"prompt": "a", "sampling_params": params})
        assert [submit.sampling.grammar for submit in rig.worker.submitted] == [
            Grammar(kind="json", text='{"type":"object","properties":{"b":{},"a":{}}}'),
            Grammar(kind="choice", text='["ja","nein"]'),
        ]
    missing = GrammarCheck("null", 257, (256,), find=lambda _name: None)
    async with rigged(grammars=missing) as rig:
        body = {"prompt": "a", "response_format": {"type": "json_object"}}
        answer = await rig.post("/v1/completions", body)
        assert (answer.status, len(rig.worker.submitted)) == (400, 0)
        assert "llguidance" in (await answer.json())["error"]["message"]


async def test_a_model_that_cannot_end_an_answer_has_no_grammars() -> None:
    check = GrammarCheck("null", 257, ())
    with pytest.raises(BadRequest, match="no end token"):
        await check.check(schema({"type": "object"}))


async def test_a_model_without_a_tokenizer_that_the_library_reads_says_so(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    check = GrammarCheck(str(tmp_path), 257, (2,))
    with pytest.raises(BadRequest, match="tokenizer"):
        await check.check(schema({"type": "object"}))
    await check.close()


async def test_only_so_many_wait() -> None:
    async with checking() as check:
        each = [schema({"const": number}) for number in range(65)]
        found = await asyncio.gather(*map(check.check, each), return_exceptions=True)
        assert [type(one) for one in found if one is not None] == [Overloaded]
