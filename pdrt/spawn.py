"""What a supervisor hands to a device worker at birth: one JSON line on its standard input.

Standard input rather than arguments or environment, which other users can read: the line
carries the cluster key. The pipe then stays open, so that its end tells the worker at once
that its supervisor is gone, however it died.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdrt.config import DisaggConfig, NodeConfig, Role
from pdrt.errors import BadMessage
from pdrt.keys import ClusterKey
from pdrt.messages import Rank

_MAX_LINE: Final = 1 << 20


class WorkerSpec(BaseModel):
    # Errors must not show their input: it holds the key.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    role: Role
    rank: Rank
    config: NodeConfig
    disagg: DisaggConfig
    key_hex: Annotated[str, Field(repr=False)]
    endpoint: str  # of the supervisor's socket, ipc://
    epoch: int  # of this worker's life; a later life has a higher one

    @property
    def key(self) -> ClusterKey:
        return ClusterKey(bytes.fromhex(self.key_hex))

    @property
    def title(self) -> str:
        """The process title."""
        return f"pdrt worker {self.role} dp{self.rank.dp} cp{self.rank.cp} tp{self.rank.tp}"

    @property
    def folder(self) -> Path:
        """The node's private directory of sockets."""
        return Path(self.endpoint.removeprefix("ipc://")).parent

    def group_endpoint(self, tp: int) -> str:
        """Where tp 0 of our dp rank meets its follower of this tp rank."""
        return f"ipc://{self.folder}/group-{self.rank.dp}-{tp}"

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


def read_spec(fd: int) -> WorkerSpec:
    """Read the line from `fd`, leaving the pipe open. Raises BadMessage."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece or len(line) > _MAX_LINE:
            raise BadMessage("no worker spec on standard input: `pdrt node` starts workers")
        line += piece
    try:
        return WorkerSpec.model_validate_json(line)
    except ValidationError as error:
        raise BadMessage(f"worker spec: {error}") from error
