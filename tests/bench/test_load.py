"""The load client: what it sends, how it reads streams, and that no failure is silent."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.bench.heard import Piece, Record, Told, events, told_by
from pdrt.bench.load import Ran, Server, client, poisson, send, sender, steady
from pdrt.bench.prompts import Ask, Lengths, Prompts, kind_of, read_talks, talks_of
from pdrt.errors import ConfigError
from tests.bench.scripted import LAST, WHOLE, Scripted, event, serving

STREAM = b"".join(WHOLE)


def nothing(_record: Record) -> None:
    """Nobody watches."""


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
    asks = prompts.draw(8, 0, "a")
    texts = [ask.prompt.split() if isinstance(ask.prompt, str) else ask.prompt for ask in asks]
    assert all(20 <= len(text) <= 20 + most for text in texts)
    for text in texts[1:]:
        alike = min(shared, len(texts[0]) - 1, len(text) - 1)
        assert list(text[:alike]) == list(texts[0][:alike])
    if shared < 8:
        assert len({ask.prompt for ask in asks}) == 8
    if kind == "ids":
        assert all(3 <= each < 300 for text in texts for each in text if isinstance(each, int))


def test_servers_get_the_same_lengths_and_no_server_the_same_prompt_twice() -> None:
    prompts = Prompts(Lengths(20, 90), Lengths(2, 50), seed=5)

    def shape(asks: list[Ask]) -> list[tuple[int, int]]:
        return [(len(ask.prompt), ask.max_tokens) for ask in asks]

    first, other, later = (
        prompts.draw(10, number, server) for number, server in ((0, "a"), (0, "b"), (1, "a"))
    )
    assert shape(first) == shape(other) != shape(later)
    assert len({ask.prompt for asks in (first, other, later) for ask in asks}) == 30
    assert first == prompts.draw(10, 0, "a")


def test_a_file_of_conversations_gives_questions_and_lengths_of_answers(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"

    def talk(*turns: str) -> object:
        return {"conversations": [{"from": "x", "value": turn} for turn in turns]}

    told = [talk("What?", "y" * 400), talk("alone"), talk("Why?", "no"), talk("", "x" * 80)]
    file.write_text(json.dumps([*told, talk("Long?", "z" * 99_999)]))
    assert read_talks(file) == [Ask("What?", 100), Ask("Why?", 4), Ask("Long?", 1024)]
    prompts = Prompts(Lengths(1, 1), Lengths(1, 1), seed=1, talks=talks_of(str(file)))
    assert {ask.prompt for ask in prompts.draw(50, 0, "a")} == {"What?", "Why?", "Long?"}
    assert talks_of("") == ()


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
        ran = await steady(sender(session, server), [b"{}"] * 7, 3, done.append)
    assert (len(ran.records), scripted.most_in_flight) == (7, 3)
    assert done == list(ran.records)
    assert 0 < ran.client_share < 10


async def test_requests_by_chance_do_not_wait_for_each_other() -> None:
    scripted = Scripted(gather=6)  # nobody is answered before all are there
    async with serving(scripted) as url, client(5.0) as session:
        send_one = sender(session, Server("a", url, "m"))
        ran = await poisson(send_one, [b"{}"] * 6, 1000.0, Random(1), nothing)
    assert scripted.most_in_flight == 6
    assert all(told_by(record).tokens == 3 for record in ran.records)


async def test_arrivals_are_as_far_apart_as_the_rate_says() -> None:
    began = list[float]()

    async def note(_body: bytes) -> Record:
        began.append(time.perf_counter())
        return Record(began[-1], began[-1])

    await poisson(note, [b""] * 60, 500.0, Random(3), nothing)
    random = Random(3)
    expected = sum(random.expovariate(500.0) for _ in range(59))
    assert began[-1] - began[0] >= expected  # never early


async def test_failures_have_codes_and_reasons() -> None:
    cut = (b"data: {}\n\n",)
    scripted = Scripted(script=[429, 503, cut])
    async with serving(scripted) as url, client(5.0) as session:
        ran = await steady(sender(session, Server("a", url, "m")), [b"{}"] * 3, 1, nothing)
    codes = [told_by(record).failure for record in ran.records]
    assert codes == ["overloaded", "overloaded", "cut_off"]
    async with client(5.0) as session:
        nobody = await sender(session, Server("a", url, "m"))(b"{}")
    assert nobody.failure == "unreachable"
    assert nobody.ended >= nobody.began


async def test_a_server_that_serves_each_connection_once_loses_no_request() -> None:
    scripted = Scripted(serves_once=True)
    async with serving(scripted) as url, client(5.0) as session:
        ran = await steady(sender(session, Server("a", url, "m")), [b"{}"] * 4, 2, nothing)
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
