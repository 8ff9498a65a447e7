"""`pdrt doctor`: each thing that can be wrong is found, named and answered with advice."""

from __future__ import annotations

import importlib.util
import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pdrt.config import TransferSection
from pdrt.data import trial as module
from pdrt.data.installed import NEEDS, ORDER
from pdrt.data.trial import try_out
from pdrt.doctor import Host, examine, is_node, is_router, show
from pdrt.errors import TransferFailed
from pdrt.findings import Finding, Verdict, fine, note, wrong

ROOT = Path(__file__).parent.parent
FREE = "[ports]\nrouter = 0\nadmin = 0\nprefill = 0\ndecode = 0\nhybrid = 0\nbootstrap = 0\n"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def of(findings: list[Finding], topic: str) -> list[Finding]:
    return [each for each in findings if each.what.startswith(f"{topic}:")]


def fast(_config: TransferSection, _host: str) -> float:
    return 6.5


HOST = Host(package=lambda _name: "", devices=lambda _name: [], trial=fast)


def look(folder: Path, text: str, host: Host = HOST) -> list[Finding]:
    file = folder / "conf.toml"
    file.write_text(text)
    return list(examine(file, None, folder / "cache", host))


def wrongs(findings: list[Finding]) -> list[str]:
    return [each.what for each in findings if each.verdict is Verdict.WRONG]


SPREAD = "[parallel]\nworld_size = 4\ntp = 2\ndp = 2\ndevices_per_node = 2\n"


