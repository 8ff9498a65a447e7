"""The page in a real browser: what it shows, what it says when nobody answers, what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from aiohttp import web

from pdrt.control.dashboard.page import CONTENT_TYPE, load
from pdrt.control.http import Json
from tests.control.overview_samples import (
    Cluster,
    cluster,
    under_load,
    with_a_dead_one,
    with_errors,
)
from tests.control.router_rig import rig

if TYPE_CHECKING:
    from playwright import async_api as api
else:
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
EVIL = "<img src=x onerror=window.hit=1><script>window.hit=1</script>&amp;\u202e\u0000'\"`"

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[api.Browser]:
    async with api.async_playwright() as play:
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        found = await play.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        await found.close()


@dataclass
class Site:
    """Serves the page, and as its overview whatever a test puts here."""

    view: Json = field(default_factory=dict)
    key: str = ""
    status: int = 200
    url: str = ""
    looks: int = 0
    made: Cluster | None = None  # asked anew each time

    async def page(self, _request: web.Request) -> web.Response:
        page = load()
        return web.Response(
            body=page.body, headers={**dict(page.headers), "content-type": CONTENT_TYPE}
        )

    async def overview(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {}}, status=401)
        seconds = int(request.query["seconds"])
        view = self.view if self.made is None else self.made.view(seconds)
        return web.json_response(view, status=self.status)


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[Site]:
    app = web.Application()
    app.router.add_get("/", site.page)
    app.router.add_get("/overview", site.overview)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield site
    finally:
        await runner.cleanup()


@dataclass
class Seen:
    page: api.Page
    troubles: list[str] = field(default_factory=list)  # what the console said
    asked: list[str] = field(default_factory=list)

    async def later(self, seconds: int) -> None:
        await self.page.clock.run_for(seconds * 1000)

    async def text(self, where: str) -> str:
        return str(await self.page.locator(where).inner_text())

    async def shows(self, where: str, words: str) -> None:
        await api.expect(self.page.locator(where)).to_contain_text(words, timeout=15_000)


@asynccontextmanager
async def looking(
    browser: api.Browser,
    url: str,
    width: int = 1280,
    scheme: Literal["light", "dark"] = "light",
    shown: str = "#main",
) -> AsyncIterator[Seen]:
    context = await browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    try:
        page = await context.new_page()
        await page.clock.install()
        seen = Seen(page)
        page.on("console", lambda said: seen.troubles.append(said.text))
        page.on("pageerror", lambda error: seen.troubles.append(str(error)))
        page.on("request", lambda request: seen.asked.append(request.url))
        await page.goto(url)
        await page.locator(shown).wait_for(state="visible", timeout=15_000)
        yield seen
    finally:
        await context.close()


@asynccontextmanager
async def shown(browser: api.Browser, made: Cluster, width: int = 1280) -> AsyncIterator[Seen]:
    async with serving(Site(made.view())) as site, looking(browser, site.url, width) as seen:
        yield seen


async def test_a_busy_cluster_is_shown_whole(browser: api.Browser) -> None:
    async with shown(browser, with_errors()) as seen:
        await seen.shows("#ready", "ready")
        await seen.shows("#picture", "127.0.0.4:8003")
        await seen.shows("#picture", "KV 411 MB/s · shm")
        await seen.shows("#picture", "starting")
        await seen.shows("#charts", "TTFT")
        await seen.shows("#charts", "1,001")
        await api.expect(
            seen.page.get_by_role("cell", name="decode", exact=True)
        ).not_to_have_count(0)
        await seen.shows("#requests", "KV is moving")
        await seen.shows("#errors", "did not come within 10 s")
        await seen.shows("#pairs", "a fault since")
        assert await seen.page.locator("#instances tbody tr").count() == 4
        assert await seen.page.locator(".plot path.one").count() == 5
        assert not seen.troubles
        assert {urlsplit(url).path for url in seen.asked} == {"/", "/overview"}


@pytest.mark.slow
async def test_a_dead_instance_stands_out_with_its_reason(browser: api.Browser) -> None:
    async with shown(browser, with_a_dead_one()) as seen:
        await seen.shows("#picture", "Connection refused")
        assert await seen.page.locator("#picture .box.bad").count() == 1
        first = seen.page.locator("#instances tbody tr").first
        assert "prefill 127.0.0.3:8002" in await first.inner_text()
        assert "down" in await first.inner_text()


async def test_an_empty_cluster_says_what_to_do(browser: api.Browser) -> None:
    async with shown(browser, Cluster()) as seen:
        await seen.shows("#picture", "pdrt up")
        await seen.shows("#requests", "curl http://127.0.0.1")
        await seen.shows("#errors", "No client has been told of an error")
        await seen.shows("#banner", "Not ready: no healthy prefill instance")
        await seen.shows("#charts", "no request in 5 minutes")
        assert not seen.troubles


async def test_names_from_data_are_words_and_never_html(browser: api.Browser) -> None:
    view = with_errors().view()
    for row in view["instances"]:
        row |= {"name": f"prefill {EVIL}", "model": EVIL, "reason": EVIL, "condition": EVIL}
    for row in view["pairs"]:
        row |= {"reason": EVIL, "trust": EVIL, "transport": EVIL, "path": EVIL}
    for row in view["requests"]:
        row |= {"request_id": EVIL, "stage": EVIL, "path": EVIL, "decode": EVIL}
    for row in view["errors"]:
        row |= {"code": EVIL, "stage": EVIL, "message": EVIL, "request_id": EVIL}
    view["models"] = [EVIL]
    view["router"] |= {"pdrt": EVIL, "is_ready": False, "reason": EVIL}
    async with serving(Site(view)) as site, looking(browser, site.url) as seen:
        for where in ("#instances", "#requests", "#errors", "#pairs", "#facts", "#banner"):
            await seen.shows(where, "<img src=x onerror=window.hit=1>")
        assert await seen.page.evaluate("window.hit") is None
        assert await seen.page.locator("img, main script").count() == 0
        assert not seen.troubles


@pytest.mark.slow
async def test_what_is_missing_from_the_data_breaks_nothing(browser: api.Browser) -> None:
    made = cluster(prefill=1, decode=1)
    made.prefill[0].died("cannot connect")
    made.decode[0].died("cannot connect")
    async with shown(browser, made) as seen:
        await seen.shows("#instances", "down")
        assert not seen.troubles


async def test_a_key_is_asked_for_and_kept_for_the_tab_only(browser: api.Browser) -> None:
    site = Site(cluster().view(), key="right")
    async with serving(site), looking(browser, site.url, shown="#ask") as seen:
        page = seen.page
        await seen.shows("#ask-why", "kept in this browser tab")
        await page.fill("#ask-key", "wrong")
        await page.keyboard.press("Enter")
        await seen.shows("#ask-why", "That key was refused")
        await page.fill("#ask-key", "right")
        await page.keyboard.press("Enter")
        await page.locator("#main").wait_for(state="visible")
        assert await page.evaluate("sessionStorage.getItem('pdrt-api-key')") == "right"
        assert await page.evaluate("localStorage.length") == 0
        assert await page.locator("#ask").is_hidden()
        await page.reload()
        await page.locator("#main").wait_for(state="visible")


async def test_old_data_is_said_to_be_old_until_the_router_is_back(browser: api.Browser) -> None:
    site = Site(cluster().view())
    async with serving(site), looking(browser, site.url) as seen:
        assert await seen.page.locator("#banner").is_hidden()
        site.status = 500
        await seen.later(5)
        await seen.shows("#banner", "old: the router answered 500")
        await seen.shows("#ready", "no answer")
        assert "old" in (await seen.page.locator("#main").get_attribute("class") or "")
        site.status = 200
        await seen.later(20)
        await seen.shows("#fresh", "live")
        await api.expect(seen.page.locator("#banner")).to_be_hidden()
        await seen.shows("#ready", "ready")


@pytest.mark.slow
async def test_a_router_that_is_gone_is_said_to_be_gone(browser: api.Browser) -> None:
    async with serving(Site(cluster().view())) as site, looking(browser, site.url) as seen:
        await seen.page.route("**/overview*", lambda route: route.abort())
        await seen.later(5)
        await seen.shows("#banner", " old: no ")


@pytest.mark.slow
async def test_nobody_is_asked_often_while_nobody_answers(browser: api.Browser) -> None:
    site = Site(cluster().view(), status=500)
    async with serving(site), looking(browser, site.url, shown="#banner") as seen:
        await seen.shows("#banner", "The router does not answer: the router answered 500")
        for _ in range(60):
            await seen.later(1)
        assert site.looks < 15


@pytest.mark.slow
async def test_another_version_is_refused_in_words(browser: api.Browser) -> None:
    view = {**cluster().view(), "version": 2}
    async with serving(Site(view)) as site, looking(browser, site.url, shown="#banner") as seen:
        await seen.shows("#banner", "the router tells version 2")


@pytest.mark.slow
async def test_new_seconds_are_put_after_those_that_the_page_has(browser: api.Browser) -> None:
    made = under_load(cluster(), 100)
    points = "document.querySelector('.plot path.one').getAttribute('d').match(/[ML]/g).length"
    async with serving(Site(made=made)) as site, looking(browser, site.url) as seen:
        assert await seen.page.evaluate(points) == 100
        for more in (5, 10):
            made.now += more
            await seen.later(1)
            await seen.page.wait_for_function(f"() => {points} !== 100")
        await seen.page.wait_for_function(f"() => {points} === 115")
        made.now += 60  # nobody has looked for longer than the page asks for
        await seen.page.clock.fast_forward(60_000)
        await seen.page.wait_for_function(f"() => {points} >= 175")


@pytest.mark.slow
async def test_charts_are_read_by_keyboard_too(browser: api.Browser) -> None:
    async with shown(browser, under_load(cluster())) as seen:
        plot = seen.page.locator(".plot").first
        await plot.focus()
        await seen.page.keyboard.press("PageUp")
        await seen.shows(".card >> nth=0", "30 s ago")
        assert "Arrow keys" in (await plot.get_attribute("aria-label") or "")
        await seen.page.keyboard.press("Escape")
        assert "s ago" not in await seen.text(".card >> nth=0")


@pytest.mark.slow
async def test_a_row_stays_the_same_element_from_second_to_second(browser: api.Browser) -> None:
    site = Site(with_errors().view())
    async with serving(site), looking(browser, site.url) as seen:
        kept = "document.querySelector('#errors tbody tr').kept"
        await seen.page.evaluate(f"{kept} = 1")
        looks = site.looks
        await seen.later(1)
        await seen.later(1)
        assert site.looks > looks
        assert await seen.page.evaluate(kept) == 1


def many() -> Cluster:
    made = cluster(prefill=40, decode=55, hybrid=5)
    for each in made.instances[::17]:
        each.died("cannot connect: Connection refused")
    return under_load(made, 30, 40)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
async def test_a_hundred_instances_are_a_grid(browser: api.Browser, width: int) -> None:
    async with shown(browser, many(), width) as seen:
        assert await seen.page.locator("#picture .box title, #picture g > title").count() == 100
        await seen.shows("#picture", "127.0.0.2:8001 down")
        assert await seen.page.locator("#instances tbody tr").count() == 100


SAMPLES: list[Callable[[], Cluster]] = [Cluster, with_errors, with_a_dead_one, many]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("made", SAMPLES)
async def test_nothing_is_wider_than_the_window_or_outside_the_picture(
    browser: api.Browser, made: Callable[[], Cluster], width: int
) -> None:
    async with shown(browser, made(), width) as seen:
        wide = "document.scrollingElement.scrollWidth - innerWidth"
        assert await seen.page.evaluate(wide) <= 0
        outside = """() => {
          const frame = document.querySelector("#picture").getBoundingClientRect();
          return [...document.querySelectorAll("#picture text")].filter((each) => {
            const box = each.getBoundingClientRect();
            return box.left < frame.left || box.right > frame.right || box.bottom > frame.bottom;
          }).map((each) => each.textContent);
        }"""
        assert await seen.page.evaluate(outside) == []


CONTRAST = """() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number)
      .map((c) => c / 255).map((c) => (c <= 0.04 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const found = getComputedStyle(node).backgroundColor;
    return found === "rgba(0, 0, 0, 0)" && node.parentElement ? ground(node.parentElement) : found;
  };
  const low = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || node.closest("svg")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${node.className} ${node.textContent} ${ratio.toFixed(1)}`);
  }
  return low;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_words_can_be_read_on_their_ground(
    browser: api.Browser, scheme: Literal["light", "dark"]
) -> None:
    """A contrast of 4.5 at least, as WCAG asks."""
    async with (
        serving(Site(with_errors().view())) as site,
        looking(browser, site.url, scheme=scheme) as seen,
    ):
        await seen.shows("#errors", "overloaded")
        assert await seen.page.evaluate(CONTRAST) == []


async def test_the_page_of_a_real_router_shows_its_instances(browser: api.Browser) -> None:
    async with (
        rig(security={"api_keys": ["k1"]}) as r,
        looking(browser, f"{r.url}/", shown="#ask") as seen,
    ):
        await seen.page.fill("#ask-key", "k1")
        await seen.page.keyboard.press("Enter")
        await seen.shows("#picture", f"127.0.0.1:{r.decode[0].port}")
        assert [t for t in seen.troubles if "401" not in t] == []
