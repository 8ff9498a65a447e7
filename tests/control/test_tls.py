"""TLS at the router: wrong files end the start, and renewed ones need no restart."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientSession

from pdrt.chat import first_model
from pdrt.config import NodeConfig, RouterConfig
from pdrt.control.reload import watch
from pdrt.control.router import make_router, make_server, tls_of
from pdrt.control.sse import DONE
from pdrt.control.tls import certificate_of, context_of
from pdrt.errors import ConfigError, Unavailable
from pdrt.keys import ClusterKey
from pdrt.security import SecuritySection
from pdrt.settings import check
from pdrt.top.shell import ask
from tests.control.fake_leader import stream
from tests.control.router_rig import rig

NAME = "router.test"
TLS = {"tls_cert", "tls_key"}


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def put(folder: Path, certificate: trustme.LeafCert, name: str = "router") -> tuple[str, str]:
    files = folder / f"{name}.pem", folder / f"{name}.key"
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    files[0].write_bytes(chain)
    files[1].write_bytes(certificate.private_key_pem.bytes())
    files[1].chmod(0o600)
    return str(files[0]), str(files[1])


def section(files: tuple[str, str], ca: str = "") -> SecuritySection:
    return SecuritySection(tls_cert=files[0], tls_key=files[1], tls_client_ca=ca)


@asynccontextmanager
async def served(security: SecuritySection) -> AsyncIterator[int]:
    """A router on a socket of its own; its files are looked at all the time."""
    tables = {"hybrid": [{"http": "127.0.0.1:1"}], "security": security.model_dump()}
    router = make_router(check(RouterConfig, tables, "-"), ClusterKey(b"k" * 32))
    server = make_server(router)
    tls = tls_of(router, server)
    listening = socket.create_server(("127.0.0.1", 0))
    await server.start(listening, tls)
    watching = asyncio.create_task(watch(router.reloads, every_s=0.01))
    try:
        yield listening.getsockname()[1]
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await server.close(0.1)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    async def connect(
        port: int, trusted: trustme.CA, own: trustme.LeafCert | None = None
    ) -> Client:
        context = ssl.create_default_context()
        trusted.configure_trust(context)
        if own is not None:
            own.configure_cert(context)
        streams = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=NAME
        )
        return Client(*streams)

    @property
    def serial(self) -> str:
        said = self.writer.get_extra_info("peercert")
        return str(said["serialNumber"])

    async def health(self) -> int:
        self.writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        line = await self.reader.readline()
        while (await self.reader.readline()).strip():
            pass
        return int(line.split()[1])

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)


async def test_the_router_speaks_tls_with_its_certificate(ca: trustme.CA, tmp_path: Path) -> None:
    async with (
        served(section(put(tmp_path, ca.issue_cert(NAME)))) as port,
        asyncio.timeout(10),
    ):
        client = await Client.connect(port, ca)
        assert await client.health() in (200, 503)
        await client.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await Client.connect(port, trustme.CA())


async def test_plain_http_gets_nothing(ca: trustme.CA, tmp_path: Path) -> None:
    async with (
        served(section(put(tmp_path, ca.issue_cert(NAME)))) as port,
        asyncio.timeout(10),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()


async def test_who_does_not_trust_the_certificate_is_told_what_to_do(
    ca: trustme.CA, tmp_path: Path
) -> None:
    async with served(section(put(tmp_path, ca.issue_cert(NAME)))) as port, ClientSession() as asks:
        with pytest.raises(Unavailable, match=r"not trusted, .*SSL_CERT_FILE names"):
            await ask(asks, f"https://127.0.0.1:{port}")
        with pytest.raises(Unavailable, match=r"not trusted, .*SSL_CERT_FILE names"):
            await first_model(asks, f"https://127.0.0.1:{port}/v1")


async def test_who_asks_a_plain_server_by_tls_is_told_so() -> None:
    plain = await asyncio.start_server(_plain, "127.0.0.1", 0)
    port = plain.sockets[0].getsockname()[1]
    async with plain, ClientSession() as asks:
        with pytest.raises(Unavailable, match="does not speak TLS there"):
            await ask(asks, f"https://127.0.0.1:{port}")


async def _plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(64)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def test_a_renewed_certificate_is_used_and_open_connections_stay(
    ca: trustme.CA, tmp_path: Path
) -> None:
    security = section(put(tmp_path, ca.issue_cert(NAME)))
    async with served(security) as port, asyncio.timeout(10):
        old = await Client.connect(port, ca)
        put(tmp_path, ca.issue_cert(NAME))
        serial = old.serial
        while serial == old.serial:
            fresh = await Client.connect(port, ca)
            serial = fresh.serial
            assert await fresh.health() in (200, 503)
            await fresh.close()
        assert await old.health() in (200, 503)
        await old.close()


async def test_a_half_written_renewal_leaves_the_old_certificate(
    ca: trustme.CA, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    security = section(put(tmp_path, ca.issue_cert(NAME)))
    async with served(security) as port, asyncio.timeout(10):
        before = await Client.connect(port, ca)
        half = put(tmp_path, ca.issue_cert(NAME), "half")
        os.replace(half[1], security.tls_key)
        told = ""
        while "reload_failed" not in told:
            await asyncio.sleep(0.01)
            told += capfd.readouterr().out
        after = await Client.connect(port, ca)
        assert after.serial == before.serial
        for client in (before, after):
            assert await client.health() in (200, 503)
            await client.close()


async def test_with_a_client_ca_only_its_clients_are_let_in(ca: trustme.CA, tmp_path: Path) -> None:
    clients = trustme.CA()
    file = tmp_path / "clients.pem"
    clients.cert_pem.write_to_path(str(file))
    security = section(put(tmp_path, ca.issue_cert(NAME)), str(file))
    async with served(security) as port, asyncio.timeout(10):
        member = await Client.connect(port, ca, clients.issue_cert("someone@example.org"))
        assert await member.health() in (200, 503)
        await member.close()
        for own in (None, trustme.CA().issue_cert("else@example.org")):
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await _refused(port, ca, own)


async def _refused(port: int, ca: trustme.CA, own: trustme.LeafCert | None) -> None:
    """With TLS 1.3 a client hears of it when it reads."""
    client = await Client.connect(port, ca, own)
    try:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        await client.reader.readexactly(1)
    finally:
        await client.close()


async def test_answers_streams_and_large_prompts_pass_through_tls(
    ca: trustme.CA, tmp_path: Path
) -> None:
    files = section(put(tmp_path, ca.issue_cert("127.0.0.1"))).model_dump(include=TLS)
    context = ssl.create_default_context()
    ca.configure_trust(context)
    pieces = [b"data: %d\n\n" % number + b": " + b"x" * 50_000 + b"\n\n" for number in range(40)]
    async with rig(security=files) as r:
        large = {"prompt": "p" * 4_000_000}
        body = io.BytesIO(json.dumps(large).encode())
        async with r.session.post(r.url + "/generate", data=body, ssl=context) as answer:
            assert answer.status == 200
        assert r.prefill[0].seen[0].body["prompt"] == large["prompt"]
        r.decode[0].plays.append(stream(*pieces, DONE))
        asked = {"prompt": "x", "stream": True}
        async with r.session.post(r.url + "/generate", json=asked, ssl=context) as answer:
            assert await answer.read() == b"".join(pieces) + DONE
        r.decode[0].plays.append(stream(pieces[0], ending="hang"))
        async with r.session.post(r.url + "/generate", json=asked, ssl=context) as answer:
            await answer.content.readany()
            answer.close()  # the client leaves: both legs are let go
        await r.at_rest()
        async with r.session.post(r.url + "/generate", data=b"junk", ssl=context) as answer:
            assert answer.status == 400


# Files.


def test_files_that_do_not_work_are_named(ca: trustme.CA, tmp_path: Path) -> None:
    good, other = put(tmp_path, ca.issue_cert(NAME)), put(tmp_path, ca.issue_cert(NAME), "other")
    junk = tmp_path / "junk"
    junk.write_text("no PEM")
    none = str(tmp_path / "none")
    for files, said in (
        ((none, good[1]), f"tls_cert = '{none}': cannot be read"),
        ((good[0], none), f"tls_key = '{none}': cannot be read"),
        ((good[0], other[1]), "is not the key of"),
        ((str(junk), good[1]), "no PEM certificate"),
        ((good[0], str(junk)), "tls_key"),
    ):
        with pytest.raises(ConfigError, match=r"\[security\]") as raised:
            context_of(section(files))
        assert said in str(raised.value)
    with pytest.raises(ConfigError, match="tls_client_ca"):
        context_of(section(good, str(junk)))


def test_settings_that_make_no_sense_are_refused() -> None:
    for tables, said in (
        ({"tls_cert": "a"}, "come together"),
        ({"tls_key": "a"}, "come together"),
        ({"tls_client_ca": "a"}, "needs tls_cert"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(SecuritySection, tables, "-")


@pytest.mark.parametrize(
    "security", [{"tls_cert": "a", "tls_key": "b"}, {"cors_origins": ["https://a.org"]}]
)
def test_a_node_refuses_what_it_would_not_do(security: dict[str, object]) -> None:
    """A hybrid instance speaks plain HTTP: its settings must not say otherwise."""
    with pytest.raises(ConfigError, match="put one in front"):
        check(NodeConfig, {"security": security}, "hybrid.toml")


def test_a_certificate_tells_its_names_and_its_end(ca: trustme.CA, tmp_path: Path) -> None:
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9)
    leaf = ca.issue_cert(NAME, "127.0.0.1", not_after=end)
    told = certificate_of(section(put(tmp_path, leaf)))
    assert told.problem == ""
    assert list(told.names) == [NAME, "127.0.0.1"]
    assert told.expires == pytest.approx(end.timestamp(), abs=1)


def test_an_expired_certificate_is_found_out(ca: trustme.CA, tmp_path: Path) -> None:
    end = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    leaf = ca.issue_cert(NAME, not_after=end)
    assert "expired" in certificate_of(section(put(tmp_path, leaf))).problem
