"""The pictures of docs/img, drawn by a browser from sample data.

python -m tests.pictures      needs chromium and playwright; look at what it wrote
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from playwright.async_api import Browser, async_playwright

from tests.control.overview_samples import Cluster, with_a_dead_one, with_errors
from tests.control.test_dashboard_browser import CHROMIUM, Site, serving

IMAGES: Final = Path(__file__).parent.parent / "docs/img"
_HEIGHT: Final = 860
Scheme = Literal["light", "dark"]
PICTURES: Final[Mapping[str, tuple[Callable[[], Cluster], Scheme]]] = {
    "dashboard.png": (with_errors, "light"),
    "dashboard-dark.png": (with_a_dead_one, "dark"),
}


async def draw(browser: Browser, name: str, made: Cluster, scheme: Scheme) -> None:
    size = {"width": 1280, "height": _HEIGHT}
    async with serving(Site(made.view())) as site:
        page = await browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        await page.goto(site.url)
        await page.locator("#picture > svg").wait_for()
        await page.screenshot(path=IMAGES / name)
        await page.close()


async def main() -> None:
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, (make, scheme) in PICTURES.items():
            await draw(browser, name, make(), scheme)
        await browser.close()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    asyncio.run(main())
