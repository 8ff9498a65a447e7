"""A call: one checked request to this leader, and the Submit that its worker gets.

The promise: what cannot be served is refused here, before any worker hears of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiohttp import web

from pdrt.control.answer import Times
from pdrt.control.http import CANARY_HEADER, REQUEST_ID, Json, check_bearer, request_id_of
from pdrt.control.leader import Leader
from pdrt.control.likely import MAX_PROMPT_ODDS
from pdrt.control.order import Dialect, Order, parse, split_leg
from pdrt.control.resume import said_of
from pdrt.control.schema import LegFields, PrefillAgain, RebindRequest
from pdrt.errors import BadRequest, NotFound, Unauthorized
from pdrt.messages import Rebind, Source, Submit, pack_ids


@dataclass(frozen=True, slots=True)
class Call:
    """(room, attempt) is its wire identity; `deadline` is on the leader's clock."""

    order: Order
    leg: LegFields | None
    request_id: str
    room: int
    attempt: int
    deadline: float
    times: Times
    is_trial: bool = False  # the router tries a pair by it
    path: str = "disagg"  # what the answer says of it

    @property
    def client_room(self) -> int | None:
        """The client's idempotency key."""
        return self.order.client_room if self.leg is None else self.leg.client_room

    @property
    def shown_room(self) -> int:
        """What the client reads: its own key when it gave one."""
        return self.room if self.client_room is None else self.client_room


def open_call(
    leader: Leader, request: web.Request, dialect: Dialect, body: Json, times: Times
) -> Call:
    """Check a client's body, or a leg's. Raises BadRequest, Unauthorized or NotFound."""
    fields, leg = split_leg(body)
    order = parse(dialect, fields, leg)
    if leg is None:
        _check_client(leader, order)
    else:
        check_bearer(request, leader.key)
        if order.prompts:
            raise BadRequest("prompt: a leg has one")
        check_token(leader, leg.transfer_token, leg.bootstrap_room, leg.attempt)
    if order.model not in (None, "", leader.model):
        raise NotFound(f"model {order.model!r} is not served here; {leader.model!r} is")
    given = order.request_id if leg is None else leg.request_id
    if given is not None:
        request[REQUEST_ID] = given
    left = (order.timeout_s or leader.limits.request_s) if leg is None else leg.time_left_s
    return Call(
        order=order,
        leg=leg,
        request_id=request_id_of(request),
        room=leader.mint() if leg is None else leg.bootstrap_room,
        attempt=0 if leg is None else leg.attempt,
        deadline=times.arrived + left,
        times=times,
        path=_path(leader, leg),
        is_trial=leg is not None and CANARY_HEADER in request.headers,
    )


def parts_of(leader: Leader, call: Call) -> list[Call]:
    """A batch's prompts, each with a room of its own."""
    return [
        replace(call, order=part, room=leader.mint(), times=replace(call.times))
        for part in call.order.parts()
    ]


def check_token(leader: Leader, token: str, room: int, attempt: int) -> None:
    """Raises Unauthorized unless the token is the router's leave to work on (room, attempt)."""
    key = leader.key
    if key is not None and not key.is_room_token(token, room, attempt, leader.wall()):
        raise Unauthorized(f"transfer_token: not valid for room {room}, attempt {attempt}")


async def submit_of(leader: Leader, call: Call) -> Submit:
    """Tokenise and check the limits. Raises BadRequest, TooLong or Overloaded."""
    source = _source(leader, call.leg)
    ids = await leader.text.ids(call.order.prompt)
    call.times.tokenised = leader.clock()
    leader.limits.check_prompt(ids)
    check_scoring(call.order.scoring, len(ids))
    limit = leader.limits.total(leader.role, len(ids))
    sampling = call.order.settle(len(ids), limit, leader.mint())
    leader.limits.check_bias(sampling)
    if sampling.grammar is not None:
        await leader.grammars.check(sampling.grammar)
    resumed = None if call.leg is None else call.leg.resumed
    return Submit(
        room=call.room,
        attempt=call.attempt,
        request_id=call.request_id,
        tokens=pack_ids(ids),
        prompt_tokens=len(ids),
        sampling=sampling,
        time_left=max(call.deadline - leader.clock(), 0.0),
        source=source,
        scoring=-1 if resumed else call.order.scoring,
        priority=call.order.priority,
        salt=call.order.salt,
        is_trial=call.is_trial,
        said=said_of(resumed, call.order, sampling.n) if resumed else (),
    )


def check_scoring(top: int, prompt_tokens: int) -> None:
    """Raises BadRequest when the prompt's odds are more than a message and a client can take."""
    if (1 + top) * prompt_tokens > MAX_PROMPT_ODDS:
        raise BadRequest(
            f"logprobs of the prompt: {prompt_tokens} tokens with {top} alternatives each;"
            f" tokens and alternatives together may be {MAX_PROMPT_ODDS}"
        )


def submit_again(leader: Leader, body: PrefillAgain) -> Submit:
    """The same for a retracted room, whose tokens are known. Raises PdrtError as above."""
    check_token(leader, body.transfer_token, body.bootstrap_room, body.attempt)
    leader.limits.check_prompt(body.input_ids)
    leader.limits.check_bias(body.sampling)
    leader.limits.total(leader.role, len(body.input_ids))
    if body.prompt_tokens > len(body.input_ids):
        raise BadRequest(f"prompt_tokens: there are {len(body.input_ids)} input_ids")
    return Submit(
        room=body.bootstrap_room,
        attempt=body.attempt,
        request_id=body.request_id,
        tokens=pack_ids(body.input_ids),
        prompt_tokens=body.prompt_tokens,
        sampling=body.sampling,
        time_left=body.time_left_s,
        priority=body.priority,
        salt=body.cache_salt,
    )


def rebind_of(leader: Leader, body: RebindRequest) -> Rebind:
    """Raises Unauthorized."""
    check_token(leader, body.transfer_token, body.bootstrap_room, body.attempt)
    source = Source(
        host=body.bootstrap_host, port=body.bootstrap_port, dp_rank=body.disagg_prefill_dp_rank
    )
    return Rebind(room=body.bootstrap_room, attempt=body.attempt, source=source)


def _check_client(leader: Leader, order: Order) -> None:
    if leader.role != "hybrid":
        raise BadRequest(f"this is a {leader.role} instance; send requests to the router")
    if order.pin is not None:
        host, port = order.pin
        raise BadRequest(f"bootstrap_host: no prefill instance {host}:{port} is known here")


def _path(leader: Leader, leg: LegFields | None) -> str:
    if leg is not None and leg.path is not None:
        return leg.path
    is_alone = leader.role == "decode" and leg is not None and leg.bootstrap_host is None
    return "local" if is_alone or leader.role == "hybrid" else "disagg"


def _source(leader: Leader, leg: LegFields | None) -> Source | None:
    if leader.role != "decode" or leg is None:
        return None
    if leg.bootstrap_host is None or leg.bootstrap_port is None:
        if leader.takes_prompts:
            return None
        raise BadRequest(
            "bootstrap_host and bootstrap_port are missing; [scheduler] local_prefill is off here"
        )
    return Source(
        host=leg.bootstrap_host, port=leg.bootstrap_port, dp_rank=leg.disagg_prefill_dp_rank
    )
