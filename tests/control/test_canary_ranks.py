"""Canaries go round the dp ranks of a prefill instance."""

from __future__ import annotations

import asyncio
import itertools

from tests.control.router_rig import rig, until


async def test_canaries_go_to_each_dp_rank_in_turn() -> None:
    """CASES 99: they hit dp rank 0 only."""
    async with rig(wait=False) as r:
        r.prefill[0].status |= {"dp_size": 3, "ready_ranks": [0, 1, 2]}
        await r.ready()
        for number in range(2, 6):
            r.decode[0].status["last_fault_at"] = float(number)
            await r.look()
            await until(lambda count=number: len(r.prefill[0].seen_canaries) >= count)  # type: ignore[misc]
            await r.ready()
        await asyncio.sleep(0)
        bodies = [seen.body for seen in r.prefill[0].seen_canaries]
        ranks = [body["disagg_prefill_dp_rank"] for body in bodies]
        assert set(ranks) == {0, 1, 2}
        assert all(one != other for one, other in itertools.pairwise(ranks))
