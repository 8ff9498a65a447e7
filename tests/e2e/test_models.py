"""Real weights through real processes: token for token what transformers' `generate` says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
BLOCK, CHUNK, TOKENS = 8, 32, 12
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, int(2.7 * CHUNK)]
FAMILIES = ["smollm2", "llama", "llama3_rope", "mistral", "qwen2", "qwen3", "deepseek_v2_grouped"]
DEFAULT = "smollm2"  # the one of the default run


def settings(model: Path, dtype: str = "float32") -> Tables:
    return {
        "model": {"path": str(model), "dtype": dtype},
        "device": {"kind": "cpu", "threads": 1},
        "scheduler": {"block_size": BLOCK, "max_prefill_tokens": CHUNK, "kv_memory": 4 << 20},
    }


def write_tokenizer(directory: Path, vocab: int) -> None:
    """One token a byte, and names for the rest: enough for ids to go in and out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{n}>" for n in range(len(alphabet), vocab))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def families() -> list[Any]:
    """2P2D for each, and 1P1D for one; the default run has one of them, test_exact another."""
    matrix = [pytest.mark.matrix]
    cases = [pytest.param(f, 2, marks=[] if f == DEFAULT else matrix) for f in FAMILIES]
    return [*cases, pytest.param(DEFAULT, 1, marks=matrix)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("family", "many"), families())
async def test_greedy_answers_equal_generate_on_every_path(
    tmp_path: Path, family: str, many: int
) -> None:
    """Prompts around block and chunk sizes, then sixteen in flight together; and hybrid too."""
    from tests.device import tiny

    oracle = tiny.make(family, tmp_path / "model")
    write_tokenizer(tmp_path / "model", tiny.VOCAB)
    cluster = Cluster.make(tmp_path, many, many, 0, settings(tmp_path / "model"))
    cluster.add_node("hybrid0", "hybrid", settings(tmp_path / "model"))  # asked directly
    cluster.startup_s = 90.0
    async with cluster.running():
        prompts = [tiny.prompt(length, seed) for length in LENGTHS for seed in range(many)]
        mixed = [tiny.prompt(1 + 11 * i % 90, 50 + i) for i in range(16)]
        wanted = {tuple(p): tiny.answer(oracle, p, TOKENS) for p in (*prompts, *mixed)}
        for prompt in prompts:
            await check(cluster, prompt, wanted)
        await asyncio.gather(*(check(cluster, prompt, wanted) for prompt in mixed))
        await cluster.until_baseline()


async def check(cluster: Cluster, prompt: list[int], wanted: dict[tuple[int, ...], Any]) -> None:
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"prompt": prompt, "sampling_params": sampling}
    apart = await cluster.post("/generate", body)
    assert apart.ids == wanted[tuple(prompt)]
    assert apart.headers["x-pd-path"] == "disagg"
    together = await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)
    assert together.ids == wanted[tuple(prompt)]
    assert together.headers["x-pd-path"] == "local"


LAYOUTS = {  # (prefill, decode) as tp, dp
    "P TP2 -> D TP1": ((2, 1), (1, 1)),
    "P TP1 -> D TP2": ((1, 1), (2, 1)),
    "P TP2 -> D DP2": ((2, 1), (1, 2)),
    "P TP4 -> D TP2": ((4, 1), (2, 1)),  # two kv heads: replicas on the prefill side
}


