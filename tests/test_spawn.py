"""What a worker is given at birth comes through the pipe unchanged, and its key shows nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pdrt.config import DisaggConfig, FaultSection, NodeConfig, Place, check
from pdrt.errors import BadMessage
from pdrt.messages import Rank
from pdrt.spawn import WorkerSpec, read_spec

KEY_HEX = "5ec2e7" * 8
CONFIG = check(
    NodeConfig,
    {
        "model": {"path": "null", "max_model_len": 100},
        "parallel": {
            "world_size": 2,
            "dp": 2,
            "devices_per_node": 2,
            "ips": ["127.0.0.2"],
            "local_ip": "127.0.0.2",
        },
        "transfer": {"faults": {"delay": 0.5, "seed": 3}},
        "security": {"key": "k" * 20, "api_keys": ["a", "b"]},
    },
    "test",
)


def spec() -> WorkerSpec:
    place = Place.of(CONFIG.parallel, 0)
    return WorkerSpec(
        role="decode",
        rank=Rank(dp=1),
        config=CONFIG,
        disagg=DisaggConfig.derive("decode", CONFIG, place),
        key_hex=KEY_HEX,
        endpoint="ipc:///somewhere/w",
        epoch=1 << 62,
    )


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it


def test_a_spec_comes_through_whole_while_the_pipe_stays_open(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, spec().line())
    found = read_spec(reader)
    assert found == spec()
    assert found.config.transfer.faults == FaultSection(delay=0.5, seed=3)
    assert found.key.secret == bytes.fromhex(KEY_HEX)
    assert found.title == "pdrt worker decode dp1 cp0 tp0"


@pytest.mark.parametrize(
    ("tp", "per_node", "node", "rank", "far_followers", "is_head_far"),
    [
        (4, 4, 0, Rank(tp=1), [], False),
        (4, 2, 0, Rank(tp=0), [2, 3], False),
        (4, 2, 1, Rank(tp=3), [1], True),
        (4, 1, 0, Rank(tp=0), [1, 2, 3], False),
        (2, 2, 1, Rank(dp=1, tp=1), [], False),
    ],
)
def test_a_worker_knows_which_of_its_group_are_on_other_nodes(
    tp: int, per_node: int, node: int, rank: Rank, far_followers: list[int], is_head_far: bool
) -> None:
    parallel = {"world_size": 4, "tp": tp, "dp": 4 // tp, "devices_per_node": per_node}
    ips = [f"127.0.0.{n + 1}" for n in range(4 // per_node)]
    config = check(NodeConfig, {"parallel": {**parallel, "ips": ips}}, "test")
    made = spec().model_copy(update={"config": config, "rank": rank, "node": node})
    assert (made.far_followers, made.is_head_far) == (far_followers, is_head_far)


@pytest.mark.parametrize("line", [b"", b"half a line", b"{}\n", b"no json\n", b"\xff\n"])
def test_anything_else_is_refused(pipe: tuple[int, int], line: bytes) -> None:
    reader, writer = pipe
    os.write(writer, line)
    os.close(writer)
    with pytest.raises(BadMessage, match="worker spec"):
        read_spec(reader)


def test_the_key_is_in_no_error_and_in_no_picture(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    line = spec().line().decode()
    os.write(writer, line.replace(f'"{KEY_HEX}"', f'["{KEY_HEX}"]').encode())
    with pytest.raises(BadMessage) as caught:
        read_spec(reader)
    assert KEY_HEX[:8] not in str(caught.value)
    assert KEY_HEX[:8] not in repr(spec())
