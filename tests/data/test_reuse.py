"""A thousand requests through the same few blocks leave the desks as they were."""

from __future__ import annotations

from collections.abc import Sized

import pytest

from pdrt.data.limits import Limits
from tests.data.rig import Rig

LIMIT = 64


def held(rig: Rig) -> dict[str, int]:
    """The size of whatever the two desks remember."""
    return {
        f"{side} {name}": len(value)
        for side, desk in (("prefill", rig.p), ("decode", rig.d))
        for name, value in vars(desk).items()
        if isinstance(value, Sized)
    }


@pytest.mark.parametrize("first_block", [0, 1, 3])
def test_a_thousand_warm_requests_leave_nothing_behind(first_block: int) -> None:
    """CASES 45, 46: decode holds the first blocks already, some or all; its pool stays flat."""
    rig = Rig(blocks=6, limits=Limits(outcomes=LIMIT))
    before: dict[str, int] = {}
    for room in range(1, 1001):
        key = (room, 0)
        rig.open(key)
        rig.expect(key, tokens=12)
        rig.flow()
        rig.admit(key, tokens=12, first_block=first_block)
        rig.flow()
        rig.send_all(key, tokens=12)
        rig.land_all()
        rig.flow()
        rig.scan()
        rig.finish(key)
        rig.check_baseline()
        if room == LIMIT + 1:
            before = held(rig)
    assert held(rig) == before
    assert {"decode rooms", "prefill rooms", "decode outbox"} <= before.keys()
