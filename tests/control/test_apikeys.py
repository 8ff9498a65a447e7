"""API keys: what a file may say, what a key may do a minute, and the commands that write it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdrt.cli import app
from pdrt.control.apikeys import KeyRecord, hash_of, new_key, plain_records, records_in, text_of
from pdrt.control.bucket import Bucket
from pdrt.control.keyfile import change_keys, read_keys
from pdrt.control.quota import KeyRing, Quota
from pdrt.errors import BadRequest, ConfigError, PdrtError, RateLimited


def record(name: str = "alice", key: str = "secret", **limits: int) -> KeyRecord:
    return KeyRecord(name=name, sha256=hash_of(key), **limits)


def refusal(quota: Quota, now: float, tokens: int = 0) -> RateLimited:
    with pytest.raises(RateLimited) as raised:
        quota.check(now, tokens)
    return raised.value


# Buckets.


def test_a_minutes_allowance_may_be_used_at_once_and_comes_back_evenly() -> None:
    bucket = Bucket(60, now=5.0)
    for _ in range(60):
        assert bucket.wait(1, 5.0) == 0
        bucket.take(1, 5.0)
    assert bucket.wait(1, 5.0) == pytest.approx(1.0)
    assert bucket.wait(30, 5.0) == pytest.approx(30.0)
    assert bucket.wait(1, 6.0) == 0


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=40),
)
def test_no_minute_sees_more_than_a_full_bucket_and_a_minutes_gain(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket(per_minute), 0.0, list[tuple[float, int]]()
    for pause, cost in steps:
        now += pause
        if bucket.wait(cost, now) == 0:
            bucket.take(cost, now)
            taken.append((now, cost))
    for begin, _ in taken:
        within = sum(cost for at, cost in taken if begin <= at <= begin + 60)
        assert within <= 2 * per_minute + 1e-3


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 200))
def test_who_waits_as_long_as_told_is_let_in_and_not_much_before(
    per_minute: int, used: int, cost: int
) -> None:
    used, cost = min(used, per_minute), min(cost, per_minute)
    bucket = Bucket(per_minute)
    bucket.take(used, 0.0)
    wait = bucket.wait(cost, 0.0)
    if wait:
        assert Bucket.wait(bucket, cost, wait * 0.99) > 0
    assert bucket.wait(cost, wait) == 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, now=100.0)
    bucket.take(60, 100.0)
    assert bucket.wait(1, 50.0) == pytest.approx(1.0)
    assert bucket.wait(1, 101.0) == 0


# Quotas.


def test_without_limits_everything_is_let_in() -> None:
    quota = Quota(record(), 0.0)
    for _ in range(1000):
        quota.take(10**9, 0.0)


def test_requests_a_minute_are_limited_with_a_truthful_retry_after() -> None:
    quota = Quota(record(rpm=3), 0.0)
    for _ in range(3):
        quota.take(0, 0.0)
    error = refusal(quota, 0.0)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limited", 20)
    assert "3 requests a minute" in str(error)
    assert refusal(quota, 18.9).retry_after == 2
    quota.take(0, 20.0)


def test_requests_at_a_time_are_limited_until_one_ends() -> None:
    quota = Quota(record(concurrent=2), 0.0)
    quota.take(0, 0.0)
    quota.take(0, 0.0)
    assert "2 requests at a time" in str(refusal(quota, 0.0))
    quota.give()
    quota.take(0, 0.0)


def test_tokens_a_minute_are_limited_and_what_never_fits_is_a_mistake() -> None:
    quota = Quota(record(tokens_per_minute=600), 0.0)
    quota.take(500, 0.0)
    assert refusal(quota, 0.0, 200).retry_after == 10
    quota.take(100, 0.0)
    with pytest.raises(BadRequest, match="601 tokens"):
        quota.check(1e6, 601)


def test_a_refused_request_uses_up_nothing() -> None:
    quota = Quota(record(rpm=2, tokens_per_minute=100), 0.0)
    quota.take(90, 0.0)
    for _ in range(50):
        refusal(quota, 0.0, 50)
    quota.take(10, 0.0)
    assert quota.running == 2


def test_a_key_is_found_by_what_was_sent() -> None:
    ring = KeyRing(lambda: 0.0)
    ring.replace([record("alice", "a"), record("bob", "b")])
    found = [ring.find(f"{scheme} b") for scheme in ("Bearer", "bearer", "BEARER")]
    assert [quota and quota.name for quota in found] == ["bob"] * 3
    for wrong in ("", "b", "Basic b", "Bearer", "Bearer c", "Bearer b b", "Bearer \udcff"):
        assert ring.find(wrong) is None


def test_new_limits_hold_at_once_and_what_was_used_stays_used() -> None:
    ring = KeyRing(lambda: 0.0)
    ring.replace([record("alice", "a", rpm=2), record("bob", "b")])
    alice = ring.find("Bearer a")
    assert alice is not None
    alice.take(0, 0.0)
    alice.take(0, 0.0)
    assert ring.replace([record("alice", "new", rpm=3)]) == ["bob"]
    assert ring.find("Bearer a") is None
    assert ring.find("Bearer new") is alice
    alice.take(0, 0.0)
    refusal(alice, 0.0)


# Files.


def test_keys_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.toml"
    records = [record("alice", "a", rpm=3, tokens_per_minute=10), record("bob", "b", concurrent=1)]
    change_keys(path, lambda old: [*old, *records])
    assert list(read_keys(path)) == records
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir() if p.name != path.name] == ["keys.toml.lock"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("key = 3", "key"),
        ("[[key]]\nname = 'a b'\nsha256 = '" + "0" * 64 + "'", "name = 'a b'"),
        ("[[key]]\nname = 'a'", "sha256"),
        ("[[key]]\nname = 'a'\nsha256 = 'secret-itself'", "sha256"),
        ("[[key]]\nname = 'a'\nrps = 1", "did you mean rpm"),
        ("[[key]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nrpm = -1", "rpm = -1"),
        ("]", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        read_keys(path)
    assert str(path) in str(raised.value)
    assert "secret-itself" not in str(raised.value)


def test_a_name_or_a_key_stands_once() -> None:
    for others in ([record("alice", "x")], [record("bob", "secret")]):
        tables = {"key": [each.model_dump() for each in (record(), *others)]}
        with pytest.raises(ConfigError, match="stands twice"):
            records_in(tables, "keys.toml")


def test_a_change_that_is_refused_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    change_keys(path, lambda _old: [record()])
    before = path.read_bytes()

    def refuse(_old: object) -> list[KeyRecord]:
        raise ConfigError("no")

    with pytest.raises(PdrtError):
        change_keys(path, refuse)
    assert path.read_bytes() == before


def test_plain_keys_have_names_and_no_limits() -> None:
    found = plain_records(["a", "b", "a"])
    assert [each.name for each in found] == ["api_keys-1", "api_keys-2"]
    assert found[1].sha256 == hash_of("b")
    assert "secret" not in text_of([record()])


def test_made_keys_differ_and_are_long() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= 48


# Commands.


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.toml", CliRunner()
    options = ["--file", str(path)]
    none = runner.invoke(app, ["keys", "list", *options])
    assert (none.exit_code, "no keys yet" in none.stderr) == (0, True)
    told = runner.invoke(
        app, ["keys", "add", "alice", "--rpm", "60", "--concurrent", "2", *options]
    )
    assert told.exit_code == 0
    key = told.stdout.strip()
    (found,) = read_keys(path)
    assert found == KeyRecord(name="alice", sha256=hash_of(key), rpm=60, concurrent=2)
    assert key not in path.read_text()
    listed = runner.invoke(app, ["keys", "list", *options])
    assert "alice" in listed.stdout
    assert key not in listed.stdout
    assert runner.invoke(app, ["keys", "remove", "alice", *options]).exit_code == 0
    assert read_keys(path) == ()


def test_the_commands_refuse_what_cannot_be(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.toml", CliRunner()
    options = ["--file", str(path)]
    assert runner.invoke(app, ["keys", "add", "alice", *options]).exit_code == 0
    for arguments, said in (
        (["add", "alice"], "there is a key named 'alice'"),
        (["add", "two words"], "name"),
        (["remove", "bob"], "there are: alice"),
    ):
        refused = runner.invoke(app, ["keys", *arguments, *options])
        assert isinstance(refused.exception, ConfigError)
        assert said in str(refused.exception)
