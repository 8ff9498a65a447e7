"""The page's parts: one file that runs nothing but its own script, and that is in the wheel."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from pdrt.control.dashboard.page import load, policy
from pdrt.control.overview import VERSION

ROOT = Path(__file__).parents[2]
PARTS = sorted((ROOT / "pdrt/control/dashboard").glob("*.*[!y]"))


def page() -> str:
    return load().body.decode()


def inside(tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", page(), re.S)


@pytest.mark.parametrize("tag", ["script", "style"])
def test_what_the_header_allows_is_what_stands_in_the_page(tag: str) -> None:
    (text,) = inside(tag)
    found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{found}'" in dict(load().headers)["content-security-policy"]


def test_nothing_else_is_allowed() -> None:
    allowed = dict(part.split(" ", 1) for part in policy("a", "b").split("; "))
    assert allowed.pop("connect-src") == "'self'"
    assert allowed.pop("img-src") == "data:"
    assert allowed.pop("style-src").startswith("'sha256-")
    assert allowed.pop("script-src").startswith("'sha256-")
    assert set(allowed.values()) == {"'none'"}


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = page()
    assert "/*style*/" not in text
    assert "/*script*/" not in text
    without_svg = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(src|href)=[\"'](?!data:)|https?://(?!\$)|url\(|@import", without_svg)
    assert not re.search(r"\son\w+=|\sstyle=", text)  # no attribute that the header forbids


def test_no_data_is_ever_read_as_html() -> None:
    """Elements are made by name, and words become text nodes."""
    script = "\n".join(path.read_text() for path in PARTS if path.suffix == ".js")
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert way not in script
    assert "localStorage" not in script.replace("sessionStorage", "")


def test_the_page_reads_the_version_that_the_router_tells() -> None:
    assert f"view.version !== {VERSION}" in page()


def test_the_parts_are_small() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in PARTS}
    assert sizes.keys() >= {"page.html", "style.css", "core.js", "main.js"}
    assert {name for name, lines in sizes.items() if lines > 400} == set()
    assert len(load().body) < 60_000


def test_the_wheel_has_every_part_of_the_page(tmp_path: Path) -> None:
    hatch = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    wheel = next(iter(hatch.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"pdrt/control/dashboard/{path.name}" for path in PARTS} <= names
