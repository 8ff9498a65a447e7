"""The habits of the house that no linter holds: one idea a module, docs that are true, no leaks."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from pdrt import __version__
from pdrt.cli import app
from pdrt.config import NodeConfig
from pdrt.errors import tree
from tests import printed

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "pdrt").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
CONFS = sorted(ROOT.glob("conf/**/*.toml"))
MOST_LINES = 500  # a module beyond this has two ideas
ENVIRONMENT = {"pdrt/config.py", "pdrt/cli.py"}  # cli hands it on to the children of `pdrt up`


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path) -> Iterator[str]:
    """Dotted names that a module mentions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def test_a_module_says_its_one_idea_first() -> None:
    for path in MODULES:
        first, *_ = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines() or [""]
        assert first.endswith("."), f"{short(path)}: {first}"
        assert len(first) <= 100, short(path)


def test_a_package_holds_a_docstring_only() -> None:
    for path in MODULES:
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body[1:]
            names = ["__version__"] if path.parent.name == "pdrt" else []
            assert [node.targets[0].id for node in body] == names, short(path)  # type: ignore[attr-defined]


def test_a_module_is_small() -> None:
    sizes = {short(path): len(path.read_text().splitlines()) for path in MODULES}
    sizes.pop("pdrt/messages.py")  # one record a message, and no logic
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}


def test_nothing_from_outside_is_ever_run() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "eval", "exec", "torch.load"}
    found = {(short(path), call) for path in MODULES for call in calls(path) if call in forbidden}
    assert not found
    assert not [short(path) for path in MODULES if "recv_pyobj" in path.read_text()]


def test_only_the_config_reads_the_environment() -> None:
    reads = {"os.environ", "os.getenv", "os.environb"}
    found = {short(path) for path in MODULES if reads & set(calls(path))}
    assert found <= ENVIRONMENT


def test_no_test_sleeps_or_mocks() -> None:
    forbidden = {"time.sleep", "unittest.mock", "mock"}
    assert not [short(path) for path in TESTS if forbidden & set(calls(path))]


def test_every_exception_to_a_rule_says_why() -> None:
    for path in [*MODULES, *TESTS]:
        for line in path.read_text().splitlines():
            if match := re.search(r"#\s*noqa\b(?P<rest>.*)", line):
                why = re.fullmatch(r": [A-Z]+\d+(, [A-Z]+\d+)* - \w.*", match["rest"])
                assert why or path == Path(__file__), f"{short(path)}: {line.strip()}"


def test_no_path_of_one_machine_and_no_open_end() -> None:
    for path in [*MODULES, *TESTS, *PAGES, *CONFS, ROOT / "run"]:
        text = path.read_text()
        assert not re.search(r"(^|[^\w.~/-])/(work|farm|root|Users)/", text), short(path)
        is_here = path == Path(__file__)
        assert is_here or not re.search(r"\b(TODO|FIXME|XXX)\b", text), short(path)


def test_every_link_leads_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            if not target.startswith(("http", "#")):
                place = path.parent / target.partition("#")[0]
                assert place.exists(), f"{short(path)}: {target}"


COMMAND = re.compile(r"(?:^|`|\s)pdrt ((?:[a-z-]+)(?: [^`\n#]*)?)", re.MULTILINE)


def test_every_command_in_the_docs_exists_with_its_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for path in [*PAGES, *CONFS]:
        for line in COMMAND.findall(path.read_text()):
            name, *rest = line.split()
            if name not in commands:
                continue  # prose: "pdrt serves ..."
            command = commands[name]
            if hasattr(command, "commands"):  # a group: the word after it names the command
                assert set(rest[:1]) & set(command.commands), f"{short(path)}: pdrt {line}"
                command = command.commands[rest[0]]
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
            used = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert used <= known | {"--help"}, f"{short(path)}: pdrt {line}"


@pytest.mark.parametrize("page", sorted(printed.PAGES))
def test_printed_pages_are_up_to_date(page: str) -> None:
    """Else: ./run docs"""
    assert (ROOT / "docs" / page).read_text("utf-8") == printed.PAGES[page]()


def test_every_error_is_explained_with_its_status() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", text, re.M))
    assert told == {code: str(kind.status) for code, kind in tree().items()}


def test_every_time_limit_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for name in type(NodeConfig().timeouts).model_fields:
        assert f"`{name}`" in text or f"[timeouts] {name}`" in text, name


def test_every_metric_is_named_in_the_docs() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "pdrt/control").glob("*.py"))
    for name in re.findall(r'"(pdrt_\w+)"', code):
        assert name in text, name


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_project_is_described_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert {"demo", "dev"} <= project["optional-dependencies"].keys()
    assert all(re.match(r"[a-z0-9-]+[<>=]", each) for each in project["dependencies"])


@pytest.mark.parametrize("script", ["run", ".ci/run"])
def test_the_scripts_are_sound_and_can_be_run(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_ci_runs_what_a_developer_runs() -> None:
    assert re.search(r"\./run check\b.*</dev/null", (ROOT / ".ci/run").read_text())


def test_run_alone_says_what_there_is() -> None:
    told = subprocess.run([ROOT / "run"], capture_output=True, text=True, check=True).stdout
    text = (ROOT / "run").read_text()
    for command in re.findall(r"^  (\w+)\) setup", text, re.M):
        assert re.search(rf"^  {command}\b", told, re.M), command
