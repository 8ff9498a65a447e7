"""A batch of prompts is one answer, in every topology: indexed, counted, and ended as one."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.control.join import Joiner
from pdrt.control.order import parse
from pdrt.errors import PdrtError
from pdrt.messages import Output, Submit
from tests.control.fake_leader import after, good, hang, status
from tests.control.fake_leader import stream as streamed
from tests.control.leader_rig import failing, odd, out
from tests.control.pair_rig import TOPOLOGIES, Topology, prompt_text, serving
from tests.control.router_rig import rig

Json = dict[str, Any]
PROMPTS = ["a", "bc", "def"]
PATHS = ["/v1/completions", "/generate"]


def echoing(submit: Submit) -> Sequence[Output]:
    """Each of n sequences says its prompt twice, and which one it is."""
    said = prompt_text(submit) * 2
    return [
        odd(f"{said}{index}", 0, "length", submit.sampling.top_logprobs, index)
        for index in range(submit.sampling.n)
    ]


def asking(path: str, prompts: Any = PROMPTS, n: int = 1, **fields: Any) -> Json:
    if path == "/generate":
        return {"prompt": prompts, "sampling_params": {"n": n}, **fields}
    return {"prompt": prompts, "n": n, **fields}


def chunks_of(body: bytes) -> list[Json]:
    parts = body.decode().removesuffix("\n\n").split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def texts_of(choices: Sequence[Json], count: int) -> list[str]:
    return [
        "".join(str(c.get("text", c.get("output"))) for c in choices if c["index"] == index)
        for index in range(count)
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompts", [PROMPTS, [list(p.encode()) for p in PROMPTS]])
async def test_choices_are_indexed_by_prompt_and_then_by_sequence(
    topology: Topology, n: int, prompts: Any
) -> None:
    want = [f"{p * 2}{j}" for p in PROMPTS for j in range(n)]
    async with serving(topology) as served:
        served.worker.answers = echoing
        answer = await served.post("/v1/completions", asking("/v1/completions", prompts, n))
        body = await answer.json()
        assert [choice["index"] for choice in body["choices"]] == list(range(3 * n))
        assert texts_of(body["choices"], 3 * n) == want
        assert body["usage"]["prompt_tokens"] == 6
        assert body["usage"]["completion_tokens"] == n * (6 * 2 + 3)
        assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
        plain = await (await served.post("/generate", asking("/generate", prompts, n))).json()
        assert texts_of(plain["outputs"], 3 * n) == want
        assert plain["usage"]["completion_tokens"] == n * (6 * 2 + 3)
        assert plain["path"] == ("local" if topology == "hybrid" else "disagg")
        assert plain["timings_ms"].keys() == {"tokenise", "first_token", "total"}
        rooms = {s.room for s in served.worker.submitted}
        assert len(rooms) == 6, "each prompt is a request of its own"


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_streamed_batch_adds_up_to_the_whole_one(topology: Topology, path: str) -> None:
    more: Json = {} if path == "/generate" else {"stream_options": {"include_usage": True}}
    async with serving(topology) as served:
        served.worker.answers = echoing
        whole = await (await served.post(path, asking(path, n=2))).json()
        answer = await served.post(path, asking(path, n=2, stream=True, **more))
        assert answer.content_type == "text/event-stream"
        chunks = chunks_of(await answer.read())
        choices = [c for chunk in chunks for c in chunk.get("choices", [chunk])]
        assert texts_of(choices, 6) == texts_of(whole.get("choices", whole.get("outputs")), 6)
        ends = [c["index"] for c in choices if c["finish_reason"]]
        assert sorted(ends) == list(range(6))
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert usages == [whole["usage"]], "one usage, of all prompts"
        assert chunks[-1].get("usage") == whole["usage"]
        assert len({(c.get("id"), c.get("created"), c.get("request_id")) for c in chunks}) == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_usage_in_every_chunk_grows_to_the_sum(topology: Topology) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(topology) as served:
        served.worker.answers = echoing
        body = asking("/v1/completions", stream=True, stream_options=options)
        chunks = chunks_of(await (await served.post("/v1/completions", body)).read())
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 15
        assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_odds_and_echo_are_each_prompts_own(topology: Topology) -> None:
    async with serving(topology) as served:
        served.worker.answers = echoing
        body = asking("/v1/completions", echo=True)
        told = await (await served.post("/v1/completions", body)).json()
        assert [c["text"] for c in told["choices"]] == [f"{p * 3}0" for p in PROMPTS]
        body = asking("/v1/completions", logprobs=1)
        told = await (await served.post("/v1/completions", body)).json()
        assert [len(c["logprobs"]["tokens"]) for c in told["choices"]] == [3, 5, 7]


def vars_of(output: Output) -> Json:
    return {name: getattr(output, name) for name in Output.__dataclass_fields__}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_first_failure_is_the_answer_and_ends_the_others(
    topology: Topology, stream: bool, path: str
) -> None:
    def answers(submit: Submit) -> Sequence[Output]:
        return [failing("bad_logits", "no number")] if prompt_text(submit) == "bc" else []

    async with serving(topology) as served:
        served.worker.answers = answers
        answer = await served.post(path, asking(path, stream=stream))
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (500, "bad_logits")
        await served.at_rest()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_in_a_begun_stream_is_its_one_last_event(
    topology: Topology, path: str
) -> None:
    async with serving(topology) as served:
        asked = asyncio.ensure_future(served.post(path, asking(path, stream=True)))
        submits = [await served.worker.next_submit() for _ in PROMPTS]
        served.worker.say(submits[0].room, out("x"))
        answer = await asked
        assert answer.status == 200
        assert await answer.content.readany()
        served.worker.say(submits[2].room, failing("bad_logits", "no number"))
        rest = await answer.read()
        last = rest.decode().removesuffix("\n\n").split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        error = json.loads(last.partition("data: ")[2])["error"]
        assert error["code"] == "bad_logits"
        assert rest.count(b"event: error") == 1
        assert b"[DONE]" not in rest
        await served.at_rest()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_prompts(topology: Topology, stream: bool) -> None:
    async with serving(topology) as served:
        body = asking("/generate", stream=stream)
        asked = asyncio.ensure_future(served.post("/generate", body))
        for _ in PROMPTS:
            await served.worker.next_submit()
        asked.cancel()
        await served.worker.until(lambda worker: len(worker.aborted) == 3)
        await served.at_rest()


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_generate_list_of_one_is_a_batch_and_openais_is_its_prompt(
    topology: Topology,
) -> None:
    async with serving(topology) as served:
        served.worker.answers = echoing
        plain = await (await served.post("/generate", {"prompt": ["a"]})).json()
        assert [(o["index"], o["output"]) for o in plain["outputs"]] == [(0, "aa0")]
        told = await (await served.post("/v1/completions", {"prompt": ["a"]})).json()
        assert told["choices"][0]["text"] == "aa0"


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_best_of_tells_the_likeliest_and_counts_all(topology: Topology) -> None:
    """Sequence i of `odd` is the less likely the higher i is: so say them the other way round."""

    def answers(submit: Submit) -> Sequence[Output]:
        count = submit.sampling.n
        outputs = [odd("ab", 0, "length", 0, count - 1 - i) for i in range(count)]
        return [Output(**{**vars_of(o), "index": i}) for i, o in enumerate(outputs)]

    async with serving(topology) as served:
        served.worker.answers = answers
        body = {"prompt": "p", "n": 2, "best_of": 4, "logprobs": 0}
        told = await (await served.post("/v1/completions", body)).json()
        firsts = [c["logprobs"]["token_logprobs"] for c in told["choices"]]
        assert firsts == [[0.0, -0.125], [-0.125, -0.25]]
        assert [c["index"] for c in told["choices"]] == [0, 1]
        assert told["usage"]["completion_tokens"] == 8
        params = {"n": 1, "best_of": 3}
        plain = await (
            await served.post("/generate", {"prompt": "p", "sampling_params": params})
        ).json()
        assert (plain["output"], plain["usage"]["completion_tokens"]) == ("ab", 6)


# The joiner alone.


def events(i: int, n: int, text: str) -> bytes:
    head = {"id": f"cmpl-{i}", "object": "text_completion", "created": i, "model": "m"}
    usage = {"prompt_tokens": i, "completion_tokens": n, "total_tokens": n + i}
    chunks = [
        {**head, "choices": [{"index": j, "text": char, "finish_reason": None}], "usage": None}
        for char in text
        for j in range(n)
    ]
    chunks.append({**head, "choices": [], "usage": usage})
    said = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return f"{said}data: [DONE]\n\n".encode()


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="aé你", max_size=4), min_size=2, max_size=4),
    n=st.integers(1, 2),
    chance=st.randoms(use_true_random=False),
)
def test_the_joined_stream_is_the_same_however_its_parts_are_cut(
    texts: list[str], n: int, chance: Random
) -> None:
    body = {"prompt": ["x"] * len(texts), "n": n, "stream": True}
    joiner = Joiner(parse("completions", {**body, "stream_options": {"include_usage": True}}))
    left = {i: events(i, n, text) for i, text in enumerate(texts)}
    said = b""
    while left:
        part = chance.choice(sorted(left))
        cut = chance.randint(1, 200)
        said += joiner.feed(part, left[part][:cut])
        left[part] = left[part][cut:]
        if not left[part]:
            del left[part]
    chunks = chunks_of(said)
    choices = [c for chunk in chunks for c in chunk["choices"]]
    assert texts_of(choices, n * len(texts)) == [t for t in texts for _ in range(n)]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    count = len(texts)
    totals = {"prompt_tokens": count * (count - 1) // 2, "completion_tokens": n * count}
    assert chunks[-1]["usage"] == totals | {"total_tokens": sum(totals.values())}


@pytest.mark.parametrize(
    "junk", [b"data: {\n\n", b"data: []\n\n", b"hello\n\n", b'data: {"a":1}\n\n']
)
def test_what_is_no_event_of_ours_is_an_error(junk: bytes) -> None:
    joiner = Joiner(parse("completions", {"prompt": ["a", "b"], "stream": True}))
    with pytest.raises(PdrtError, match="prompt 1"):
        joiner.feed(1, junk)


async def test_whole_answers_that_are_none_are_an_error() -> None:
    joiner = Joiner(parse("completions", {"prompt": ["a", "b"]}))
    for junk in (b"", b"[]", b"{}", b'{"choices":[{}],"usage":{}}'):
        with pytest.raises(PdrtError, match="prompt of the batch"):
            await joiner.whole([junk, junk])


# At the router, before scripted leaders.


def completion(text: str) -> Json:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    head = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": "tiny"}
    return {**head, "choices": choices, "usage": usage}


async def test_a_prompt_whose_prefill_fails_is_retried_and_the_others_are_not_touched() -> None:
    at_last = asyncio.Event()
    policy = {"prefill": "round_robin"}
    async with rig(prefill=2, policy=policy) as r:
        lost, other = r.prefill
        lost.plays.append(status(500, "broken"))
        answers = [after(at_last, good(completion(text))) for text in ("one", "two")]
        r.decode[0].plays.extend(answers)
        asked = r.sending(body={"prompt": ["a", "b"]}, path="/v1/completions")
        await other.nth(2)  # its own, and the one that was lost
        at_last.set()
        got = await asked
        assert got.status == 200
        assert sorted(c["text"] for c in got.json["choices"]) == ["one", "two"]
        assert got.json["usage"]["total_tokens"] == 6
        assert {seen.room for seen in other.seen} == {seen.room for seen in r.decode[0].seen}
        assert len(r.decode[0].seen) == 2, "decode keeps both reservations"
        await r.at_rest()


async def test_a_batch_has_one_deadline() -> None:
    async with rig() as r:
        r.decode[0].plays.extend([good(completion("one")), hang])
        asked = r.sending(body={"prompt": ["a", "b"]}, path="/v1/completions")
        await r.decode[0].nth(2)
        r.time.pass_deadlines()
        got = await asked
        assert (got.status, got.error["code"]) == (504, "deadline")
        await r.at_rest()


async def test_an_answer_that_cannot_be_joined_is_an_error_and_no_half_of_one() -> None:
    async with rig() as r:
        r.decode[0].plays.extend([good(completion("one")), good({"output": "x"})])
        got = await r.send({"prompt": ["a", "b"]}, path="/v1/completions")
        assert got.status == 500
        assert "prompt of the batch" in got.error["message"]
        await r.at_rest()


async def test_a_stream_that_cannot_be_joined_ends_with_an_error_event() -> None:
    async with rig() as r:
        chunk = {**completion("one"), "usage": None}
        event = f"data: {json.dumps(chunk)}\n\n".encode()
        more = asyncio.Event()
        plays = [streamed(event, more, b"data: junk\n\n"), streamed(event, ending="hang")]
        r.decode[0].plays.extend(plays)
        body = {"prompt": ["a", "b"], "stream": True}
        async with r.session.post(r.url + "/v1/completions", json=body) as answer:
            assert await answer.content.readany()
            more.set()
            rest = await answer.read()
        assert b"event: error\ndata: " in rest
        assert b"no event of ours" in rest
        await r.at_rest()


async def test_a_room_whose_client_left_before_its_batch_began_is_free_again() -> None:
    """What was sent and the end of it are read in one turn of the loop."""
    body = b'{"prompt": ["a", "b"], "bootstrap_room": 42}'
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with rig() as r:
        where = ("127.0.0.1", int(r.url.rpartition(":")[2]))
        for number in range(1, 6):
            with socket.create_connection(where) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + head + body)
            left = f'route="/generate",status="499"}} {number}.0'.encode()
            async with asyncio.timeout(5):
                while left not in (await r.get("/metrics")).body:
                    pass
            await r.at_rest()
            assert (await r.send(bootstrap_room=42)).status == 200
