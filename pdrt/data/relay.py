"""Transfer commands and events as bytes, between tp 0 and the followers of its group.

What is read is validated: bytes become one of the dataclasses or a BadMessage. Lists of blocks
travel as int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args

import msgpack
from pydantic import TypeAdapter, ValidationError

from pdrt.data.commands import TransferCommand
from pdrt.data.events import TransferEvent
from pdrt.errors import BadMessage
from pdrt.messages import pack_ids, unpack_ids

T = TypeVar("T")
Adapters = Mapping[str, TypeAdapter[T]]

_COMMANDS: Final[Adapters[TransferCommand]] = {
    kind.__name__: TypeAdapter(kind) for kind in get_args(TransferCommand)
}
_EVENTS: Final[Adapters[TransferEvent]] = {
    kind.__name__: TypeAdapter(kind) for kind in get_args(TransferEvent)
}
_LIMITS: Final = {
    "max_bin_len": 1 << 23,
    "max_str_len": 1 << 16,
    "max_array_len": 1 << 10,
    "max_map_len": 64,
    "max_ext_len": 0,
}


def pack_command(command: TransferCommand) -> bytes:
    return _pack(_COMMANDS, command)


def unpack_command(data: bytes) -> TransferCommand:
    """Raises BadMessage."""
    return _unpack(_COMMANDS, data)


def pack_event(event: TransferEvent) -> bytes:
    return _pack(_EVENTS, event)


def unpack_event(data: bytes) -> TransferEvent:
    """Raises BadMessage."""
    return _unpack(_EVENTS, data)


def _pack(adapters: Adapters[T], value: T) -> bytes:
    name = type(value).__name__
    fields: dict[str, Any] = adapters[name].dump_python(value)
    if "blocks" in fields:
        fields["blocks"] = pack_ids(fields["blocks"])
    data: bytes = msgpack.packb([name, fields])
    return data


def _unpack(adapters: Adapters[T], data: bytes) -> T:
    try:
        name, fields = msgpack.unpackb(data, **_LIMITS)
        if "blocks" in fields:
            fields["blocks"] = unpack_ids(fields["blocks"])
        return adapters[name].validate_python(fields)
    except ValidationError as error:
        raise BadMessage(f"relayed: {error.error_count()} wrong fields") from error
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise BadMessage(f"relayed: {type(error).__name__}") from error
