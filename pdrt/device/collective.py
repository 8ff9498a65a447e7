"""Sums over a group of ranks, which are processes of one node or of several.

The promise: a sum has the same bytes on every rank, or PeerLost is raised on all that are left
within the timeout, and then the group is over. A rank's death is mostly told at once, but gloo was
seen to wait on in a send to one that had died; to know at once is the business of `members`.
Between nodes neither gloo nor its store ask who connects: they listen at our address only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from pdrt.device.places import Rendezvous, TcpPlace
from pdrt.errors import ConfigError, PeerLost

if TYPE_CHECKING:  # the null device alone needs no torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import GatherOptions

_TENSOR: Final = "tensor-parallel"
_CONTEXT: Final = "context-parallel"


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    """What we use of torch's gloo group, which its types leave out."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: GatherOptions
    ) -> _Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...


class Collective(Protocol):
    """One rank's end of its group. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, values: Tensor) -> Tensor:
        """Put the sum over all ranks in place of contiguous `values`; they are returned."""
        ...

    def gather(self, values: Tensor) -> list[Tensor] | None:
        """All ranks' `values`, contiguous and of one shape, in their order; rank 0 alone has them.

        The others learn of a lost rank at the next sum.
        """
        ...

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """All ranks' `values`, contiguous and of one shape, in their order, on every rank."""
        ...

    def close(self) -> None:
        """Leave; the others' next sum raises PeerLost."""
        ...


class Solo:
    """A group of one, in which nothing has to be done."""

    rank, size = 0, 1

    def all_reduce_(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> list[Tensor] | None:
        return [values]

    def all_gather(self, values: Tensor) -> list[Tensor]:
        return [values]

    def close(self) -> None:
        pass


class Gloo:
    """A rank of a gloo group; made by `join`. Other devices' tensors travel through the host."""

    def __init__(
        self, rank: int, size: int, group: _Group, timeout_s: float, kind: str = _TENSOR
    ) -> None:
        self.rank, self.size = rank, size
        self._group: _Group | None = group
        self._timeout_s, self._kind = timeout_s, kind

    def all_reduce_(self, values: Tensor) -> Tensor:
        host = values if values.is_cpu else values.cpu()
        self._wait(lambda group: group.allreduce([host]))
        return values if host is values else values.copy_(host)

    def gather(self, values: Tensor) -> list[Tensor] | None:
        from torch.distributed import GatherOptions  # its default root is rank 0

        host = values if values.is_cpu else values.cpu()
        parts = [host.new_empty(host.shape) for _ in range(self.size)] if self.rank == 0 else []
        outputs = [parts] if parts else []
        self._wait(lambda group: group.gather(outputs, [host], GatherOptions()))
        return [part.to(values.device) for part in parts] or None

    def all_gather(self, values: Tensor) -> list[Tensor]:
        host = values if values.is_cpu else values.cpu()
        parts = [host.new_empty(host.shape) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([parts], [host]))
        return [part.to(values.device) for part in parts]

    def _wait(self, begin: Callable[[_Group], _Work]) -> None:
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            raise PeerLost(f"{self._name}: a rank died or is stuck: {error}") from error

    def close(self) -> None:
        self._group = None

    @property
    def _name(self) -> str:
        return f"{self._kind} rank {self.rank} of {self.size} (timeout {self._timeout_s:g} s)"


def join(rank: int, size: int, rendezvous: Rendezvous, timeout_s: float) -> Collective:
    """Meet the other ranks where no earlier group has; blocks until all are there.

    `timeout_s` bounds this wait, and each later one for a rank that falls behind. Raises PeerLost,
    or ConfigError when torch cannot do it.
    """
    tensor, _ = join_both(rank, size, 1, rendezvous, timeout_s)
    return tensor


def join_both(
    rank: int, tp: int, cp: int, rendezvous: Rendezvous, timeout_s: float
) -> tuple[Collective, Collective]:
    """Of tp x cp ranks, tp varying fastest: ours of the same cp rank, and of the same tp rank.

    All of them meet at once, as `join` says.
    """
    if tp * cp == 1:
        return Solo(), Solo()
    cp_rank, tp_rank = divmod(rank, tp)
    timeout = timedelta(seconds=timeout_s)
    try:
        meeting = _Meeting(_store(tp * cp, rendezvous, timeout), rendezvous, timeout)
        tensor = meeting.group(f"cp{cp_rank}", tp_rank, tp)
        context = meeting.group(f"tp{tp_rank}", cp_rank, cp)
    except RuntimeError as error:
        raise PeerLost(
            f"{_TENSOR} rank {tp_rank} of {tp}{_beside(cp_rank, cp)}: the others did not come to"
            f" {rendezvous} within {timeout_s:g} s: {error}"
        ) from error
    return (
        Gloo(tp_rank, tp, tensor, timeout_s) if tensor else Solo(),
        Gloo(cp_rank, cp, context, timeout_s, _CONTEXT) if context else Solo(),
    )


def _beside(rank: int, size: int) -> str:
    return f", {_CONTEXT} rank {rank} of {size}" if size > 1 else ""


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where gloo groups are made, each of its own and not torch's one per process."""

    store: Store
    rendezvous: Rendezvous
    timeout: timedelta

    def group(self, name: str, rank: int, size: int) -> _Group | None:
        """Bound to one address of the host; None when there is nobody else in it."""
        if size == 1:
            return None
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        if not dist.is_gloo_available():
            raise ConfigError("[parallel] tp or cp > 1 needs gloo, which this build of torch lacks")
        gloo = dist.ProcessGroupGloo
        here = self.rendezvous.here if isinstance(self.rendezvous, TcpPlace) else "127.0.0.1"
        options = gloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - no public one in 2.6
        options._devices = [gloo.create_device(hostname=here)]  # noqa: SLF001 - as above
        options._timeout = self.timeout  # noqa: SLF001 - as above
        apart = PrefixStore(name, self.store)
        group: _Group = gloo(apart, rank, size, options)  # type: ignore[assignment]
        return group


def _store(size: int, rendezvous: Rendezvous, timeout: timedelta) -> Store:
    """Where ranks tell each other their addresses. Rank 0's lives as long as its group."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    store: Store
    if not isinstance(rendezvous, TcpPlace):
        store = FileStore(str(rendezvous), size)
        return store
    host, port, door = rendezvous.host, rendezvous.port, rendezvous.door
    fd = None if door is None else door.detach()
    store = TCPStore(
        host, port, size, fd is not None, timeout, wait_for_workers=False, master_listen_fd=fd
    )
    return store
