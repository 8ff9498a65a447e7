"""The parts of a device worker, made from its spec."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from aiohttp import ClientSession

from pdrt import messages
from pdrt.control.bootstrap_client import BootstrapClient
from pdrt.data.commands import TransferCommand
from pdrt.data.events import TransferEvent
from pdrt.data.limits import Limits as TransferLimits
from pdrt.data.manager import KVTransferManager, TransferStats
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.memfabric import Store
from pdrt.device.backends import retraction_of
from pdrt.device.batch import Runner
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.spawn import WorkerSpec

AnyScheduler: TypeAlias = Scheduler | PrefillDisaggScheduler | DecodeDisaggScheduler


class Transfers(Protocol):
    """A rank's or a group's transfer side, for its scheduler. No call waits."""

    def do(self, command: TransferCommand) -> None: ...

    def take_events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""
        ...

    def stats(self) -> TransferStats: ...


class OwnTransfers(Transfers, Protocol):
    """A rank's own, which has a life; see KVTransferManager."""

    async def start(self) -> str: ...

    async def run(self) -> None: ...

    async def try_transports(self) -> None: ...

    async def leave(self, seconds: float) -> None: ...


MakeTransfers: TypeAlias = Callable[
    [WorkerSpec, PoolMemory, ClientSession, Callable[[], None]], OwnTransfers
]


def scheduler(spec: WorkerSpec, runner: Runner, blocks: int, host_blocks: int = 0) -> AnyScheduler:
    """The one of the worker's role."""
    config, transfer = spec.config.scheduler, spec.config.transfer
    limits = Limits(
        block_size=config.block_size,
        max_batch_size=config.max_batch_size,
        max_prefill_tokens=config.max_prefill_tokens,
        reserved_tokens=config.num_reserved_decode_tokens,
        adaptive_reserve=config.adaptive_reserve,
        max_waiting=config.max_waiting,
        retraction=retraction_of(spec.config),
        host_blocks=host_blocks,
        chunked=transfer.chunked,
        prefix_cache=config.prefix_cache,
        early_first_token=transfer.early_first_token,
        local_prefill=config.local_prefill,
        rebind_grace_s=spec.config.timeouts.rebind_grace_s,
        vocab=runner.vocab,
    )
    match spec.role:
        case "prefill":
            return PrefillDisaggScheduler(limits, blocks)
        case "decode":
            return DecodeDisaggScheduler(limits, blocks, transfer.slots, runner.eos_token_ids)
        case "hybrid":
            return Scheduler(limits, blocks, runner.eos_token_ids)


def transfers(
    spec: WorkerSpec, memory: PoolMemory, session: ClientSession, wake: Callable[[], None]
) -> KVTransferManager:
    """The transfer side of a prefill or decode worker; `wake` is called when it has events."""

    async def route(source: messages.Source) -> messages.Route:
        return await bootstrap(spec, session, source.host, source.port).route()

    return KVTransferManager(
        role="prefill" if spec.role == "prefill" else "decode",
        rank=spec.rank,
        layout=memory.layout,
        memory=memory,
        transport=open_transport(
            spec.config.transfer,
            memory,
            spec.disagg.local_ip,
            spec.key,
            _store(spec),
            spec.config.timeouts.attach_s,
        ),
        key=spec.key,
        local_ip=spec.disagg.local_ip,
        timeouts=spec.config.timeouts,
        limits=TransferLimits(rooms_per_peer=spec.config.security.max_rooms_per_peer),
        routes=route,
        wake=wake,
        clock=time.monotonic,
        wall=time.time,
        tp=spec.config.parallel.tp,
        checksums=spec.config.transfer.checksums,
    )


def _store(spec: WorkerSpec) -> Store:
    """Where memfabric's processes find each other; one rank of all makes it."""
    rank, parallel = spec.rank, spec.config.parallel
    return Store(
        url=spec.disagg.store_url,
        is_creator=spec.disagg.is_store_creator_node and rank == messages.Rank(),
        role=spec.role,
        device=(rank.dp * parallel.cp + rank.cp) * parallel.tp + rank.tp,
    )


def bootstrap(spec: WorkerSpec, session: ClientSession, host: str, port: int) -> BootstrapClient:
    return BootstrapClient(session, host, port, spec.key, spec.config.timeouts.connect_s)


def registration(
    spec: WorkerSpec, memory: PoolMemory, endpoint: str, max_model_len: int
) -> messages.RegisterRank:
    """What a prefill rank says of itself to its bootstrap server."""
    parallel, layout = spec.config.parallel, memory.layout
    return messages.RegisterRank(
        attn_tp_size=parallel.tp,
        attn_cp_size=parallel.cp,
        dp_size=parallel.dp,
        rank=spec.rank,
        rank_ip=spec.disagg.local_ip,
        rank_port=int(endpoint.rpartition(":")[2]),
        instance_epoch=spec.epoch,
        fingerprint=layout,
        max_prompt_tokens=min(max_model_len, memory.blocks * layout.block_size),
        process=this_process(),
    )
