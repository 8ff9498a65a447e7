"""The sum over a tensor-parallel group, whose ranks are processes of one machine.

The promise: a sum has the same bytes on every rank, or PeerLost is raised on all that are left:
at once when one has died, after the timeout when one is stuck. A group that lost a rank is over.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pdrt.errors import ConfigError, PeerLost

if TYPE_CHECKING:  # the null device alone needs no torch
    from torch import Tensor


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    """What we use of torch's gloo group, which its types leave out."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...


class Collective(Protocol):
    """One rank's end of its group. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, values: Tensor) -> Tensor:
        """Put the sum over all ranks in place of contiguous `values`; they are returned."""
        ...

    def close(self) -> None:
        """Leave; the others' next sum raises PeerLost."""
        ...


class Solo:
    """A group of one, in which nothing has to be done."""

    rank, size = 0, 1

    def all_reduce_(self, values: Tensor) -> Tensor:
        return values

    def close(self) -> None:
        pass


class Gloo:
    """A rank of a gloo group; made by `join`. Other devices' tensors travel through the host."""

    def __init__(self, rank: int, size: int, group: _Group, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._group: _Group | None = group
        self._timeout_s = timeout_s

    def all_reduce_(self, values: Tensor) -> Tensor:
        if self._group is None:
            raise RuntimeError("this rank has left its group")
        host = values if values.is_cpu else values.cpu()
        try:
            self._group.allreduce([host]).wait()
        except RuntimeError as error:
            raise PeerLost(f"{self._name}: a rank died or is stuck: {error}") from error
        return values if host is values else values.copy_(host)

    def close(self) -> None:
        self._group = None

    @property
    def _name(self) -> str:
        return f"tensor-parallel rank {self.rank} of {self.size} (timeout {self._timeout_s:g} s)"


def join(rank: int, size: int, rendezvous: Path, timeout_s: float) -> Collective:
    """Meet the other ranks at a file that no earlier group has used; blocks until all are there.

    `timeout_s` bounds this wait, and each later one for a rank that falls behind. Raises PeerLost,
    or ConfigError when torch cannot do it.
    """
    if size == 1:
        return Solo()
    try:
        group = _gloo(rank, size, rendezvous, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"tensor-parallel rank {rank} of {size}: the others did not come to {rendezvous}"
            f" within {timeout_s:g} s: {error}"
        ) from error
    return Gloo(rank, size, group, timeout_s)


def _gloo(rank: int, size: int, rendezvous: Path, timeout: timedelta) -> _Group:
    """A group of its own, not torch's one per process; bound to loopback, whatever the host."""
    import torch.distributed as dist

    if not dist.is_gloo_available():
        raise ConfigError("[parallel] tp > 1 needs gloo, which this build of torch lacks")
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - no public one in 2.6
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 - as above
    options._timeout = timeout  # noqa: SLF001 - as above
    store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
    group: _Group = gloo(store, rank, size, options)  # type: ignore[assignment]
    return group
