"""`pdrt chat` against a server that says what the test wants."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from pdrt.chat import Manner, chat, data_lines, questions
from pdrt.errors import Unauthorized, Unavailable


@dataclass
class Server:
    """An OpenAI-like server in a thread of its own; `answers` are given in turn."""

    answers: list[list[Any] | tuple[int, Any]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    # One release for each answer that was written to its end, with the client still there.
    whole: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    wants_key: bool = False
    interrupts: bool = False  # Ctrl-C in the middle of an answer
    url: str = ""

    async def models(self, _request: web.Request) -> web.Response:
        if self.wants_key:
            return web.json_response(WANTS_KEY, status=401)
        return web.json_response({"object": "list", "data": [{"id": "small"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return web.json_response(answer[1], status=answer[0])
        response = web.StreamResponse(headers={"x-pd-path": "disagg"})
        await response.prepare(request)
        for event in answer:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        if self.interrupts:
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()  # until the client hangs up
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(0)
        await response.write_eof()
        self.whole.release()
        return response


@pytest.fixture
def server() -> Iterator[Server]:
    made, ready = Server([]), threading.Event()
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop

    async def serve() -> None:
        nonlocal stop, loop
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", made.models)
        app.router.add_post("/v1/chat/completions", made.completions)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield made
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def say(*pieces: str) -> list[Any]:
    head = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    texts = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    return [head, *texts, {"choices": [], "usage": {"completion_tokens": 7}}]


def talk(manner: Manner, *lines: str, terminal: bool = False) -> tuple[int, str]:
    """(exit status, what stands on the terminal) of a piped conversation."""
    console = Console(file=io.StringIO(), width=300, force_terminal=terminal, color_system=None)
    status = chat(manner, console, io.StringIO("".join(f"{line}\n" for line in lines)))
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_an_answer_is_printed_as_it_comes(server: Server) -> None:
    server.answers = [say("Hel", "lo, [b]wörld[/b]")]
    assert talk(Manner(url=server.url), "hi") == (0, "Hello, [b]wörld[/b]\n")
    (asked,) = server.asked
    assert asked["model"] == "small"
    assert asked["stream"] is True
    assert asked["messages"] == [{"role": "user", "content": "hi"}]


def test_a_conversation_remembers_and_forgets(server: Server) -> None:
    server.answers = [say("one"), say("two"), say("three")]
    manner = Manner(url=f"{server.url}/v1/", model="m", system="be brief", api_key="k")
    assert talk(manner, "a", "", "b", "/new", "c", "/quit", "never asked")[0] == 0
    system = {"role": "system", "content": "be brief"}
    said = [[(m["role"], m["content"]) for m in asked["messages"][1:]] for asked in server.asked]
    assert [asked["messages"][0] for asked in server.asked] == [system] * 3
    assert said == [
        [("user", "a")],
        [("user", "a"), ("assistant", "one"), ("user", "b")],
        [("user", "c")],
    ]
    assert server.keys == ["Bearer k"] * 3


def test_on_a_terminal_it_says_how_fast_and_by_which_path(server: Server) -> None:
    server.answers = [say("x")]
    _, out = talk(Manner(url=server.url), "hi", terminal=True)
    assert "7 tokens, first after" in out
    assert "disagg" in out


TOO_LONG = {"error": {"code": "too_long", "message": "9000 tokens", "type": "x", "stage": "router"}}
WANTS_KEY = {"error": {"code": "unauthorized", "message": "no key", "type": "x", "stage": "r"}}
LOST = {"error": {"code": "peer_lost", "message": "decode died", "type": "x", "stage": "decode"}}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((400, TOO_LONG), "too_long: 9000 tokens"),
        ([{"choices": [{"delta": {"content": "Hel"}}]}, LOST], "peer_lost: decode died"),
        (["{not json"], "no JSON"),
    ],
)
def test_an_error_is_shown_and_the_conversation_goes_on(
    answer: list[Any] | tuple[int, Any], says: str, server: Server
) -> None:
    server.answers = [answer, say("fine")]
    status, out = talk(Manner(url=server.url), "a", "b")
    assert status == 1
    assert says in out
    assert out.endswith("fine\n")


def test_a_question_that_failed_is_not_remembered(server: Server) -> None:
    server.answers = [(400, TOO_LONG), say("fine")]
    talk(Manner(url=server.url), "a", "b")
    assert server.asked[1]["messages"] == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_nobody_there_is_a_clear_error(url: str) -> None:
    says = (
        r"^nobody serves at http://127.0.0.1:1/v1 \(Connection refused\): is `pdrt up` running\?$"
    )
    with pytest.raises(Unavailable, match=says):
        talk(Manner(url=url), "hi")


def test_who_needs_a_key_is_told_how_to_give_it(server: Server) -> None:
    server.wants_key = True
    with pytest.raises(Unauthorized, match="PDRT_API_KEY"):
        talk(Manner(url=server.url), "hi")


def test_what_looks_like_a_command_is_no_question(server: Server) -> None:
    server.answers = [say("yes")]
    _, out = talk(Manner(url=server.url), "/nwe", "/etc/hosts exists?", terminal=True)
    assert "there is no /nwe" in out
    assert [asked["messages"][0]["content"] for asked in server.asked] == ["/etc/hosts exists?"]


def test_an_answer_is_read_to_its_end_so_that_nobody_seems_to_have_left(server: Server) -> None:
    server.answers = [say("one"), say("two")]
    talk(Manner(url=server.url), "a", "b")
    # The client has the end in hand before the server's handler has ended: waited for.
    assert server.whole.acquire(timeout=10)
    assert server.whole.acquire(timeout=10)


def test_ctrl_c_ends_the_answer_and_nothing_else(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    server.answers, server.interrupts = [say("one"), say("two")], True
    status, out = talk(Manner(url=server.url), "a", "b", terminal=True)
    assert status == 0
    assert "stopped" in out
    assert "two" in out
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
async def test_events_are_read_however_the_bytes_are_cut(cut: int) -> None:
    stream = 'event: x\r\ndata: {"a": "é"}\r\n\r\n: note\ndata:two\n\ndata: [DONE]\n\ndata: no\n'
    data = stream.encode()

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), cut):
            yield data[at : at + cut]

    assert [line async for line in data_lines(chunks())] == ['{"a": "é"}', "two"]


@pytest.mark.parametrize(
    ("keys", "notes"),
    [
        (["hi", EOFError], 0),
        (["hi", KeyboardInterrupt, KeyboardInterrupt], 1),
        ([KeyboardInterrupt, "hi", KeyboardInterrupt, EOFError], 2),
    ],
)
def test_a_person_leaves_with_ctrl_d_or_two_ctrl_c(
    keys: list[str | type[BaseException]], notes: int
) -> None:
    typed, noted = iter(keys), list[str]()

    def prompt() -> str:
        key = next(typed)
        if isinstance(key, str):
            return key
        raise key

    assert list(questions(io.StringIO(), prompt, noted.append)) == ["hi"]
    assert len(noted) == notes
    assert not list(typed)