def layouts() -> list[Any]:
    """Each for one family, and one of them for all; the default run has one.

    How each family is divided, test_tensor_parallel shows; test_dp, that dp ranks are found.
    """
    slow, matrix = [pytest.mark.slow], [pytest.mark.matrix]
    first, to_two, to_dp, replicas = LAYOUTS
    return [
        pytest.param("llama", first),
        *(pytest.param("llama", layout, marks=slow) for layout in (to_two, replicas)),
        pytest.param("llama", to_dp, marks=matrix),
        *(pytest.param(family, first, marks=matrix) for family in (DEFAULT, "qwen2", "qwen3")),
        *(pytest.param("deepseek_v2", layout, marks=matrix) for layout in LAYOUTS),  # one latent
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("family", "layout"), layouts())
async def test_greedy_answers_equal_generate_between_unequal_layouts(
    tmp_path: Path, family: str, layout: str
) -> None:
    """CASE 63: shards compute together (gloo), and each kv head finds the rank that needs it."""
    from tests.device import tiny

    oracle = tiny.make(family, tmp_path / "model")
    write_tokenizer(tmp_path / "model", tiny.VOCAB)
    prefill, decode = (parallel(*sizes) for sizes in LAYOUTS[layout])
    tables = settings(tmp_path / "model")
    cluster = Cluster.make(
        tmp_path, 1, 1, 0, tables, per_role={"prefill": prefill, "decode": decode}
    )
    cluster.startup_s = 90.0
    prompts = [tiny.prompt(length, 7) for length in LENGTHS]
    mixed = [tiny.prompt(1 + 11 * i % 90, 50 + i) for i in range(16)]
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    async def check_one(prompt: list[int]) -> None:
        answer = await cluster.post("/generate", {"prompt": prompt, "sampling_params": sampling})
        assert answer.ids == tiny.answer(oracle, prompt, TOKENS)
        assert answer.headers["x-pd-path"] == "disagg"

    async with cluster.running():
        for prompt in prompts:
            await check_one(prompt)
        await asyncio.gather(*(check_one(prompt) for prompt in mixed))
        await cluster.until_baseline()


def parallel(tp: int, dp: int) -> Tables:
    world = tp * dp
    return {"parallel": {"world_size": world, "devices_per_node": world, "tp": tp, "dp": dp}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "many", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.matrix)]
)
async def test_the_demo_model_answers_like_generate(tmp_path: Path, many: int) -> None:
    """SmolLM2-135M in float32: texts and a chat, on nPnD and hybrid, streamed and whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pdrt import config, demo

    model = demo.prepare(config.cache_dir(), lambda _stage: None)
    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tables = settings(model)
    room = {"scheduler": {"block_size": 16, "max_prefill_tokens": 64, "kv_memory": 64 << 20}}
    cluster = Cluster.make(tmp_path, many, many, 0, tables, room)
    cluster.add_node("hybrid0", "hybrid", tables, room)
    cluster.startup_s = 120.0
    text = "The capital of France is Paris. The capital of Japan is Tokyo. 12345 + 678 = "
    prompts = ["The", text, "Once upon a time 🙂 in 世界,", (text * 9)[:700]]
    async with cluster.running():
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"]
            out = oracle.generate(
                torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None
            )
            want = out[0, len(ids) :].tolist()
            sampling = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
            body = {"prompt": prompt, "sampling_params": sampling}
            said = tokenizer.decode(want, skip_special_tokens=True)
            for url in (cluster.url, cluster.nodes["hybrid0"].url):
                answer = await cluster.post("/generate", body, url)
                assert (answer.ids, answer.body["output"]) == (want, said)
            assert await streamed(cluster, body) == said
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        chat = {"messages": messages, "temperature": 0, "max_tokens": 32}
        reply = (await cluster.post("/v1/chat/completions", chat)).body
        assert "Paris" in reply["choices"][0]["message"]["content"]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert reply["usage"]["prompt_tokens"] == len(ids)
        await cluster.until_baseline()


async def streamed(cluster: Cluster, body: dict[str, Any]) -> str:
    assert cluster.http is not None
    async with cluster.http.post(f"{cluster.url}/generate", json={**body, "stream": True}) as got:
        lines = (await got.text()).split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["output"] for event in events)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_bfloat16_is_the_same_on_every_path(tmp_path: Path) -> None:
    """Colocated equals disaggregated in bfloat16 too, from weights saved in shards."""
    from tests.device import tiny

    tiny.make(DEFAULT, tmp_path / "model", max_shard_size="50KB")
    write_tokenizer(tmp_path / "model", tiny.VOCAB)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    tables = settings(tmp_path / "model", "bfloat16")
    cluster = Cluster.make(tmp_path, 1, 1, 0, tables)
    cluster.add_node("hybrid0", "hybrid", tables)
    cluster.startup_s = 90.0
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with cluster.running():
        for length in LENGTHS:
            body = {"prompt": tiny.prompt(length), "sampling_params": sampling}
            apart = await cluster.post("/generate", body)
            together = await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)
            assert apart.ids == together.ids
