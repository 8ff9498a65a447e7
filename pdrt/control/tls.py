"""The router's certificate: files become a context, or a ConfigError that names the wrong one."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdrt.errors import ConfigError
from pdrt.security import SecuritySection

_STEPS: Final = 10  # of a handshake with ourselves, which takes three


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says of itself. `problem`: why no client would take it."""

    names: Sequence[str] = ()
    expires: float = 0.0  # wall clock
    problem: str = ""


def paths_of(security: SecuritySection) -> Sequence[Path]:
    """Certificate, key and clients' CA, as far as they are named."""
    names = (security.tls_cert, security.tls_key, security.tls_client_ca)
    return [Path(name).expanduser() for name in names if name]


def context_of(security: SecuritySection) -> ssl.SSLContext | None:
    """None when no certificate is named. Raises ConfigError for files that do not work."""
    if not security.tls_cert:
        return None
    certificate, key, *ca = paths_of(security)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check_readable("tls_cert", certificate)
    _check_readable("tls_key", key)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(f"[security] {_why(error, certificate, key)}") from error
    if ca:
        _trust_clients_of(context, ca[0])
    return context


def _trust_clients_of(context: ssl.SSLContext, ca: Path) -> None:
    _check_readable("tls_client_ca", ca)
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"[security] tls_client_ca = '{ca}': no PEM certificates") from error
    context.verify_mode = ssl.CERT_REQUIRED


def _check_readable(key: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        told = f"[security] {key} = '{path}': cannot be read: {error.strerror}"
        raise ConfigError(told) from error


def _no_password() -> str:
    """Nobody is there to be asked for one."""
    raise ValueError("encrypted")


def _why(error: ssl.SSLError | OSError | ValueError, certificate: Path, key: Path) -> str:
    told = str(error)
    if "encrypted" in told:
        return f"tls_key = '{key}': it is encrypted; give one without a password, mode 0600"
    if "MISMATCH" in told.upper():
        return f"tls_key = '{key}': it is not the key of tls_cert = '{certificate}'"
    if "-----BEGIN CERTIFICATE" not in certificate.read_text("utf-8", "replace"):
        return f"tls_cert = '{certificate}': no PEM certificate"
    return f"tls_cert = '{certificate}', tls_key = '{key}': no PEM certificate and key ({told})"


def certificate_of(security: SecuritySection) -> Certificate:
    """What clients will see, found out by a handshake with ourselves.

    Raises ConfigError as `context_of`.
    """
    server = context_of(security.model_copy(update={"tls_client_ca": ""}))
    assert server is not None, "a certificate is named"
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # our own certificate is trust enough
    client.load_verify_locations(paths_of(security)[0])
    try:
        said = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        return Certificate(problem=error.verify_message)
    return Certificate(_names_in(said), ssl.cert_time_to_seconds(str(said["notAfter"])))


def _names_in(said: Mapping[str, object]) -> Sequence[str]:
    pairs = said.get("subjectAltName")
    return [str(pair[1]) for pair in pairs] if isinstance(pairs, tuple) else []


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, object]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    own = server.wrap_bio(to_server, to_client, server_side=True)
    other = client.wrap_bio(to_client, to_server)
    for _ in range(_STEPS):
        done = [_is_done(side) for side in (other, own)]
        if all(done):
            return other.getpeercert() or {}
    raise ConfigError("the certificate is of no use: a handshake with ourselves does not end")


def _is_done(side: ssl.SSLObject) -> bool:
    """Go on with its handshake as far as it goes."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
