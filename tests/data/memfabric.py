"""A stand-in for the module `memfabric_hybrid`: the same calls, carried out on one host.

Sessions name processes: where the real engine has its port, this one has its pid, and a write
is one `process_vm_writev`, which needs no answer from the target, like a write of an NPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = ctypes.c_ssize_t


@dataclass
class StandIn:
    """`answers`: what calls return instead of 0, by their name, first to last."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)

    def TransferEngine(self) -> Engine:
        return Engine(self)

    def create_config_store(self, store_url: str) -> int:
        self.stores.append(store_url)
        return self.answer("create_config_store")

    def set_log_level(self, level: int) -> int:
        return self.answer("set_log_level")

    def answer(self, call: str) -> int:
        self.calls.append(call)
        return self.answers[call].pop(0) if self.answers.get(call) else 0


@dataclass
class Engine:
    library: StandIn

    def get_rpc_port(self) -> int:
        return os.getpid()

    def initialize(self, store_url: str, session_id: str, role: str, device_id: int) -> int:
        self.library.roles.append(role)
        return self.library.answer("initialize")

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        return self.library.answer("register_memory")

    def unregister_memory(self, buffer_addr: int) -> int:
        return self.library.answer("unregister_memory")

    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        if answer := self.library.answer("batch_transfer_sync_write"):
            return answer
        here, there = _vector(buffers, lengths), _vector(peer_buffers, lengths)
        pid, count = int(dest_session.rpartition(":")[2]), ctypes.c_ulong(len(lengths))
        done = _libc.process_vm_writev(pid, _at(here), count, _at(there), count, ctypes.c_ulong(0))
        return 0 if done == sum(lengths) else -1

    def destroy(self) -> None:
        self.library.answer("destroy")


def _vector(addresses: Sequence[int], lengths: Sequence[int]) -> np.typing.NDArray[np.uint64]:
    return np.array([addresses, lengths], dtype=np.uint64).T.copy()


def _at(vector: np.typing.NDArray[np.uint64]) -> ctypes.c_void_p:
    return ctypes.c_void_p(vector.ctypes.data)
