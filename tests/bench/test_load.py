"""The load client: what it sends, how it reads streams, and that no failure is silent."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.bench.heard import Piece, Record, Told, events, told_by
from pdrt.bench.load import (
    Ran,
    Server,
    arriving,
    client,
    form_of,
    send,
    sender,
    steady,
)
from pdrt.bench.prompts import Ask, Asks, Prompts, kind_of, read_talks, talks_of
from pdrt.bench.talk import LOST, Talk
from pdrt.errors import ConfigError
from pdrt.sim.lengths import Lengths, exactly
from pdrt.sim.workload import Arrivals
from tests.bench.scripted import LAST, WHOLE, Scripted, event, serving

STREAM = b"".join(WHOLE)


def nothing(_record: Record) -> None:
    """Nobody watches."""


def once(count: int) -> list[Talk]:
    """So many conversations of one turn."""
    return [Talk(lambda _ask: b"{}", [Ask((3,), 1)]) for _ in range(count)]


def heard(*data: bytes, ended: float = 9.0) -> Told:
    pieces = [Piece(float(at), each) for at, each in enumerate(data, 1)]
    return told_by(Record(0.5, ended, pieces))


# Streams.


def test_an_answer_is_read_with_its_times_and_counts() -> None:
    told = heard(*WHOLE)
    assert told.failure == ""
    assert (told.at, told.tokens) == ([1.0, 2.0, 3.0], 3)
    assert (told.prompt_tokens, told.cached_tokens) == (5, 2)
    assert (told.ttft_s, told.e2e_s, told.gaps_s) == (0.5, 8.5, [1.0, 1.0])
    assert told.per_token_s == 1.0


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_the_bytes_are_cut_the_events_are_the_same(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in itertools.pairwise(bounds)]
    found = list(events([Piece(float(at), part) for at, part in enumerate(parts)]))
    assert [data for _, data in found] == [
        line[6:] for line in STREAM.split(b"\n") if line.startswith(b"data: ")
    ]
    for at, data in found:  # the time is that of the part that ended the line
        begin = STREAM.index(data)
        assert bounds[int(at)] <= begin + len(data) < bounds[int(at) + 1]


def test_a_last_line_without_its_end_counts_too() -> None:
    assert heard(event("a"), event("b", "stop").rstrip()).tokens == 2


@pytest.mark.parametrize("ending", [b"\r\n\r\n", b"\n\n"])
def test_other_servers_spell_events_otherwise(ending: bytes) -> None:
    data = b'data:{"choices":[{"text":"x","finish_reason":"length"}]}' + ending
    assert heard(b": comment\n\nevent: x\n", data).at == [2.0]


def test_pdrts_own_dialect_counts_ids_whose_text_is_not_whole_yet() -> None:
    def line(ids: list[int], finish: str | None, **more: object) -> bytes:
        told = {"output": "", "output_ids": ids, "finish_reason": finish, **more}
        return b"data: " + json.dumps(told).encode() + b"\n\n"

    usage = {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 4}
    told = heard(line([5], None), line([6], None), line([], "length", usage=usage))
    assert (told.at, told.tokens, told.cached_tokens) == ([1.0, 2.0], 2, 4)


def test_an_answer_without_any_text_began_when_it_was_over() -> None:
    assert heard(event("", "length"), LAST).at == [1.0]


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        ((event("a"),), "cut_off"),
        ((event("a"), b'data: {"error": {"code": "peer_lost", "message": "x"}}\n\n'), "peer_lost"),
        ((b"data: {oops\n\n",), "bad_answer"),
        ((b"data: [1]\n\n",), "bad_answer"),
        ((b'data: {"output_ids": 5, "finish_reason": null}\n\n',), "bad_answer"),
        ((b'data: {"output_ids": "ab", "finish_reason": null}\n\n',), "bad_answer"),
        ((b'data: {"choices": [], "usage": {"completion_tokens": 1e999}}\n\n',), "bad_answer"),
        ((b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n',), "no_tokens"),
    ],
)
def test_an_answer_that_is_none_is_a_failure_with_a_code(
    data: tuple[bytes, ...], failure: str
) -> None:
    told = heard(*data)
    assert told.failure == failure
    assert told.reason


def test_what_was_left_in_the_middle_is_no_failure() -> None:
    told = heard(event("a"), event("b"), ended=0.0)
    assert (told.failure, told.gaps_s) == ("", [1.0])


# Prompts.


def test_lengths_are_one_or_a_range() -> None:
    assert Lengths.parse("128", "--input") == Lengths(128, 128)
    assert Lengths.parse(" 4..9", "--input") == Lengths(4, 9)
    random = Random(2)
    assert {Lengths(4, 9).draw(random) for _ in range(200)} == {4, 5, 6, 7, 8, 9}
    assert (str(Lengths(3, 3)), str(Lengths(3, 4))) == ("3", "3..4")


@pytest.mark.parametrize("text", ["", "0", "9..4", "x", "4..", "-1", "99999999"])
def test_lengths_that_are_none_are_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--output"):
        Lengths.parse(text, "--output")


@given(
    st.sampled_from(["ids", "words"]), st.integers(0, 40), st.integers(1, 30), st.integers(1, 2**40)
)
def test_prompts_have_their_length_and_differ_but_for_what_they_share(
    kind: str, shared: int, most: int, seed: int
) -> None:
    lengths, answers = Lengths(20, 20 + most), Lengths(1, 9)
    prompts = Prompts(lengths, answers, kind_of(kind), 300, shared, seed)
    asks = [ask for [ask] in prompts.draw(8, 0, "a")]
    texts = [ask.prompt.split() if isinstance(ask.prompt, str) else ask.prompt for ask in asks]
    assert all(20 <= len(text) <= 20 + most for text in texts)
    for text in texts[1:]:
        alike = min(shared, len(texts[0]) - 1, len(text) - 1)
        assert list(text[:alike]) == list(texts[0][:alike])
    if shared < 8:
        assert len({ask.prompt for ask in asks}) == 8
    if kind == "ids":
        assert all(3 <= each < 300 for text in texts for each in text if isinstance(each, int))


def test_lognormal_lengths_have_their_mean_and_are_cut_at_their_most() -> None:
    lengths = Lengths.parse("lognormal:256:0.6", "--input")
    assert str(lengths) == "lognormal:256:0.6:2048"
    random = Random(1)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(256, rel=0.03)
    assert statistics.median(drawn) == pytest.approx(256 * math.exp(-0.18), rel=0.03)
    assert max(Lengths.parse("lognormal:99:3:100", "").draw(random) for _ in range(99)) == 100
    assert min(Lengths.parse("lognormal:1:3", "").draw(random) for _ in range(99)) == 1


def test_several_prefixes_are_shared_by_equal_parts() -> None:
    prompts = Prompts(exactly(20), exactly(4), shared_prefix=8, seed=3, prefixes=3)
    begins = [ask.prompt[:8] for [ask] in prompts.draw(9, 0, "a")]
    assert len(set(begins)) == 3
    assert begins[:3] * 3 == begins
    assert begins == [ask.prompt[:8] for [ask] in prompts.draw(9, 5, "b")]
    assert len({ask.prompt for [ask] in prompts.draw(9, 0, "a")}) == 9


def test_conversations_have_so_many_turns_in_all() -> None:
    prompts = Prompts(exactly(9), exactly(4), shared_prefix=5, seed=3, turns=Lengths(2, 4))
    talks = prompts.draw(40, 0, "a")
    turns = list(map(len, talks))
    assert sum(turns) == 40
    assert set(turns[:-1]) == {2, 3, 4}
    assert {len(ask.prompt) for asks in talks for ask in asks} == {9}
    firsts, others = ([asks[0] for asks in talks], [asks[1] for asks in talks[:-1]])
    assert len({ask.prompt[:5] for ask in firsts}) == 1
    assert len({ask.prompt[:5] for ask in others}) == len(others)


def test_servers_get_the_same_lengths_and_no_server_the_same_prompt_twice() -> None:
    prompts = Prompts(Lengths(20, 90), Lengths(2, 50), seed=5)

    def shape(talks: list[Asks]) -> list[tuple[int, int]]:
        return [(len(ask.prompt), ask.max_tokens) for [ask] in talks]

    first, other, later = (
        prompts.draw(10, number, server) for number, server in ((0, "a"), (0, "b"), (1, "a"))
    )
    assert shape(first) == shape(other) != shape(later)
    assert len({ask.prompt for talks in (first, other, later) for [ask] in talks}) == 30
    assert first == prompts.draw(10, 0, "a")


def test_a_file_of_conversations_gives_questions_and_lengths_of_answers(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"

    def talk(*turns: str) -> object:
        return {"conversations": [{"from": "x", "value": turn} for turn in turns]}

    told = [talk("What?", "y" * 400), talk("alone"), talk("Why?", "no"), talk("", "x" * 80)]
    file.write_text(json.dumps([*told, talk("Long?", "z" * 99_999)]))
    assert read_talks(file) == [[Ask("What?", 100)], [Ask("Why?", 4)], [Ask("Long?", 1024)]]
    prompts = Prompts(Lengths(1, 1), Lengths(1, 1), seed=1, talks=talks_of(str(file)))
    assert {ask.prompt for [ask] in prompts.draw(50, 0, "a")} == {"What?", "Why?", "Long?"}
    assert talks_of("") == ()


def test_a_file_gives_as_many_turns_as_its_conversations_have(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    said = ("one?", "x" * 40, "two?", "x" * 44, "three?", "", "four?", "x")
    file.write_text(json.dumps([{"conversations": [{"value": each} for each in said]}]))
    assert read_talks(file) == [[Ask("one?", 10), Ask("two?", 11)]]
    prompts = Prompts(exactly(1), exactly(1), talks=talks_of(str(file)), turns=exactly(5))
    talks = prompts.draw(5, 0, "a")
    assert list(map(len, talks)) == [2, 2, 1]


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"conversations": 3}]'])
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"talks\.json"):
        read_talks(file)
    with pytest.raises(ConfigError, match="ids or words"):
        kind_of("pictures")


# Servers.


@pytest.mark.parametrize(
    ("text", "name", "base"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:1/v1/", "h:1", "http://h:1"),
        ("vllm=https://h/v1", "vllm", "https://h"),
        ("a b=h:1/x", "a b", "http://h:1/x"),
        ("http://h:1/x?y=z", "h:1/x?y=z", "http://h:1/x?y=z"),
    ],
)
def test_a_server_is_a_url_with_or_without_a_name(text: str, name: str, base: str) -> None:
    server = Server.parse(text)
    assert (server.name, server.base) == (name, base)


def test_a_dialect_is_one_of_two() -> None:
    assert Server.parse("h:1", form_of("generate")).url == "http://h:1/generate"
    with pytest.raises(ConfigError, match="--dialect 'chat'"):
        form_of("chat")


@pytest.mark.parametrize("text", ["", "a=", "=http://h", "ftp://h", "http://"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME="):
        Server.parse(text)


async def test_a_request_is_greedy_streamed_and_of_full_length() -> None:
    scripted = Scripted()
    async with serving(scripted) as url, client(5.0, "secret") as session:
        server = await Server.parse(f"a={url}/v1").named(session, "")
        record = await sender(session, server)(server.body(Ask((4, 5), 7)))
    assert told_by(record).tokens == 3
    assert scripted.keys == ["Bearer secret"]
    [body] = scripted.bodies
    assert body == {
        "model": "scripted",
        "prompt": [4, 5],
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_steady_load_keeps_its_concurrency_and_reports_each_request() -> None:
    scripted, done = Scripted(gather=3), list[Record]()
    async with serving(scripted) as url, client(5.0) as session:
        server = Server("a", url, "m")
        ran = await steady(sender(session, server), once(7), 3, done.append)
    assert (len(ran.records), scripted.most_in_flight) == (7, 3)
    assert done == list(ran.records)
    assert 0 < ran.client_share < 10


async def test_requests_by_chance_do_not_wait_for_each_other() -> None:
    scripted = Scripted(gather=6)  # nobody is answered before all are there
    async with serving(scripted) as url, client(5.0) as session:
        send_one = sender(session, Server("a", url, "m"))
        ran = await arriving(send_one, once(6), itertools.repeat(0.001), 6, nothing)
    assert scripted.most_in_flight == 6
    assert all(told_by(record).tokens == 3 for record in ran.records)


async def test_arrivals_are_as_far_apart_as_their_gaps_say() -> None:
    began = list[float]()

    async def note(_body: bytes) -> Record:
        began.append(time.perf_counter())
        return Record(began[-1], began[-1])

    gaps = [0.001, 0.02, 0.0, 0.03]
    await arriving(note, once(5), iter([*gaps, 1.0]), 5, nothing)
    assert began[-1] - began[0] >= sum(gaps)  # never early
    assert len(began) == 5


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_arrivals_keep_their_rate_and_come_as_evenly_as_they_should(
    burstiness: float, variation: float
) -> None:
    random = Random(1)
    gaps = [Arrivals(50.0, burstiness).gap(random) for _ in range(20_000)]
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("most", [6, 2])
async def test_all_at_once_are_all_at_once_unless_so_few_may_be_in_flight(most: int) -> None:
    seen, under_way = list[int](), list[bytes]()

    async def note(body: bytes) -> Record:
        under_way.append(body)
        for _ in range(3):
            await asyncio.sleep(0)
        seen.append(len(under_way))
        under_way.remove(body)
        return Record(0.0, 1.0)

    gaps = map(Arrivals(math.inf).gap, itertools.repeat(Random(1)))
    ran = await arriving(note, once(6), gaps, most, nothing)
    assert (max(seen), len(ran.records)) == (most, 6)


# Conversations.


def generated(*events: list[int]) -> list[Piece]:
    told = [
        {"output": "é", "output_ids": ids, "finish_reason": None if ids else "stop"}
        for ids in events
    ]
    return [Piece(1.0, b"data: " + json.dumps(each).encode() + b"\n\n") for each in told]


def test_a_turn_asks_with_all_that_was_said_before() -> None:
    server = Server("a", "http://a", form="generate")
    talk = Talk(server.body, [Ask((1, 2), 3), Ask((6, 7), 4), Ask((9,), 5)])
    assert talk.hear(Record(0.0, 1.0, generated([3, 4], [5], []))) == []
    assert json.loads(talk.body or b"")["prompt"] == [1, 2, 3, 4, 5, 6, 7]
    assert talk.turns == 2
    talk.hear(Record(0.0, 1.0, generated([8], [])))
    assert json.loads(talk.body or b"")["prompt"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert json.loads(talk.body or b"")["sampling_params"]["max_tokens"] == 5
    assert talk.hear(Record(0.0, 1.0, generated([8], []))) == []
    assert (talk.body, talk.turns) == (None, 0)


def test_a_text_turn_asks_with_the_text() -> None:
    talk = Talk(Server("a", "http://a").body, [Ask("why", 3), Ask("and then", 4)])
    talk.hear(Record(0.0, 1.0, [Piece(1.0, each) for each in WHOLE]))
    assert json.loads(talk.body or b"")["prompt"] == "whyabc and then"


def test_turns_after_one_that_failed_are_failures_too() -> None:
    talk = Talk(Server("a", "http://a").body, [Ask("a", 3), Ask("b", 4), Ask("c", 4)])
    lost = talk.hear(Record(0.0, 2.0, failure="timeout"))
    assert [told_by(each).failure for each in lost] == [LOST, LOST]
    assert (talk.body, talk.turns) == (None, 0)


@pytest.mark.parametrize("comes", [True, False])
async def test_turns_follow_one_another_and_conversations_do_not(comes: bool) -> None:
    scripted, done = Scripted(gather=2), list[Record]()
    async with serving(scripted) as url, client(5.0) as session:
        server = Server("a", url, "m")
        talks = [Talk(server.body, [Ask(f"{name}{n}", 3) for n in range(3)]) for name in "ab"]
        send_one = sender(session, server)
        if comes:
            ran = await arriving(send_one, talks, itertools.repeat(0.0), 2, done.append)
        else:
            ran = await steady(send_one, talks, 2, done.append)
    assert len(ran.records) == len(done) == 6
    assert scripted.most_in_flight == 2
    asked = [body["prompt"] for body in scripted.bodies]
    assert [each for each in asked if each[0] == "a"] == ["a0", "a0abc a1", "a0abc a1abc a2"]


async def test_failures_have_codes_and_reasons() -> None:
    cut = (b"data: {}\n\n",)
    scripted = Scripted(script=[429, 503, cut])
    async with serving(scripted) as url, client(5.0) as session:
        ran = await steady(sender(session, Server("a", url, "m")), once(3), 1, nothing)
    codes = [told_by(record).failure for record in ran.records]
    assert codes == ["overloaded", "overloaded", "cut_off"]
    async with client(5.0) as session:
        nobody = await sender(session, Server("a", url, "m"))(b"{}")
    assert nobody.failure == "unreachable"
    assert nobody.ended >= nobody.began


async def test_a_server_that_serves_each_connection_once_loses_no_request() -> None:
    scripted = Scripted(serves_once=True)
    async with serving(scripted) as url, client(5.0) as session:
        ran = await steady(sender(session, Server("a", url, "m")), once(4), 2, nothing)
    assert [told_by(record).failure for record in ran.records] == [""] * 4


async def test_a_server_that_says_nothing_is_left_in_time() -> None:
    scripted = Scripted(gather=2)
    async with serving(scripted) as url, client(0.05) as session:
        record = await sender(session, Server("a", url, "m"))(b"{}")
    assert record.failure == "timeout"


async def test_a_cancelled_request_keeps_what_came_before() -> None:
    class Watched(list[Piece]):
        def append(self, piece: Piece) -> None:
            super().append(piece)
            request.cancel()

    scripted = Scripted(script=[(event("a"),)], stall=asyncio.Event())
    async with serving(scripted) as url, client(5.0) as session:
        record = Record(0.0, pieces=Watched())
        sending = send(session, f"{url}/v1/completions", b"{}", record, time.perf_counter)
        request = asyncio.ensure_future(sending)
        await asyncio.wait([request])
        assert scripted.stall is not None
        scripted.stall.set()
    assert request.cancelled()
    assert (len(record.pieces), record.ended, record.failure) == (1, 0.0, "")


def test_the_clients_share_is_of_one_core() -> None:
    assert Ran([], 4.0, 1.0).client_share == 0.25
