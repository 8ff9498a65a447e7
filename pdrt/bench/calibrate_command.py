"""The command `pdrt bench calibrate`: its options, and nothing that takes time to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pdrt import config
from pdrt.config import NodeConfig
from pdrt.errors import ConfigError
from pdrt.given import with_model

CALIBRATE: Final = (
    "Examples: `pdrt bench calibrate --out mine.toml` · `pdrt bench calibrate --model ~/llama"
    " --dtype bfloat16 --threads 4 --out mine.toml` · then `pdrt plan --cost mine.toml"
    " --input-len 2000 --output-len 200 --rate 2 --workers 4`"
)


def calibrate(
    out: Annotated[Path, typer.Option(help="The cost file to write.")],
    model: Annotated[
        str, typer.Option(help="A model's directory, or llama-100m or tiny: random ones made here.")
    ] = "llama-100m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    quantize: Annotated[str, typer.Option(help="int8: matrices are held so.")] = "none",
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of one worker.")] = 1,
    cores: Annotated[int, typer.Option(min=0, help="That all workers share; 0: all.")] = 0,
    chunk: Annotated[
        int, typer.Option(min=16, max=65536, help="Most prompt tokens in one step.")
    ] = 512,
    longest: Annotated[
        int, typer.Option(min=64, max=1_000_000, help="Tokens of the longest sequences.")
    ] = 2048,
    most: Annotated[
        int, typer.Option(min=1, max=4096, help="Sequences that decode at once, at most.")
    ] = 32,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="About how long to measure.")
    ] = 120.0,
    name: Annotated[str, typer.Option(help="In the file. [default: the file's own]")] = "",
    json_file: Annotated[str, typer.Option("--json", help="Write measured and fitted steps.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no words.")] = False,
) -> None:
    """Measure this machine with a model, and write the cost file that `pdrt sim` and `plan` use.

    Steps over batches, contexts and chunks on the real engine; what router and server add, on
    real instances without a model; transfers. Ends with how far the fit is off.
    """
    from pdrt.bench.calibrate import Asked, cores_of
    from pdrt.bench.calibrate import calibrate as measure
    from pdrt.bench.layouts import Ground
    from pdrt.bench.random_model import NAMED, prepared
    from pdrt.bench.shell import Report
    from pdrt.up.layout import Wanted

    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory")
    if longest <= chunk:
        raise ConfigError(f"--longest {longest}: want more than --chunk, {chunk}")
    usable = cores_of(cores)
    if threads > len(usable):
        raise ConfigError(f"--threads {threads}: there are {len(usable)} cores")
    if model in NAMED:
        model = str(prepared(config.cache_dir(), model, NAMED[model]))
    chosen = {
        "model": {"path": model, "dtype": dtype, "quantize": quantize},
        "device": {"threads": threads},
        "scheduler": {"max_prefill_tokens": chunk},
    }
    settings = with_model(config.load(NodeConfig, None, options=chosen))
    asked = Asked(
        name=name or out.stem,
        config=settings,
        cores=usable,
        kv_bytes=_POOL_BYTES,
        longest=longest,
        most=most,
        seconds=seconds,
    )
    pair = usable if len(usable) > 1 else [*usable, *usable]  # prefill and decode each need one
    ground = Ground(Wanted(), settings, config.process_environ(), pair)
    report = Report(json_file, is_quiet=quiet)
    raise typer.Exit(measure(asked, ground, out, report, Console(highlight=False)))


_POOL_BYTES: Final = 1 << 30  # as `pdrt up` gives a worker
