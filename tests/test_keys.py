"""What the cluster key gives away to nobody: tokens, MACs and CURVE keys."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdrt.keys import ClusterKey

KEY = ClusterKey.from_text("a key for these tests")
OTHER = ClusterKey.from_text("a key for other tests")
NOW = 1_700_000_000.0


def test_a_key_is_its_text_without_the_blanks_around_it() -> None:
    assert ClusterKey.from_text("  a key for these tests\n") == KEY


@pytest.mark.parametrize("text", ["", "short", " " * 40, "x" * 15])
def test_a_short_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match="at least 16") as refused:
        ClusterKey.from_text(text)
    assert not text.strip() or text not in str(refused.value)


def test_fresh_keys_differ_and_a_key_is_not_printed() -> None:
    assert ClusterKey.fresh() != ClusterKey.fresh()
    assert "tests" not in repr(KEY)


def test_what_is_derived_differs_by_purpose_and_by_key() -> None:
    derived = [KEY.derive("http"), KEY.derive("curve"), KEY.derive("mac"), OTHER.derive("http")]
    assert len(set(derived)) == 4
    assert all(len(value) == 32 and value != KEY.secret for value in derived)


def test_the_bearer_token_is_told_from_all_else() -> None:
    assert KEY.is_bearer(f"Bearer {KEY.bearer()}")
    wrong = [
        None,
        "",
        "Bearer ",
        KEY.bearer(),
        f"Bearer {OTHER.bearer()}",
        f"Bearer {KEY.bearer()} ",
    ]
    assert not any(KEY.is_bearer(header) for header in wrong)


@given(st.binary(max_size=200))
def test_any_bytes_in_the_header_are_just_wrong(header: bytes) -> None:
    """aiohttp hands over undecodable bytes as half surrogates."""
    assert not KEY.is_bearer(header.decode("utf-8", "surrogateescape"))


def test_a_curve_pair_is_a_real_one_and_the_same_for_every_member() -> None:
    public, secret = KEY.curve_pair()
    assert (public, secret) == ClusterKey.from_text("a key for these tests").curve_pair()
    assert zmq.curve_public(secret) == public
    assert OTHER.curve_pair()[0] != public


def test_a_mac_binds_its_parts_their_order_and_their_borders() -> None:
    mac = KEY.mac(b"one", b"two")
    assert len(mac) == 16
    assert KEY.is_mac(mac, b"one", b"two")
    others = [(b"two", b"one"), (b"onet", b"wo"), (b"onetwo",), (b"one", b"two", b""), ()]
    assert not any(KEY.is_mac(mac, *parts) for parts in others)
    assert not OTHER.is_mac(mac, b"one", b"two")
    assert not KEY.is_mac(b"", b"one", b"two")


def test_a_room_token_is_good_for_its_room_attempt_and_time_only() -> None:
    token = KEY.room_token(5, 65536, NOW + 60)
    assert KEY.is_room_token(token, 5, 65536, NOW)
    assert not KEY.is_room_token(token, 6, 65536, NOW)
    assert not KEY.is_room_token(token, 5, 0, NOW)
    assert not KEY.is_room_token(token, 5, 65536, NOW + 60)
    assert not OTHER.is_room_token(token, 5, 65536, NOW)


def test_a_later_expiry_cannot_be_written_onto_a_token() -> None:
    _, _, mac = KEY.room_token(5, 0, NOW).partition(":")
    assert not KEY.is_room_token(f"{NOW + 1e6:.3f}:{mac}", 5, 0, NOW)


@given(st.text(max_size=80))
def test_any_text_is_just_a_wrong_token(text: str) -> None:
    assert not KEY.is_room_token(text, 5, 0, NOW)


@pytest.mark.parametrize(
    "text", ["", ":", "nan:", "inf:00", "1e999:00", "1_0:00", "\ud800:00", "٣:00"]
)
def test_odd_numbers_are_just_wrong_tokens(text: str) -> None:
    assert not KEY.is_room_token(text, 5, 0, NOW)
