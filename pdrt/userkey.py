"""The key file that one user's processes on one machine share, made by whoever is first."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pdrt.errors import ConfigError


def make_key(file: Path) -> None:
    """Written whole under another name first: who comes second finds it or makes the same link."""
    if file.exists():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = file.with_name(f".key-{secrets.token_hex(8)}")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_hex(32) + "\n")
        try:
            os.link(fresh, file)
        except FileExistsError:
            return
        finally:
            fresh.unlink()
    except OSError as error:
        raise ConfigError(f"the key file {file} cannot be made: {error}") from error
