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
from pdrt.grid import group_size, member_of, node_of, number_of, rank_of
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
    node: int = 0  # of its instance, counted from the leader
    leader: str = ""  # where the leader's API is, for an instance of several nodes

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

    @property
    def member(self) -> int:
        """Our number in our group."""
        return member_of(self.config.parallel, self.rank)

    @property
    def place(self) -> int:
        """Our number on our node."""
        parallel = self.config.parallel
        return number_of(parallel, self.rank) % parallel.devices_per_node

    @property
    def followers(self) -> range:
        """The numbers of all but the head in our group."""
        return range(1, group_size(self.config.parallel))

    @property
    def far_followers(self) -> list[int]:
        """Those of them that are on other nodes than we."""
        return [member for member in self.followers if self._is_far(member)]

    @property
    def is_head_far(self) -> bool:
        """Whether the head of our group is on another node."""
        return self._is_far(0)

    def _is_far(self, member: int) -> bool:
        return node_of(self.config.parallel, self.rank_of(member)) != self.node

    def rank_of(self, member: int) -> Rank:
        """Another one's of our group."""
        return rank_of(self.config.parallel, self.rank.dp, member)

    def group_endpoint(self, member: int) -> str:
        """Where the head of our dp rank meets this follower, on one node."""
        return f"ipc://{self.folder}/group-{self.rank.dp}-{member}"

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