def test_a_node_of_an_instance_is_told_its_place_and_whether_its_leader_is_there(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = leader.getsockname()[1]
        conf = tmp_path / "node.toml"
        spread = f"{SPREAD}ips = ['127.0.0.1', '127.0.0.2']\nlocal_ip = '127.0.0.2'\n"
        conf.write_text(f"[model]\npath = 'null'\n{spread}[ports]\ndecode = {port}\n")
        place, there = of(list(examine(conf, "decode", tmp_path, HOST)), "instance")
        assert place.what == (
            "instance: node 1 of 2 of instance 0 is led by 127.0.0.1; --node-index 1;"
            " ranks (dp,cp,tp) 1,0,0 1,0,1"
        )
        assert there == fine(f"instance: 127.0.0.1:{port} accepts connections")
        _, role = of(list(examine(conf, None, tmp_path, HOST)), "instance")
        assert (role.verdict, role.advice) == (Verdict.NOTE, "say which --role this is")
    _, gone = of(list(examine(conf, "decode", tmp_path, HOST)), "instance")
    assert (gone.verdict, "refused" in gone.what) == (Verdict.NOTE, True)


def test_a_leader_is_told_which_of_its_other_nodes_are_there(tmp_path: Path) -> None:
    conf = tmp_path / "node.toml"
    conf.write_text(f"[model]\npath = 'null'\n{SPREAD}ips = ['127.0.0.1', '127.0.0.2']\n")
    place, other = of(list(examine(conf, "prefill", tmp_path, HOST)), "instance")
    assert "node 0 of 2 of instance 0 leads it" in place.what
    assert other.what.startswith("instance: 127.0.0.2:8001")


def test_a_node_that_can_start_has_nothing_wrong(tmp_path: Path) -> None:
    findings = look(tmp_path, f"[model]\npath = 'null'\n[scheduler]\nkv_memory = 1e6\n{FREE}")
    assert wrongs(findings) == []
    topics = {each.what.partition(":")[0] for each in findings}
    assert topics >= {
        "system",
        "config",
        "model",
        "memory",
        "address",
        "port",
        "cluster key",
        "transport",
        "device",
    }


def test_what_is_wrong_or_unready_comes_with_advice(tmp_path: Path) -> None:
    text = f"[model]\npath = '/nowhere'\n[scheduler]\nkv_memory = 1e18\n{FREE}"
    findings = look(tmp_path, text)
    assert len(wrongs(findings)) == 2
    assert all(each.advice for each in findings if each.verdict is Verdict.WRONG)


@pytest.mark.parametrize(
    ("text", "topic", "says"),
    [
        ("[model]\nname = 3\n", "config", "name"),
        ("nonsense", "config", "not TOML"),
        ("[model]\npath = '/nowhere'\n", "model", "/nowhere"),
        ("[scheduler]\nkv_memory = 1e18\n", "memory", "GB"),
        ("[parallel]\nlocal_ip = '192.0.2.1'\n", "address", "192.0.2.1"),
        ("[parallel]\nlocal_ip = '192.0.2.1'\n", "cluster key", "loopback"),
        ("[parallel]\nips = ['192.0.2.1']\n", "place", "none of ips: 192.0.2.1"),
        ("[security]\nkey_file = '/nowhere'\n", "cluster key", "/nowhere"),
    ],
)
def test_each_mistake_is_found(text: str, topic: str, says: str, tmp_path: Path) -> None:
    (found,) = of(look(tmp_path, text), topic)
    assert found.verdict is Verdict.WRONG
    assert says in found.what


def test_a_key_file_that_others_may_read_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key for these tests")
    file.chmod(0o644)
    text = f"[security]\nkey_file = '{file}'\n"
    _, found = of(look(tmp_path, text), "cluster key")
    assert (found.verdict, found.advice) == (Verdict.NOTE, f"chmod 600 {file}")
    file.chmod(0o600)
    assert len(of(look(tmp_path, text), "cluster key")) == 1


def test_a_taken_port_is_found_with_its_address(tmp_path: Path, taken: int) -> None:
    findings = look(tmp_path, f"[ports]\ndecode = {taken}\n")
    (found,) = [each for each in of(findings, "port") if each.verdict is Verdict.WRONG]
    assert f"{taken} on 127.0.0.1 (decode)" in found.what
    assert "[ports] decode" in found.advice


def test_only_the_ports_of_the_role_are_looked_at(tmp_path: Path) -> None:
    findings = list(examine(None, "decode", tmp_path, HOST))
    assert [each.what.partition("(")[2][:6] for each in of(findings, "port")] == ["decode"]


def test_without_a_file_the_routers_port_is_looked_at_too(tmp_path: Path) -> None:
    findings = of(list(examine(None, None, tmp_path, HOST)), "port")
    assert sum("(router)" in each.what for each in findings) == 1
    assert not [each for each in of(look(tmp_path, FREE), "port") if "router" in each.what]


def test_the_model_is_described_without_being_loaded(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2_000_000)
    (found,) = of(look(tmp_path, f"[model]\npath = '{tmp_path}'\n"), "model")
    assert found.verdict is Verdict.FINE
    for word in ("LlamaForCausalLM", "512 tokens", "2 MB"):
        assert word in found.what


def test_tensor_parallel_ranks_share_the_weights_and_must_divide_the_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2_000_000_000)
    text = f"[model]\npath = '{tmp_path}'\n[scheduler]\nkv_memory = 1e8\n[parallel]\n"
    for parallel, need in (
        ("", "2.1 GB for 1 "),
        ("world_size = 2\ndevices_per_node = 2\ntp = 2", "2.2 GB for 2 "),
        ("world_size = 4\ndevices_per_node = 4\ntp = 2\ndp = 2", "4.4 GB for 4 "),
    ):
        (found,) = of(look(tmp_path, text + parallel), "memory")
        assert need in found.what
    three = "world_size = 3\ndevices_per_node = 3\ntp = 3"
    found, _ = of(look(tmp_path, text + three), "model")
    assert found.verdict is Verdict.WRONG
    assert "tp = 3: must divide the model's 4 attention heads" in found.what
    assert "tp" in found.advice


def test_a_demo_model_that_is_not_there_yet_is_no_fault(tmp_path: Path) -> None:
    (found,) = of(look(tmp_path, ""), "model")
    assert (found.verdict, found.advice) == (Verdict.NOTE, "pdrt demo-model")


