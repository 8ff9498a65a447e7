"""The command line: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pdrt.cli import app, main, node_settings, router_settings
from pdrt.config import NodeConfig, RouterConfig, load
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey

ROOT = Path(__file__).parent.parent
COMMANDS = [
    "up",
    "demo-model",
    "node",
    "router",
    "generate",
    "chat",
    "doctor",
    "top",
    "bench",
    "conformance",
    "keys",
    "plan",
    "sim",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directories are the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PDRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a pdrt command."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def conf_file(folder: Path, text: str) -> Path:
    file = folder / "conf.toml"
    file.write_text(text)
    return file


def test_the_commands_are_those_of_the_contract() -> None:
    group = typer.main.get_command(app)
    assert sorted(group.commands) == sorted(COMMANDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "Example" in out
    assert f"pdrt {command}" in out


def test_the_version_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, "pdrt 0.1.0\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\npaht = 'x'\n", "paht"),
        ("[parallel]\nworld_size = 3\ntp = 2\n", "world_size"),
        ("[scheduler]\nblock_size = 'many'\n", "block_size"),
        ("not toml", "not TOML"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conf_file(tmp_path, text)
    status, out, err = run(capsys, "node", "--role", "prefill", "--conf", str(file))
    assert (status, out) == (2, "")
    assert err.startswith("pdrt: ")
    assert err.count("\n") == 1
    assert says in err
    assert str(file) in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["node", "--role", "decode", "--conf", "router.toml"], "is a router's: pdrt router"),
        (["router", "--conf", "decode.toml"], "is a node's: pdrt node"),
    ],
)
def test_the_file_of_another_command_is_known_as_such(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments[-1] = str(ROOT / "conf" / arguments[-1])
    status, _, err = run(capsys, *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert says in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\npath = '/nowhere'\n", "`demo` for the demo model"),
        ("[security]\nkey_file = '/nowhere'\n", "openssl rand -hex 32"),
    ],
)
def test_what_is_not_there_comes_with_what_to_do(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conf_file(tmp_path, text)
    assert says in run(capsys, "node", "--role", "decode", "--conf", str(file))[2]


def test_help_of_up_shows_a_command_for_every_kind_of_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = run(capsys, "up", "--help")[1]
    assert "--prefill-tp 3 --decode-dp 2 --transport tcp" in said


def test_every_option_is_explained() -> None:
    groups = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in {**groups, **groups["bench"].commands}.items():
        for option in command.params:
            assert getattr(option, "help", None), f"pdrt {name} {option.name}"


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "router", "--conf", "/nowhere.toml")
    assert status == 2
    assert err.count("\n") == 1
    assert "/nowhere.toml" in err


def test_an_unknown_role_is_refused_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "node", "--role", "chef")
    assert status == 2
    assert "prefill" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prefill", "1", "--decode", "0"], "come together"),
        (["--prefill", "0", "--decode", "0"], "nothing to start"),
        (["--prefill-tp", "3", "--decode-tp", "2"], "one must divide the other"),
        (["--prefill-tp", "3", "--model", "null"], "attention heads (null); possible: 1, 2, 4, 8"),
        (["--hybrid", "1", "--decode-tp", "2"], "not for --hybrid"),
        (["--dtype", "int3"], "dtype"),
        (["--transport", "pigeon"], "transport"),
        (["--hybrid", "1", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_an_impossible_cluster_is_refused_before_anything_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "up", *arguments)
    assert status == 2
    assert says in err


def test_a_router_needs_targets_from_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no targets" in run(capsys, "router")[2]
    both = ["--conf", str(ROOT / "conf/router.toml"), "--hybrid-addrs", "127.0.0.1:1"]
    assert "not both" in run(capsys, "router", *both)[2]


def test_addresses_make_the_same_router_as_a_file(tmp_path: Path) -> None:
    """CASES 83: the command line and a file are two ways to one config object."""
    file = conf_file(
        tmp_path, '[[prefill]]\nhttp = "127.0.0.1:8001"\n[[decode]]\nhttp = "127.0.0.1:8100"\n'
    )
    named = {"prefill": "127.0.0.1:8001", "decode": " 127.0.0.1:8100,", "hybrid": ""}
    assert router_settings(None, named) == router_settings(file, {})


def test_a_node_gets_what_its_file_says_and_a_key(tmp_path: Path) -> None:
    file = conf_file(tmp_path, "[model]\npath = 'null'\n[scheduler]\nblock_size = 32\n")
    settings, plain = node_settings(file), load(NodeConfig, file)
    assert settings.model_copy(update={"security": plain.security}) == plain
    assert settings.security.cluster_key() is not None


def test_processes_of_one_user_on_loopback_share_a_key_that_nobody_else_can_read(
    home: Path,
) -> None:
    conf = conf_file(home, "[model]\npath = 'null'\n")
    node = node_settings(conf)
    router = router_settings(None, {"hybrid": "127.0.0.1:8200"})
    file = home / "config/pdrt/key"
    assert node.security.cluster_key() == router.security.cluster_key() is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["key"]


def test_off_loopback_no_key_is_made_up(home: Path) -> None:
    conf = conf_file(home, "[model]\npath = 'null'\n[parallel]\nlocal_ip = '10.0.0.1'\n")
    assert node_settings(conf).security.cluster_key() is None
    router = router_settings(None, {"prefill": "10.0.0.1:8001", "decode": "127.0.0.1:8100"})
    assert router.security.cluster_key() is None
    assert not (home / "config").exists()


@pytest.mark.parametrize("name", ["prefill", "decode", "hybrid"])
def test_the_shipped_node_configs_say_what_the_defaults_are(name: str) -> None:
    assert load(NodeConfig, ROOT / f"conf/{name}.toml") == NodeConfig()


def test_the_shipped_router_config_finds_the_shipped_nodes() -> None:
    ports, router = NodeConfig().ports, load(RouterConfig, ROOT / "conf/router.toml")
    assert [each.http for each in router.prefill] == [f"127.0.0.1:{ports.prefill}"]
    assert [each.bootstrap for each in router.prefill] == [f"127.0.0.1:{ports.bootstrap}"]
    assert [each.http for each in router.decode] == [f"127.0.0.1:{ports.decode}"]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_multinode_configs_are_whole(name: str) -> None:
    parallel = load(NodeConfig, ROOT / f"conf/multinode/{name}.toml").parallel
    router = load(RouterConfig, ROOT / "conf/multinode/router.toml")
    assert (len(parallel.ips), parallel.nodes_per_instance) == (2, 2)
    assert [t.http.rpartition(":")[0] for t in getattr(router, name)] == [parallel.ips[0]]


def test_an_unreadable_key_file_is_a_config_error(tmp_path: Path) -> None:
    conf = conf_file(tmp_path, "[security]\nkey_file = '/nowhere/key'\n")
    with pytest.raises(ConfigError, match="/nowhere/key"):
        node_settings(conf)


def test_help_loads_neither_torch_nor_a_server() -> None:
    heavy = "{'torch', 'transformers', 'aiohttp', 'uvloop'}"
    code = f"import sys, pdrt.cli; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_clusters_token_is_told_from_whichever_key_there_is(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, said = run(capsys, "keys", "token")
    assert (status, out) == (2, "")
    assert "pdrt/key" in said
    assert "--key-file" in said
    files = [home / "config" / "pdrt" / "key", home / "named", home / "given"]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}" * 32)
    tokens = [ClusterKey.from_text(file.read_text()).bearer() for file in files]
    assert run(capsys, "keys", "token") == (0, tokens[0] + "\n", "")
    monkeypatch.setenv("PDRT_SECURITY_KEY_FILE", str(files[1]))
    assert run(capsys, "keys", "token") == (0, tokens[1] + "\n", "")
    monkeypatch.setenv("PDRT_SECURITY_KEY", "3" * 32)
    want = ClusterKey.from_text("3" * 32).bearer()
    assert run(capsys, "keys", "token") == (0, want + "\n", "")
    assert run(capsys, "keys", "token", "--key-file", str(files[2])) == (0, tokens[2] + "\n", "")
