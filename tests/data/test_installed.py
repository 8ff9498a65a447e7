"""What the config wants is looked for before a model is loaded."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pdrt.config import NetworkName, TransferSection, TransportName
from pdrt.data.installed import NEEDS, ORDER, check_installed, devices, package, wanted
from pdrt.errors import ConfigError

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def bare(name: TransportName) -> str | None:
    """A host with nothing but pdrt."""
    return None if NEEDS[name].packages else ""


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (TransferSection(), ("shm", "tcp")),
        (TransferSection(network=("nixl", "tcp")), ("shm", "nixl", "tcp")),
        (TransferSection(network=()), ("shm",)),
        (TransferSection(transport="tcp", network=("nixl",)), ("tcp",)),
    ],
)
def test_auto_is_shm_and_the_networks_in_order_and_a_name_is_that_one(
    config: TransferSection, names: tuple[str, ...]
) -> None:
    assert wanted(config) == names


@pytest.mark.parametrize("name", ["nixl", "mooncake", "memfabric"])
def test_what_is_named_and_missing_is_a_start_up_error_with_its_cure(name: NetworkName) -> None:
    for config in (TransferSection(transport=name), TransferSection(network=("tcp", name))):
        with pytest.raises(ConfigError, match=rf"transport {name} is not installed: pip install"):
            check_installed(config, bare)


def test_what_needs_nothing_is_always_there() -> None:
    check_installed(TransferSection(), bare)
    check_installed(TransferSection(transport="tcp"))
    assert package("shm") == package("tcp") == ""
    assert devices("tcp") == []


def test_what_is_installed_is_named_with_its_version() -> None:
    for name in ORDER:
        found = package(name)
        assert not found or found.split()[0] in (*NEEDS[name].packages, *NEEDS[name].modules)


@pytest.mark.parametrize(
    ("name", "extra"), [("nixl", "nixl"), ("mooncake", "mooncake"), ("memfabric", "npu")]
)
def test_what_is_advised_is_what_the_extra_brings(name: NetworkName, extra: str) -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert NEEDS[name].pip == f"pip install {extras[extra][0]}"
