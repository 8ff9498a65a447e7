"""Where an attempt's bytes land in a decode rank's memory: its blocks, and a slot each writer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pdrt.data.commands import AdmitReceiver
from pdrt.data.events import SlotRecord
from pdrt.data.layout import areas_of
from pdrt.data.memory import SLOT_BYTES, SUM_BYTES
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.transfer import Key, Leg, Receiver
from pdrt.data.transport.promise import Areas
from pdrt.messages import Attach, Handshake, pack_ids


@dataclass(slots=True)
class Landing:
    """Each slot that is waited for belongs to one attempt and one prefill rank."""

    slots: MetadataBufferPool
    attach: Attach
    _owners: dict[int, tuple[Key, str]] = field(default_factory=dict)

    def handshake(self, receiver: Receiver, admitted: AdmitReceiver, expires: float) -> Handshake:
        """What all its ranks are told alike; each rank's own part is added when it is said."""
        return Handshake(
            room=receiver.room,
            attempt=receiver.attempt,
            session=self.attach.session,
            blocks=pack_ids(admitted.blocks),
            first_block=admitted.first_block,
            slot=self.slots.slot_of(receiver.row, 0),
            prompt_tokens=admitted.prompt_tokens,
            prompt_hash=admitted.prompt_hash,
            decode_ranks=receiver.decode_ranks,
            expires=expires,
            token=b"",
        )

    def expect(self, receiver: Receiver, kv_len: int) -> None:
        """Wipe its slots and wait for them. To be called before their writers are told."""
        for slot, leg in self._slots_of(receiver):
            assert slot not in self._owners, f"slot {slot} has two writers"
            self.slots.watch(slot, receiver.room, receiver.attempt, kv_len)
            self._owners[slot] = receiver.key, leg.rank

    def let_go(self, receiver: Receiver) -> None:
        for slot, _ in self._slots_of(receiver):
            self.slots.unwatch(slot)
            del self._owners[slot]

    def look(self, receiver: Receiver, leg: Leg) -> SlotRecord | None:
        """What this rank says, if it is there and was not seen before."""
        return self.slots.look(self.slots.slot_of(receiver.row, leg.place))

    def scan(self) -> Iterator[tuple[Key, str, SlotRecord]]:
        """Whose slots became valid; an attempt that ends meanwhile is not told of again."""
        for slot, record in self.slots.scan():
            if owner := self._owners.get(slot):
                yield *owner, record

    def areas(self, receiver: Receiver, admitted: AdmitReceiver) -> Areas:
        """All that its writers may fill: slots, blocks, and the checksums of these."""
        layout, region = self.attach.layout, self.attach.region
        slots = [slot for slot, _ in self._slots_of(receiver)]
        areas = [areas_of(slots, region.slots_at, SLOT_BYTES)]
        if self.attach.checksums:
            areas.append(areas_of(admitted.blocks, region.sums_at, layout.kv_heads * SUM_BYTES))
        areas.append(areas_of(admitted.blocks, region.pool_at, layout.block_bytes))
        return np.concatenate(areas)

    def _slots_of(self, receiver: Receiver) -> list[tuple[int, Leg]]:
        legs = [leg for leg in receiver.legs.values() if leg.writes]
        return [(self.slots.slot_of(receiver.row, leg.place), leg) for leg in legs]
