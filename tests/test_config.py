"""Settings: what a file and the environment may say, and in which words all else is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pdrt.config import (
    DisaggConfig,
    NodeConfig,
    ParallelSection,
    Place,
    RouterConfig,
    SecuritySection,
    bracketed,
    check,
    is_loopback,
    load,
)
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey

CONF = Path(__file__).parent.parent / "conf"
ROUTER = {"prefill": [{"http": "127.0.0.1:1"}], "decode": [{"http": "127.0.0.1:2"}]}


def node(path: Path | None = None, **environ: str) -> NodeConfig:
    return load(NodeConfig, path, environ)


def write(folder: Path, text: str) -> Path:
    path = folder / "pdrt.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", [*CONF.glob("*.toml"), *CONF.glob("multinode/*.toml")], ids=str)
def test_the_files_that_ship_are_good(path: Path) -> None:
    if path.stem in ("router", "plain"):
        assert load(RouterConfig, path, {}).prefill
    else:
        assert load(NodeConfig, path, {}).model.path


def test_nothing_said_is_one_worker_on_loopback_at_the_well_known_ports() -> None:
    config = node()
    assert (config.parallel.world_size, config.parallel.local_ip) == (1, "127.0.0.1")
    ports = config.ports
    assert (ports.router, ports.prefill, ports.decode, ports.hybrid, ports.bootstrap) == (
        8000,
        8001,
        8100,
        8200,
        18800,
    )


WRONG_NODE: list[tuple[str, list[str]]] = [
    ("[model]\npaht = 1", ["[model] paht: unknown key", "did you mean path?"]),
    ("[model]\ncolour = 1", ["[model] colour: unknown key", "known are path, name, dtype"]),
    ("[modell]\npath = 'x'", ["modell: unknown key", "did you mean model?"]),
    ("model = 5", ["[model] = 5", "valid dictionary"]),
    ("[[model]]\npath = 'x'", ["[model]"]),
    ("[scheduler]\nblock_size = '16'", ["[scheduler] block_size = '16'", "valid integer"]),
    ("[scheduler]\nblock_size = 0", ["[scheduler] block_size = 0", "greater than or equal to 1"]),
    ("[scheduler]\nblock_size = true", ["[scheduler] block_size = True", "valid integer"]),
    ("[scheduler]\nblock_size = 1.5", ["[scheduler] block_size = 1.5", "integer"]),
    ("[model]\ndtype = 'int3'", ["[model] dtype = 'int3'", "'auto', 'float32' or 'bfloat16'"]),
    ("[model]\npath = 3", ["[model] path = 3", "valid string"]),
    ("[timeouts]\nrequest_s = nan", ["[timeouts] request_s = nan"]),
    ("[timeouts]\nrequest_s = 0", ["[timeouts] request_s = 0"]),
    ("[timeouts]\nheartbeat_s = 0.2", ["[timeouts]", "heartbeat_timeout_s = 0.45 is longer"]),
    ("[ports]\nprefill = 65536", ["[ports] prefill = 65536", "less than or equal to 65535"]),
    ("[transfer.faults]\ndelay = 2", ["[transfer.faults] delay = 2", "less than or equal to 1"]),
    ("[transfer.faults]\ndealy = 1", ["[transfer.faults] dealy: unknown key", "delay"]),
    ("[transfer]\ntransport = 'rdma'", ["[transfer] transport = 'rdma'", "'nixl'", "'memfabric'"]),
    ("[transfer]\nnetwork = ['shm']", ["[transfer] network.0 = 'shm'", "'tcp', 'nixl'"]),
    ("[transfer]\nnetwork = ['tcp', 'tcp']", ["[transfer]", "twice in tcp, tcp"]),
    ("[parallel]\ntp = 2", ["[parallel]", "tp x cp x dp = 2 x 1 x 1 = 2", "world_size = 1"]),
    (
        "[parallel]\nworld_size = 4\ndp = 4\ndevices_per_node = 3",
        ["[parallel]", "devices_per_node = 3 must divide world_size = 4"],
    ),
    ("[parallel]\nworld_size = 2\ndp = 2", ["[parallel]", "ips: 1 nodes", "instances of 2 nodes"]),
    (
        "[parallel]\nworld_size = 2\ndp = 2\nips = ['10.0.0.1', '10.0.0.2', '10.0.0.3']",
        ["[parallel]", "ips: 3 nodes"],
    ),
    ("[parallel]\nips = ['10.0.0.1', '10.0.0.1']", ["[parallel]", "stands twice"]),
    ("[parallel]\nips = [1]", ["[parallel] ips.0 = 1", "valid string"]),
    ("[parallel]\nips = '10.0.0.1'", ["[parallel] ips = '10.0.0.1'"]),
    ("[parallel]\nlocal_ip = '127.0.0.1:80'", ["[parallel]", "without port and brackets"]),
    ("[parallel]\nlocal_ip = '[::1]'", ["[parallel]", "without port and brackets"]),
    ("[parallel]\nlocal_ip = ''", ["[parallel]", "is no address"]),
    ("[[prefill]]\nhttp = 'x'", ["prefill: unknown key"]),
    ("[model\n", ["not TOML", "line 1"]),
    ("a = " + "[" * 9999, ["not TOML"]),
]


@pytest.mark.parametrize(("text", "says"), WRONG_NODE, ids=range(len(WRONG_NODE)))
def test_a_wrong_node_file_is_refused_with_file_key_value_and_what_is_allowed(
    text: str, says: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        node(path)
    words = str(refused.value)
    assert words.startswith(f"{path}: ")
    assert [part for part in says if part not in words] == []
    assert "Value error" not in words


WRONG_ROUTER: list[tuple[str, list[str]]] = [
    ("", ["no targets"]),
    ("[[prefill]]\nhttp = 'a:1'", ["[[prefill]] and [[decode]] targets come together"]),
    (
        "[[prefill]]\nhttp = 'a:1'\n[[prefill]]\nhtpp = 'b:1'\n[[decode]]\nhttp = 'c:1'",
        [
            "[[prefill]] number 2 htpp: unknown key; did you mean http?",
            "number 2 http: Field required",
        ],
    ),
    ("[[hybrid]]\nhttp = 7", ["[[hybrid]] number 1 http = 7", "valid string"]),
    ("prefill = 'a:1'", ["[prefill] = 'a:1'"]),
    ("[[hybrid]]\nhttp = 'a:1'\n[[hybrid]]\nhttp = 'a:1'", ["stands twice"]),
    ("local_ip = 7", ["local_ip = 7", "valid string"]),
    ("local_ip = '[::1]'\n[[hybrid]]\nhttp = 'a:1'", ["without port and brackets"]),
    (
        "[policy]\nbackends = 'plain'\nregistration = true\n[[hybrid]]\nhttp = 'a:1'",
        ["plain", "registration"],
    ),
    (
        "[policy]\nbackends = 'plain'\nmigrate = true\n[[hybrid]]\nhttp = 'a:1'",
        ["plain", "migrate"],
    ),
    ("[policy]\ncanary = false\n[[hybrid]]\nhttp = 'a:1'", ["[policy] canary"]),
    ("[policy]\nprefill = 'best'\n[[hybrid]]\nhttp = 'a:1'", ["[policy] prefill = 'best'"]),
    ("[scheduler]\nblock_size = 16", ["scheduler: unknown key"]),
]


@pytest.mark.parametrize(("text", "says"), WRONG_ROUTER, ids=range(len(WRONG_ROUTER)))
def test_a_wrong_router_file_is_refused_in_words_too(
    text: str, says: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(RouterConfig, write(tmp_path, text), {})
    assert [part for part in says if part not in str(refused.value)] == []


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            node(path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b"[model]\npath = '\xe4'")
    with pytest.raises(ConfigError, match="cannot be read"):
        node(path)
    path.write_text("[model]\nlayers = " + "9" * 5000)
    with pytest.raises(ConfigError, match="not TOML"):
        node(path)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        node(write(tmp_path, "[model]\nx = 1\n[scheduler]\nblock_size = 0"))
    assert "[model] x" in str(refused.value)
    assert "[scheduler] block_size" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "[security]\nkey = 12345678901234567",
        "[security]\napi_keys = [12345678901234567]",
        "[security]\napi_keys = '12345678901234567'",
        "[security]\nkey = '12345678901234567'\nmax_body_bytes = 0",
    ],
)
def test_a_secret_is_not_shown_in_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        node(write(tmp_path, text))
    assert "[security]" in str(refused.value)
    assert "1234567890" not in str(refused.value)


def test_a_config_does_not_print_its_secrets_and_cannot_be_changed() -> None:
    config = node(PDRT_SECURITY_KEY="a key for these tests", PDRT_SECURITY_API_KEYS="one,secret")
    assert "these tests" not in repr(config)
    assert "secret" not in repr(config)
    with pytest.raises(ValidationError):
        config.security.key = "x"  # type: ignore[misc]


# The environment.

OVERRIDES: list[tuple[str, str, Any]] = [
    ("PDRT_SCHEDULER_BLOCK_SIZE", "32", 32),
    ("PDRT_SCHEDULER_KV_MEMORY", "1e9", 1e9),
    ("PDRT_MODEL_PATH", "/models/x", "/models/x"),
    ("PDRT_MODEL_PATH", "'/models/x'", "/models/x"),
    ("PDRT_MODEL_NAME", "7", "7"),
    ("PDRT_MODEL_NAME", "true", "true"),
    ("PDRT_MODEL_NAME", "1\n[security]", "1\n[security]"),
    ("PDRT_SECURITY_KEY", "1234567890123456", "1234567890123456"),
    ("PDRT_SECURITY_API_KEYS", '["a", "b"]', ("a", "b")),
    ("PDRT_SECURITY_API_KEYS", "a, b", ("a", "b")),
    ("PDRT_SECURITY_API_KEYS", "7", ("7",)),
    ("PDRT_SECURITY_API_KEYS", "", ()),
    ("PDRT_PARALLEL_IPS", "10.0.0.1,10.0.0.2", ("10.0.0.1", "10.0.0.2")),
    ("PDRT_PARALLEL_LOCAL_IP", "fd00::1", "fd00::1"),
    ("PDRT_TRANSFER_CHUNKED", "false", False),
    ("PDRT_TRANSFER_FAULTS_DELAY_S", "0.5", 0.5),
    ("PDRT_TRANSFER_FAULTS_DELAY", "1", 1),
    ("PDRT_TIMEOUTS_HEARTBEAT_S", "2", 2),
]


@pytest.mark.parametrize(("name", "text", "value"), OVERRIDES)
def test_a_variable_goes_over_the_file(name: str, text: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "[scheduler]\nblock_size = 8\nkv_memory = 0.2\n[transfer]\nslots = 9")
    config = node(path, **{name: text})
    table, _, key = name.removeprefix("PDRT_").lower().partition("_")
    section = getattr(config, table)
    if key.startswith("faults_"):
        section, key = section.faults, key.removeprefix("faults_")
    assert getattr(section, key) == value
    assert config.transfer.slots == 9


def test_options_of_the_command_line_go_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\npath = 'file'\nname = 'n'")
    config = load(NodeConfig, path, {"PDRT_MODEL_PATH": "env"}, {"model": {"path": "option"}})
    assert (config.model.path, config.model.name) == ("option", "n")


def test_the_routers_own_address_can_be_overridden() -> None:
    environ = {"PDRT_LOCAL_IP": "::1"}
    assert load(RouterConfig, None, environ, ROUTER).local_ip == "::1"


WRONG_VARIABLES = [
    (
        "PDRT_SCHEDULER_BLOCK_SISE",
        "1",
        "[scheduler] block_sise: unknown key; did you mean block_size",
    ),
    ("PDRT_SCHEDULER_BLOCK_SIZE", "many", "[scheduler] block_size = 'many'"),
    ("PDRT_SCHEDULER_BLOCK_SIZE", "1\nx = 1", "[scheduler] block_size = '1\\nx = 1'"),
    ("PDRT_SCHEDULAR_BLOCK_SIZE", "1", "no table [schedular]; did you mean [scheduler]?"),
    ("PDRT_PORT_PREFILL", "1", "no table [port]; did you mean [ports]?"),
    ("PDRT_TRANSFER_FAULTS_DEALY", "1", "[transfer.faults] dealy: unknown key"),
]


@pytest.mark.parametrize(("name", "text", "says"), WRONG_VARIABLES)
def test_a_wrong_variable_is_refused_and_named(name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        node(None, **{name: text})
    assert name in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PDRT",
        "PDRT_",
        "PDRT_CACHE",
        "PDRT_PYTHON",
        "PDRT_PIP_ARGS",
        "PDRT_API_KEY",
        "PDRT_MODEL",
        "XPDRT_MODEL_PATH",
        "PDRT_POLICY_CANARY",
        "pdrt_model_path",
    ],
)
def test_variables_that_are_not_a_nodes_settings_are_left_alone(name: str) -> None:
    assert node(None, **{name: "?"}) == node()


def test_targets_cannot_come_from_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"PDRT_PREFILL_HTTP.*list of targets"):
        load(RouterConfig, None, {"PDRT_PREFILL_HTTP": "x"}, ROUTER)


def test_a_variable_for_a_table_that_is_none_is_refused_like_the_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model"):
        node(write(tmp_path, "model = 5"), PDRT_MODEL_PATH="x")


NAMES = st.sampled_from(
    [
        "MODEL_PATH",
        "SCHEDULER_BLOCK_SIZE",
        "PARALLEL_IPS",
        "PORTS_ROUTER",
        "SECURITY_API_KEYS",
        "TRANSFER_FAULTS_SEED",
        "LOCAL_IP",
        "PREFILL_HTTP",
        "MODEL_",
        "_X",
        "",
    ]
)


@given(st.dictionaries(NAMES.map("PDRT_".__add__), st.text(max_size=20), max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_environment_gives_a_config_or_a_config_error(environ: dict[str, str]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load(NodeConfig, None, environ), NodeConfig)
    with contextlib.suppress(ConfigError):
        assert isinstance(load(RouterConfig, None, environ, ROUTER), RouterConfig)


@given(st.text(max_size=60) | st.text("[]={}.'\"ab1 \n", max_size=60))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_file_gives_a_config_or_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.toml"
    path.write_text(text, encoding="utf-8")
    try:
        assert isinstance(load(NodeConfig, path, {}), NodeConfig)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right


# The cluster key.


def test_a_key_comes_from_the_file_or_from_the_environment_which_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key for these tests\n")
    from_file = SecuritySection(key_file=str(file))
    assert from_file.cluster_key() == ClusterKey.from_text("a key for these tests")
    both = SecuritySection(key_file=str(file), key="another key for tests")
    assert both.cluster_key() == ClusterKey.from_text("another key for tests")
    assert SecuritySection().cluster_key() is None


def test_a_bad_key_is_refused_and_its_source_named(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("short")
    for section, says in [
        (SecuritySection(key_file=str(file)), f"key_file = '{file}'"),
        (SecuritySection(key_file=str(tmp_path / "none")), "No such file"),
        (SecuritySection(key_file="~nobody-of-that-name/key"), "key_file"),
        (SecuritySection(key="short"), r"\[security\] key: "),
    ]:
        with pytest.raises(ConfigError, match=says) as refused:
            section.cluster_key()
        assert "'short'" not in str(refused.value)
    file.write_text("")
    with pytest.raises(ConfigError, match="at least 16"):
        SecuritySection(key_file=str(file)).cluster_key()


@pytest.mark.parametrize(("mode", "exposed"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_may_read_is_noticed(
    mode: int, exposed: bool, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.touch()
    file.chmod(mode)
    assert SecuritySection(key_file=str(file)).is_key_file_exposed is exposed
    assert not SecuritySection(key_file=str(tmp_path / "none")).is_key_file_exposed
    assert not SecuritySection().is_key_file_exposed


# Topology.


def topology(world_size: int, per_node: int, hosts: int, **more: Any) -> ParallelSection:
    return ParallelSection(
        world_size=world_size,
        tp=world_size,
        devices_per_node=per_node,
        ips=tuple(f"10.0.0.{host}" for host in range(hosts)),
        local_ip="10.0.0.99",
        **more,
    )


@pytest.mark.parametrize(
    ("index", "instance", "is_leader", "leader", "first_rank"),
    [
        (0, 0, True, "10.0.0.0", 0),
        (1, 0, False, "10.0.0.0", 16),
        (2, 1, True, "10.0.0.2", 0),
        (3, 1, False, "10.0.0.2", 16),
    ],
)
def test_a_node_finds_its_instance_its_leader_and_its_ranks(
    index: int, instance: int, is_leader: bool, leader: str, first_rank: int
) -> None:
    """The example of SPEC 1: world_size 32, 16 devices a node, four nodes, two instances."""
    place = Place.of(topology(32, 16, 4), index)
    assert place == Place(
        node_index=index,
        instance=instance,
        is_leader=is_leader,
        leader_ip=leader,
        first_rank=first_rank,
    )


@pytest.mark.parametrize(("hosts", "index"), [(4, 4), (4, -1), (0, 1)])
def test_an_index_outside_the_topology_is_refused(hosts: int, index: int) -> None:
    parallel = topology(16, 16, hosts)
    with pytest.raises(ConfigError, match="--node-index"):
        Place.of(parallel, index)


def test_a_lone_node_is_its_own_leader_at_its_local_ip() -> None:
    place = Place.of(ParallelSection(local_ip="::1"), 0)
    assert (place.is_leader, place.leader_ip, place.first_rank) == (True, "::1", 0)


def test_loopback_in_a_topology_of_several_hosts_is_refused_with_what_to_set() -> None:
    """CASES 25: peers would be told an address that leads them to themselves."""
    parallel = ParallelSection(ips=("10.0.0.1", "10.0.0.2"))
    with pytest.raises(ConfigError, match=r"PDRT_PARALLEL_LOCAL_IP=10\.0\.0\.2"):
        Place.of(parallel, 1)


@pytest.mark.parametrize("local_ip", ["127.0.0.1", "127.0.0.2"])
def test_an_address_that_is_another_nodes_or_none_of_loopback_ips_is_refused(local_ip: str) -> None:
    """What `pdrt doctor` calls wrong does not start."""
    ips = ("127.0.0.2", "127.0.0.3")
    with pytest.raises(ConfigError, match=r"PDRT_PARALLEL_LOCAL_IP=127\.0\.0\.3"):
        Place.of(ParallelSection(ips=ips, local_ip=local_ip), 1)
    assert Place.of(ParallelSection(ips=ips, local_ip="127.0.0.3"), 1).is_leader


@pytest.mark.parametrize(
    ("role", "mode", "creates"),
    [("prefill", "PREFILL", True), ("decode", "DECODE", False), ("hybrid", "NONE", False)],
)
def test_the_settings_of_a_process_are_derived(role: Any, mode: str, creates: bool) -> None:
    config = NodeConfig(parallel=ParallelSection(local_ip="fd00::7"))
    derived = DisaggConfig.derive(role, config, Place.of(config.parallel, 0))
    assert (derived.mode, derived.is_store_creator_node) == (mode, creates)
    assert (derived.bootstrap_host, derived.bootstrap_port) == ("fd00::7", 18800)
    assert derived.store_url == "tcp://[fd00::7]:18801"
    assert derived.local_ip == "fd00::7"


def test_only_the_leader_of_the_first_prefill_instance_creates_the_store() -> None:
    config = NodeConfig(parallel=topology(4, 2, 4))
    places = [Place.of(config.parallel, index) for index in range(4)]
    derived = [DisaggConfig.derive("prefill", config, place) for place in places]
    assert [each.is_store_creator_node for each in derived] == [True, False, False, False]
    assert [each.bootstrap_host for each in derived] == ["10.0.0.0"] * 2 + ["10.0.0.2"] * 2


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fd00::1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_ipv6_addresses_are_bracketed_in_urls() -> None:
    assert [bracketed(host) for host in ("::1", "10.0.0.1", "host")] == [
        "[::1]",
        "10.0.0.1",
        "host",
    ]


def test_check_names_where_the_tables_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^the command line: \[model\] x"):
        check(NodeConfig, {"model": {"x": 1}}, "the command line")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('nic = "mlx5_0"', False),
        ('nic = "mlx5_0"\ntransport = "tcp"', False),
        ('nic = "mlx5_0"\ntransport = "nixl"', True),
        ('nic = "mlx5_0"\nnetwork = ["mooncake", "tcp"]', True),
    ],
)
def test_a_nic_that_no_transport_would_use_is_refused(
    text: str, fits: bool, tmp_path: Path
) -> None:
    """CASES 105: what is set and has no effect would be found out by slow transfers."""
    path = write(tmp_path, f"[transfer]\n{text}\n")
    if fits:
        assert node(path).transfer.nic == "mlx5_0"
    else:
        with pytest.raises(ConfigError, match=r"nic = 'mlx5_0' has no effect on tcp"):
            node(path)
