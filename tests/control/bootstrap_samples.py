"""Registrations for the tests of the bootstrap server and its client."""

from __future__ import annotations

from dataclasses import replace

from pdrt.messages import KvLayout, Process, Rank, RegisterRank

LAYOUT = KvLayout(block_size=16, dtype="float32", layers=2, kv_heads=2, head_dim=8)
OTHER_LAYOUT = replace(LAYOUT, block_size=32)


def registration(dp: int = 0, tp: int = 0, epoch: int = 1, **changes: object) -> RegisterRank:
    """One rank of an instance of (tp 1, cp 1, dp 1), unless told otherwise."""
    said = RegisterRank(
        attn_tp_size=1,
        attn_cp_size=1,
        dp_size=1,
        rank=Rank(dp=dp, tp=tp),
        rank_ip="127.0.0.1",
        rank_port=5000 + dp,
        instance_epoch=epoch,
        fingerprint=LAYOUT,
        max_prompt_tokens=1000,
        process=Process(host="here", pid=100 + epoch, started=epoch),
    )
    return replace(said, **changes)  # type: ignore[arg-type]
