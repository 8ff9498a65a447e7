"""Small parts of the engine transports: offers, runs in portions, settings for C libraries."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.transport import lane
from pdrt.data.transport.engine import PORTION
from pdrt.data.transport.lane import Offer, portions
from pdrt.errors import TransferFailed


@pytest.mark.parametrize(
    "junk", [b"", b"\xc0", msgpack.packb([1, 2, 3]), msgpack.packb([b"x", 1]), b"\xdd\xff\xff\xff"]
)
def test_what_is_no_offer_is_refused(junk: bytes) -> None:
    with pytest.raises(TransferFailed):
        Offer.unpack(junk)


def test_an_offer_survives_the_wire() -> None:
    offer = Offer(b"name", 1 << 47, 1 << 40)
    assert Offer.unpack(offer.pack()) == offer


RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 12)), max_size=20)


@given(RUNS, st.integers(1, 15), st.integers(1, 5))
def test_portions_carry_the_same_bytes_in_the_same_order(
    rows: list[tuple[int, int, int]], most_bytes: int, most_runs: int
) -> None:
    runs = np.array(rows, dtype=np.int64).reshape(-1, 3)
    cut = list(portions(runs, most_bytes, most_runs))
    assert _bytes(runs) == _bytes(np.concatenate([NO_RUNS, *cut]))
    for portion in cut:
        assert 0 < len(portion) <= most_runs
        assert 0 < portion[:, 2].sum() <= most_bytes


def _bytes(runs: Runs) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, size in runs.tolist() for i in range(size)]


def test_neighbours_travel_as_one_run() -> None:
    blocks = np.array([[0, 100, 10], [10, 110, 10], [20, 120, 10], [40, 130, 10]])
    (portion,) = portions(blocks, PORTION, 512)
    assert portion.tolist() == [[0, 100, 30], [40, 130, 10]]


def test_a_setting_for_a_c_library_leaves_nothing_behind() -> None:
    name = "PDRT_TEST_SETTING"
    with lane.setting(name, "1"), lane.setting(name, "2"), lane.setting(name, ""):
        assert _c_value(name) == b"2"
    assert _c_value(name) is None
    with pytest.raises(ZeroDivisionError), lane.setting(name, "1"):
        raise ZeroDivisionError
    assert _c_value(name) is None


def test_what_the_user_has_set_stays() -> None:
    with lane.setting("PDRT_TEST_SETTING", "theirs"):
        lane.set_default("PDRT_TEST_SETTING", "ours")
        assert _c_value("PDRT_TEST_SETTING") == b"theirs"


def _c_value(name: str) -> bytes | None:
    getenv: Callable[[bytes], bytes | None] = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return getenv(name.encode())
