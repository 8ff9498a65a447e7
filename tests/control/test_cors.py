"""CORS: pages of the named origins may read answers and errors, and nobody else's."""

from __future__ import annotations

import pytest
from multidict import CIMultiDictProxy

from pdrt.config import RouterConfig, SecuritySection
from pdrt.errors import ConfigError
from pdrt.settings import check
from tests.control.router_rig import Rig, rig

PAGE = "https://chat.example.org"


def allow(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    prefix = "access-control-"
    return {n.lower().removeprefix(prefix): v for n, v in headers.items() if prefix in n.lower()}


async def preflight(r: Rig, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
        **headers,
    }
    async with r.session.options(r.url + "/v1/chat/completions", headers=asked) as answer:
        return answer.status, allow(answer.headers)


async def test_a_named_page_may_ask_without_a_key_whether_it_may() -> None:
    async with rig(security={"cors_origins": [PAGE], "api_keys": ["k"]}) as r:
        status, told = await preflight(r, PAGE)
        assert status == 204
        assert told["allow-origin"] == PAGE
        assert told["allow-headers"] == "authorization,content-type"
        assert "POST" in told["allow-methods"]
        assert "allow-credentials" not in told


async def test_a_named_page_may_read_answers_and_errors() -> None:
    async with rig(security={"cors_origins": [PAGE], "api_keys": ["k"]}) as r:
        key = {"origin": PAGE, "authorization": "Bearer k"}
        for got in (
            await r.send(headers=key),
            await r.send({"no": "prompt"}, headers=key),
            await r.send(headers={"origin": PAGE}),
            await r.get("/nowhere", key),
        ):
            told = allow(got.headers)
            assert told["allow-origin"] == PAGE, got.status
            assert "retry-after" in told["expose-headers"]
            assert got.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", ["https://evil.example.org", "null", f"{PAGE}.evil.org"])
async def test_other_pages_are_told_nothing(origin: str) -> None:
    async with rig(security={"cors_origins": [PAGE]}) as r:
        assert "allow-origin" not in (await preflight(r, origin))[1]
        got = await r.send(headers={"origin": origin})
        assert allow(got.headers) == {}
        assert got.headers["vary"] == "origin"  # a cache must not give it to a named one


async def test_any_page_may_ask_where_all_are_named() -> None:
    async with rig(security={"cors_origins": ["*"]}) as r:
        assert (await preflight(r, "null"))[1]["allow-origin"] == "*"
        assert allow((await r.send(headers={"origin": PAGE})).headers)["allow-origin"] == "*"
        assert allow((await r.send()).headers) == {}


async def test_nothing_is_said_of_it_by_default() -> None:
    async with rig() as r:
        status, told = await preflight(r, PAGE)
        assert (status, told) == (405, {})
        assert allow((await r.send(headers={"origin": PAGE})).headers) == {}


async def test_a_header_that_is_no_list_of_names_is_not_echoed() -> None:
    async with rig(security={"cors_origins": ["*"]}) as r:
        strange = {"access-control-request-headers": "a b; c=<d>"}
        assert "allow-headers" not in (await preflight(r, PAGE, **strange))[1]


@pytest.mark.parametrize(
    "origins",
    [
        ["https://a.org/"],
        ["a.org"],
        ["https://a.org/path"],
        ["*", PAGE],
        ["https://A.org"],
        ["https://a.org\r\nx: y"],
    ],
)
def test_what_no_browser_sends_is_refused_at_the_start(origins: list[str]) -> None:
    tables = {"hybrid": [{"http": "h:1"}], "security": {"cors_origins": origins}}
    with pytest.raises(ConfigError, match="cors_origins"):
        check(RouterConfig, tables, "router.toml")


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:5173", "http://[::1]:3000", "app://x"])
def test_what_browsers_send_is_taken(origin: str) -> None:
    assert SecuritySection(cors_origins=(origin,)).cors_origins == (origin,)
