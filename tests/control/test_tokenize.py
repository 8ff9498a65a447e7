"""/tokenize and /detokenize: what the model's tokenizer says, in every topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdrt.control.text import TextPool, open_text
from tests.control.leader_rig import BEARER, rigged
from tests.control.pair_rig import TOPOLOGIES, Served, Topology, serving
from tests.control.small_tokenizers import byte_level, metaspace, model_directory

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace()}


async def asked(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = await served.post(path, body)
    told: dict[str, Any] = await answer.json()
    assert answer.status == 200, told
    return told


async def refused(served: Served, path: str, **body: Any) -> tuple[int, str]:
    answer = await served.post(path, body)
    return answer.status, (await answer.json())["error"]["message"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_prompts_tokens_are_told_and_become_text_again(topology: Topology) -> None:
    async with serving(topology) as served:
        told = await asked(served, "/tokenize", model="null", prompt="hé")
        assert told == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 1000}
        assert await asked(served, "/detokenize", tokens=told["tokens"]) == {"prompt": "hé"}
        assert await asked(served, "/detokenize", tokens=[]) == {"prompt": ""}
        chat = await asked(served, "/tokenize", messages=[{"role": "user", "content": "hi"}])
        assert bytes(chat["tokens"]) == b"user: hi\nassistant: "
        bare = await asked(
            served,
            "/tokenize",
            messages=[{"role": "user", "content": "hi"}],
            add_generation_prompt=False,
        )
        assert bytes(bare["tokens"]) == b"user: hi\n"
        assert len((await asked(served, "/tokenize", prompt="x" * 9000))["tokens"]) == 9000


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_what_cannot_be_told_is_refused_by_name(topology: Topology) -> None:
    async with serving(topology) as served:
        assert await refused(served, "/tokenize") == (400, "prompt is missing")
        assert (await refused(served, "/tokenize", prompt="a", model="gpt"))[0] == 404
        assert await refused(served, "/tokenize", prompt="a", x=1) == (
            400,
            "x is not a known field",
        )
        assert await refused(served, "/tokenize", messages=[], temperature=1) == (
            400,
            "temperature is not a known field beside messages",
        )
        assert (await refused(served, "/tokenize", messages=[]))[0] == 400
        status, said = await refused(served, "/detokenize", tokens=[999])
        assert (status, "999 is outside the vocabulary" in said) == (400, True)
        assert (await refused(served, "/detokenize", tokens="abc"))[0] == 400


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_special_tokens_are_shown_and_may_be_left_out(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    text = TextPool(open_text(str(model_directory(tmp_path, tokenizer, TEMPLATE))))
    async with serving("hybrid", text=text, vocab=tokenizer.get_vocab_size()) as served:
        plain = await asked(served, "/tokenize", prompt="hello", add_special_tokens=False)
        assert plain["tokens"] == tokenizer.encode("hello", add_special_tokens=False).ids
        full = await asked(served, "/tokenize", prompt="hello")
        assert full["tokens"] == tokenizer.encode("hello").ids
        shown = await asked(served, "/detokenize", tokens=full["tokens"])
        assert shown == {"prompt": tokenizer.decode(full["tokens"], skip_special_tokens=False)}
        chat = await asked(served, "/tokenize", messages=[{"role": "user", "content": "hello"}])
        assert chat["count"] == len(chat["tokens"]) > 0
        assert (await refused(served, "/tokenize", messages=[], add_special_tokens=True))[0] == 400


async def test_it_is_for_clients_with_a_key_and_for_the_router() -> None:
    async with rigged("prefill") as rig:
        assert (await rig.post("/tokenize", {"prompt": "a"})).status == 401
        assert (await rig.post("/tokenize", {"prompt": "a"}, headers=BEARER)).status == 200
    async with rigged("hybrid", api_keys=("k",)) as rig:
        assert (await rig.post("/tokenize", {"prompt": "a"})).status == 401
        sent = {"authorization": "Bearer k"}
        assert (await rig.post("/tokenize", {"prompt": "a"}, headers=sent)).status == 200


async def test_a_models_name_may_have_a_slash_in_it() -> None:
    async with rigged("hybrid", model="Qwen/Qwen3") as rig:
        told = await (await rig.client.get("/v1/models/Qwen/Qwen3")).json()
        assert told["id"] == "Qwen/Qwen3"
