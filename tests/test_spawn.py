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
