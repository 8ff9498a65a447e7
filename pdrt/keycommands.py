"""`pdrt keys`: gives API keys to clients and takes them back, in the file that routers read.

And it tells the operator the token that follows from the cluster's own key.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pdrt import config
from pdrt.config import NodeConfig
from pdrt.control.apikeys import KeyRecord, hash_of, new_key, with_key, without_key
from pdrt.control.keyfile import change_keys, read_keys
from pdrt.errors import ConfigError
from pdrt.settings import check

keys = typer.Typer(
    help="API keys of clients: give one, list them, take one back. And the cluster's own token.",
    no_args_is_help=True,
    epilog="Example: `pdrt keys add alice --rpm 60`",
)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        envvar="PDRT_SECURITY_API_KEYS_FILE",
        help="The [security] api_keys_file of the router. [default: in your config directory]",
        show_default=False,
    ),
]


@keys.command(epilog="Example: `pdrt keys add alice --rpm 60 --tokens-per-minute 100000`")
def add(
    name: Annotated[str, typer.Argument(help="Shown in logs and metrics.")],
    file: FileOption = None,
    rpm: Annotated[int, typer.Option(min=0, help="Requests a minute; 0: no limit.")] = 0,
    concurrent: Annotated[int, typer.Option(min=0, help="Requests at a time; 0: no limit.")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, help="Prompts and the most that answers may have; 0: no limit.")
    ] = 0,
) -> None:
    """Make a key and print it, once: the file has its hash only."""
    path, key = _path(file), new_key()
    fields = {
        "name": name,
        "sha256": hash_of(key),
        "rpm": rpm,
        "concurrent": concurrent,
        "tokens_per_minute": tokens_per_minute,
    }
    record = check(KeyRecord, fields, "pdrt keys add")
    change_keys(path, partial(with_key, added=record))
    typer.echo(key)
    typer.echo(f"{path}: {name} may ask now; this key is not shown again.", err=True)
    typer.echo(
        f'Routers read it with `[security] api_keys_file = "{path}"`, and read changes themselves.',
        err=True,
    )


@keys.command("list", epilog="Example: `pdrt keys list`")
def list_keys(file: FileOption = None) -> None:
    """The names and their limits; the keys themselves are nowhere."""
    path = _path(file)
    if not path.exists():
        typer.echo(f"{path} is not there: no keys yet; `pdrt keys add NAME` makes one", err=True)
        return
    table = Table(title=str(path), title_justify="left")
    columns = ("name", "requests a minute", "at a time", "tokens a minute", "hash begins with")
    for column in columns:
        table.add_column(column)
    for record in read_keys(path):
        limits = (record.rpm, record.concurrent, record.tokens_per_minute)
        table.add_row(record.name, *(str(each or "-") for each in limits), record.sha256[:12])
    Console(highlight=False).print(table)


@keys.command(epilog="Example: `pdrt keys remove alice`")
def remove(
    name: Annotated[str, typer.Argument(help="Whose key.")], file: FileOption = None
) -> None:
    """Take a key back: within seconds no router lets it in."""
    path = _path(file)
    change_keys(path, partial(without_key, name=name))
    typer.echo(f"{path}: {name} is removed", err=True)


@keys.command(
    epilog='Example: `curl -H "authorization: Bearer $(pdrt keys token)"'
    " http://127.0.0.1:8100/internal/status`"
)
def token(
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="The cluster key's file. [default: that of your environment, or else the one"
            " in your config directory]; `pdrt up` has its own, `key` beside its logs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the token that leaders and the admin listener want. Whoever has it may do anything."""
    named = {"key": "", "key_file": str(key_file)} if key_file else {}
    security = config.load(NodeConfig, None, options={"security": named}).security
    if not (security.key or security.key_file):
        usual = config.user_key_file()
        if not usual.exists():
            raise ConfigError(
                f"there is no cluster key at {usual}: --key-file names another file; that of"
                " `pdrt up` is `key` beside the logs that its ready line names"
            )
        security = security.model_copy(update={"key_file": str(usual)})
    key = security.cluster_key()
    assert key is not None, "a file is named"
    typer.echo(key.bearer())


def _path(file: Path | None) -> Path:
    return (file or config.api_keys_file()).expanduser().resolve()
