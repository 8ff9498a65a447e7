"""The decode ranks that an attempt is sent to: what each lets us write, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdrt.data.layout import blocks_for
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.sessions import Sending, Session, Sessions
from pdrt.data.transfer import Sender, State, Target
from pdrt.errors import BadMessage, PromptMismatch
from pdrt.messages import Handshake, unpack_ids


def target_of(
    sender: Sender, session: Session, shake: Handshake, siblings: Sequence[Session], me: Sending
) -> Target:
    """Where the handshake lets us write. Raises PromptMismatch or BadMessage."""
    _check_rank(sender, session, shake, siblings, me)
    tokens, region = sender.prompt_tokens, session.attach.region
    if shake.prompt_tokens != tokens:
        raise PromptMismatch(f"the prompt has {tokens} tokens here, {shake.prompt_tokens} there")
    if shake.prompt_hash != sender.prompt_hash:
        raise PromptMismatch(f"the two legs have different prompts of {tokens} tokens")
    wanted = blocks_for(tokens, me.layout.block_size) - shake.first_block
    blocks = unpack_ids(shake.blocks)
    if wanted < 0 or (shake.writes and not len(set(blocks)) == len(blocks) == wanted):
        raise BadMessage(f"{len(set(blocks))} blocks are offered, {wanted} are needed")
    if any(not 0 <= block < region.blocks for block in blocks) or shake.slot >= region.slots:
        raise BadMessage("a block or the slot lies outside the described region")
    return Target(
        session=session.name,
        writes=shake.writes,
        first_block=shake.first_block,
        blocks=np.asarray(blocks, dtype=np.int64),
        part=session.part,
        slot_at=region.slots_at + shake.slot * SLOT_BYTES,
    )


def _check_rank(
    sender: Sender, session: Session, shake: Handshake, siblings: Sequence[Session], me: Sending
) -> None:
    """Whether it is one of the ranks of one instance that we wait for. Raises BadMessage."""
    if sender.state is not State.BOOTSTRAPPING:
        raise BadMessage(f"more than {len(sender.targets)} decode ranks shook hands")
    mine = session.attach
    if shake.decode_ranks != session.decode_ranks:
        raise BadMessage(
            f"{shake.decode_ranks} decode ranks are announced, of tp = {mine.tp} there and"
            f" {me.tp} here {session.decode_ranks} shake hands"
        )
    others = [sibling.attach for sibling in siblings]
    if any((other.tp, other.rank.dp) != (mine.tp, mine.rank.dp) for other in others):
        raise BadMessage(f"decode rank {mine.rank} is of another instance than its siblings")
    if any(other.rank == mine.rank for other in others):
        raise BadMessage(f"decode rank {mine.rank} shook hands twice")


def told(sender: Sender, sessions: Sessions, me: Sending) -> str:
    """Each decode rank, its address, transport and bytes, and how far the whole is."""
    targets = ", ".join(_told_of(t, sessions, me) for t in sender.targets.values())
    return (
        f"{targets or 'nobody yet'}; {sender.done_bytes} of {sender.given_bytes} bytes written,"
        f" last {sender.state}"
    )


def _told_of(target: Target, sessions: Sessions, me: Sending) -> str:
    session = sessions.get(target.session)
    where = f" rank {session.attach.rank} at {session.endpoint}" if session else ", now gone,"
    transport = (session.transport if session else "") or me.transport
    share = "" if target.writes else ", another rank writes to it"
    return f"{target.session}{where} over {transport} ({target.done_bytes} bytes{share})"
