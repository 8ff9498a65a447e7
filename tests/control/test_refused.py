"""What the router itself refuses, and what it cannot serve any more, is in its log."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from pdrt.keys import ClusterKey
from tests.control.fake_leader import status
from tests.control.router_rig import rig, until


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {"prompt": "x", "seed": "a"}, "bad_request"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, "not_found"),
        ("/no/such", {}, "not_found"),
    ],
)
async def test_a_refusal_is_found_by_its_request_id(path: str, body: Any, code: str) -> None:
    async with rig() as r:
        with capture_logs() as logs:
            got = await r.send(body, path=path)
        (line,) = (each for each in logs if each["event"] == "refused")
        assert line["request_id"] == got.headers["x-request-id"]
        assert (line["code"], line["status"], line["log_level"]) == (code, got.status, "info")
        assert line["error"] == got.error["message"]
        assert not any(each["event"] == "request" for each in logs)


async def test_that_nobody_can_serve_is_a_warning_and_so_is_why() -> None:
    with capture_logs() as logs:
        async with rig() as r:
            assert not any(each["event"] == "not_ready" for each in logs)  # it only begins
            await r.lose(r.decode[0])
            await r.send()
        assert [each["event"] for each in logs].count("not_ready") == 1
        warnings = {each["event"]: each for each in logs if each["log_level"] == "warning"}
        assert set(warnings) == {"instance", "not_ready", "refused"}
        assert "no healthy decode instance" in warnings["not_ready"]["reason"]
        assert (warnings["refused"]["code"], warnings["refused"]["status"]) == ("no_decode", 503)


async def test_a_request_that_an_instance_failed_has_one_line() -> None:
    async with rig() as r:
        r.decode[0].plays.append(status(400, "what is this", "bad_request"))
        with capture_logs() as logs:
            assert (await r.send()).status == 400
        assert [each["event"] for each in logs].count("request") == 1
        assert not any(each["event"] == "refused" for each in logs)


async def test_of_an_instance_with_another_key_it_is_said_what_to_do() -> None:
    async with rig() as r:
        leader = r.decode[0]
        await r.lose(leader)
        leader.key = ClusterKey.from_text("another one, long enough to be a key")
        await leader.start()
        r.instance(leader).nudged.set()
        await until(lambda: "cluster key" in r.instance(leader).reason)
        got = await r.get("/ready")
        assert got.status == 503
        assert b"[security] key_file must name the same key" in got.body