def test_a_router_config_is_known_as_such_and_its_peers_are_called(
    tmp_path: Path, taken: int
) -> None:
    text = f"""
        [[prefill]]
        http = "127.0.0.1:{taken}"
        [[decode]]
        http = "127.0.0.1:1"
        [ports]
        router = 0
        admin = 0
        """
    findings = look(tmp_path, text)
    there, gone = of(findings, "peer")
    assert there.verdict is Verdict.FINE
    assert gone.verdict is Verdict.NOTE
    assert "127.0.0.1:1" in gone.what
    assert not any(each.what.startswith(("transport", "device")) for each in findings)


def test_the_two_kinds_of_files_are_told_apart() -> None:
    assert is_router(ROOT / "conf/router.toml")
    assert not is_router(ROOT / "conf/decode.toml")
    assert not is_router(ROOT / "conf/none.toml")
    assert is_node(ROOT / "conf/decode.toml")
    assert not is_node(ROOT / "conf/router.toml")
    assert not is_node(ROOT / "conf/none.toml")


def test_each_transport_has_a_line_that_says_what_it_moved(tmp_path: Path) -> None:
    tried: list[str] = []

    def trial(config: TransferSection, host: str) -> float:
        tried.append(f"{config.transport} {host} {config.stripes} {config.faults}")
        return 6.5

    text = "[transfer]\nstripes = 3\nfaults.drop = 0.5\n"
    lines = of(look(tmp_path, text, replace(HOST, trial=trial)), "transport")
    assert [line.what.split()[1].rstrip(":,;") for line in lines] == list(ORDER)
    assert tried[:2] == ["shm 127.0.0.1 3 None", "tcp 127.0.0.1 3 None"]
    for line in lines[:2]:
        assert line.verdict is Verdict.FINE
        assert "64 MiB from and to host memory at 6.50 GB/s, all bytes compared" in line.what


def test_a_trial_that_lasts_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    later = threading.Event()

    def trial(config: TransferSection, _host: str) -> float:
        if config.transport == "shm":
            assert later.wait(20)
            return 1.0
        later.set()
        return 2.0

    lines = of(look(tmp_path, "", replace(HOST, trial=trial, alone_s=0.01)), "transport")
    assert [line.what.split()[1].rstrip(":,;") for line in lines] == list(ORDER)
    assert "1.00 GB/s" in lines[0].what


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("", Verdict.WRONG),  # auto offers tcp unless it is told otherwise
        ("[transfer]\ntransport = 'tcp'\n", Verdict.WRONG),
        ("[transfer]\nnetwork = []\n", Verdict.NOTE),
        ("[transfer]\ntransport = 'shm'\n", Verdict.NOTE),
    ],
)
def test_a_transport_that_does_not_work_is_wrong_where_the_config_names_it(
    text: str, verdict: Verdict, tmp_path: Path
) -> None:
    def trial(config: TransferSection, _host: str) -> float:
        if config.transport == "tcp":
            raise TransferFailed("connection refused")
        return 1.0

    findings = look(tmp_path, text, replace(HOST, trial=trial))
    (line,) = (each for each in findings if "transport: tcp" in each.what)
    assert line.verdict is verdict
    assert "connection refused" in line.what
    assert "firewall" in line.advice


@pytest.mark.parametrize(
    ("text", "verdict"), [("", Verdict.NOTE), ("transport = 'nixl'", Verdict.WRONG)]
)
def test_a_transport_that_is_not_installed_is_named_with_its_cure(
    text: str, verdict: Verdict, tmp_path: Path
) -> None:
    bare = replace(HOST, package=lambda name: None if NEEDS[name].packages else "")
    findings = look(tmp_path, f"[transfer]\n{text}\n", bare)
    (line,) = (each for each in findings if "transport: nixl" in each.what)
    assert (line.verdict, line.what) == (verdict, "transport: nixl is not installed")
    assert line.advice.startswith("pip install nixl-cu12==")


