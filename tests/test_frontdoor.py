"""What `pdrt doctor` says of the router's keys and certificate."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import trustme

from pdrt.control.apikeys import KeyRecord, hash_of
from pdrt.control.keyfile import change_keys
from pdrt.findings import Finding, Verdict
from pdrt.frontdoor import check_door
from pdrt.security import SecuritySection


def certificate(folder: Path, *names: str, days: float = 90) -> SecuritySection:
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    leaf = trustme.CA().issue_cert(*names, not_after=end)
    cert, key = folder / "c.pem", folder / "c.key"
    leaf.cert_chain_pems[0].write_to_path(str(cert))
    leaf.private_key_pem.write_to_path(str(key))
    key.chmod(0o600)
    return SecuritySection(tls_cert=str(cert), tls_key=str(key))


def only(security: SecuritySection, host: str = "127.0.0.1") -> Finding:
    (found,) = check_door(security, host)
    return found


def test_on_loopback_nothing_is_missed_and_elsewhere_it_is_said() -> None:
    assert list(check_door(SecuritySection(), "127.0.0.1")) == []
    found = list(check_door(SecuritySection(), "10.0.0.1"))
    assert [each.verdict for each in found] == [Verdict.NOTE, Verdict.NOTE]
    assert all(each.advice for each in found)


def test_a_file_of_keys_is_read_and_its_mode_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    security = SecuritySection(api_keys_file=str(path))
    assert only(security).verdict is Verdict.WRONG
    change_keys(path, lambda _old: [KeyRecord(name="a", sha256=hash_of("a"))])
    assert (only(security).verdict, only(security).what) == (Verdict.FINE, f"API keys: 1 in {path}")
    path.chmod(0o644)
    _, exposed = check_door(security, "127.0.0.1")
    assert (exposed.verdict, exposed.advice) == (Verdict.NOTE, f"chmod 600 {path}")
    path.write_text("[[key]]\nname = 1")
    assert "name = 1" in only(security).what


@pytest.mark.parametrize(
    ("days", "verdict", "said"),
    [
        (90, Verdict.FINE, "for 90 more days"),
        (5, Verdict.NOTE, "for 5 more days"),
        (-1, Verdict.WRONG, "expired"),
    ],
)
def test_the_end_of_a_certificate_is_told(
    tmp_path: Path, days: float, verdict: Verdict, said: str
) -> None:
    found = only(certificate(tmp_path, "router.test", days=days))
    assert found.verdict is verdict
    assert said in found.what
    assert verdict is Verdict.WRONG or "router.test" in found.what


def test_a_key_of_another_certificate_and_one_that_others_may_read(tmp_path: Path) -> None:
    security = certificate(tmp_path, "router.test")
    Path(security.tls_key).chmod(0o640)
    _, exposed = check_door(security, "127.0.0.1")
    assert exposed.advice == f"chmod 600 {security.tls_key}"
    Path(security.tls_key).write_bytes(trustme.CA().issue_cert("else.test").private_key_pem.bytes())
    assert "is not the key of" in only(security).what
