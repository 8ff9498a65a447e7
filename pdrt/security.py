"""The settings table [security]: keys, certificates, and bounds on what others may ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey
from pdrt.settings import Positive, Section, Strings

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


class SecuritySection(Section):
    key_file: str = ""
    key: Annotated[str, Field(repr=False)] = ""  # better from PDRT_SECURITY_KEY than from a file
    api_keys: Annotated[Strings, Field(repr=False)] = ()  # clients, at the router
    api_keys_file: str = ""  # the same with names and limits; `pdrt keys` writes it
    max_body_bytes: Positive = 8 << 20
    max_header_bytes: Positive = 32 << 10  # the request line and all headers, at the router
    max_connections: Positive = 4096  # of one address, at the router
    cors_origins: Strings = ()  # of pages that may ask the router: exact ones, or "*"
    tls_cert: str = ""  # PEM, the router's own certificate first; empty: plain HTTP
    tls_key: str = ""
    tls_client_ca: str = ""  # then clients need a certificate of one of these
    max_rooms_per_peer: Positive = 4096

    @model_validator(mode="after")
    def _files_come_together(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key come together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self

    @model_validator(mode="after")
    def _origins_are_origins(self) -> Self:
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ValueError('cors_origins: "*" is all there are; name no others beside it')
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: {origin!r} is no origin: want scheme, host and port as browsers"
                    ' send them, such as "https://chat.example.org", or "*"'
                )
        return self

    def cluster_key(self) -> ClusterKey | None:
        """The key, or None when none is configured. Raises ConfigError when it is no good."""
        text, where = self.key, "[security] key"
        try:
            if not text and self.key_file:
                where = f"[security] key_file = {self.key_file!r}"
                text = Path(self.key_file).expanduser().read_text(encoding="utf-8")
            elif not text:
                return None
            return ClusterKey.from_text(text)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no such ~user
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{where}: {why}") from error

    @property
    def is_key_file_exposed(self) -> bool:
        """Whether other users of this machine may read the key file."""
        try:
            return bool(self.key_file and Path(self.key_file).expanduser().stat().st_mode & 0o044)
        except (OSError, RuntimeError):
            return False  # `cluster_key` says what is wrong