def test_a_trial_that_was_too_slow_here_and_now_is_nothing_wrong(tmp_path: Path) -> None:
    def trial(_config: TransferSection, _host: str) -> float:
        raise TimeoutError("not finished within 8 s")

    for line in of(look(tmp_path, "", replace(HOST, trial=trial)), "transport")[:4]:
        assert (line.verdict, line.advice) == (Verdict.NOTE, "is the machine busy? run again")
        assert "not finished within 8 s" in line.what


def test_a_package_that_is_installed_is_not_advised_to_be(tmp_path: Path) -> None:
    def trial(_config: TransferSection, _host: str) -> float:
        raise TransferFailed("no such device")

    lines = of(look(tmp_path, "", replace(HOST, trial=trial)), "transport")
    assert not [line for line in lines if "pip install" in line.advice]
    (mooncake,) = (line for line in lines if "mooncake" in line.what)
    assert "apt-get install libibverbs1" in mooncake.advice


def test_packages_and_devices_are_named(tmp_path: Path) -> None:
    there = replace(HOST, package=lambda name: f"{name}-x 1.0", devices=lambda _name: ["mlx5_0"])
    (line,) = (each for each in look(tmp_path, "", there) if "nixl" in each.what)
    assert line.what.startswith("transport: nixl (nixl-x 1.0): 64 MiB")
    assert "devices: mlx5_0" in line.what


def test_a_driver_that_is_missing_is_no_reason_to_try(tmp_path: Path) -> None:
    (line,) = (each for each in look(tmp_path, "") if "memfabric" in each.what)
    assert line.verdict is Verdict.NOTE
    assert "GB/s" not in line.what
    assert "Ascend driver" in line.advice


def test_hardware_that_was_never_tried_is_said_to_be_so(tmp_path: Path) -> None:
    lines = [each.what for each in look(tmp_path, "")]
    assert sum("not verified on hardware" in line for line in lines) >= 2
    assert any("cuda" in line and "not verified" in line for line in lines)


@pytest.mark.parametrize("has_numba", [True, False])
def test_who_computes_decode_steps_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_numba: bool
) -> None:
    find = importlib.util.find_spec
    there = find("math") if has_numba else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: there if name == "numba" else find(name)
    )
    (line,) = (each for each in look(tmp_path, "") if "decode steps" in each.what)
    assert line.verdict is (Verdict.FINE if has_numba else Verdict.NOTE)
    assert has_numba or "pdrt[cpu]" in line.advice


def test_an_address_of_another_host_is_not_what_is_tried(tmp_path: Path) -> None:
    hosts: set[str] = set()

    def trial(_config: TransferSection, host: str) -> float:
        hosts.add(host)
        return 1.0

    look(tmp_path, "[parallel]\nlocal_ip = '192.0.2.1'\n", replace(HOST, trial=trial))
    assert hosts == {"127.0.0.1"}


# The trial itself.


def test_a_trial_moves_real_bytes_in_a_process_of_its_own() -> None:
    assert try_out(TransferSection(transport="shm"), "127.0.0.1") > 0.05


def test_a_trial_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"not finished within 0\.01 s"):
        try_out(TransferSection(transport="shm"), "127.0.0.1")


def test_a_trial_that_cannot_begin_says_why() -> None:
    with pytest.raises(TransferFailed, match=r"192\.0\.2\.1"):
        try_out(TransferSection(transport="tcp"), "192.0.2.1")


@pytest.mark.parametrize(
    ("findings", "status"),
    [([fine("a")], 0), ([fine("a"), note("b", "c")], 0), ([wrong("a", "b"), fine("c")], 1)],
)
def test_only_what_is_wrong_makes_the_exit_status(findings: list[Finding], status: int) -> None:
    console = Console(file=io.StringIO(), width=20)
    assert show(iter(findings), console) == status
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == len(findings) + sum(bool(each.advice) for each in findings)
