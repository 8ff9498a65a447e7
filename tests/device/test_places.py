"""A place to meet survives its way as text, and what is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrt.device.places import TcpPlace, place_of
from pdrt.errors import BadMessage


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_follower_reads_where_tp_0_listens(host: str) -> None:
    first = TcpPlace.open(host, b"s")
    assert first.door is not None
    found = place_of(str(first), "10.0.0.2", b"s")
    assert found == TcpPlace(host, first.port, "10.0.0.2", b"s")
    assert "s'" not in repr(found), "the secret shows"
    first.door.close()


def test_a_path_is_a_file_of_this_node() -> None:
    assert place_of("/tmp/x/r-1", "10.0.0.2", b"s") == Path("/tmp/x/r-1")


@pytest.mark.parametrize("text", ["tcp://", "tcp://host", "tcp://host:", "tcp://:5", "tcp://h:5x"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(BadMessage, match="is no place to meet"):
        place_of(text, "10.0.0.2", b"s")
