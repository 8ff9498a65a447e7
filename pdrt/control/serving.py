"""A leader's work on one request: hand it to a worker, say what comes back, however it ends.

The promises: when the client or the router goes away, or a stop string is complete, the worker
is told at once; every wait ends at the request's deadline; an error has its own status, or, in
a stream that has begun, its own event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import structlog
from aiohttp import web

from pdrt.control.answer import Answer, Times
from pdrt.control.batch import Batch
from pdrt.control.call import Call, open_call, parts_of, rebind_of, submit_again, submit_of
from pdrt.control.claims import claimed
from pdrt.control.dispatch import Stream
from pdrt.control.generate import GenerateVoice
from pdrt.control.http import CANARY_HEADER, REQUEST_ID, Json, error_of, read_json, request_id_of
from pdrt.control.job import cost_of
from pdrt.control.join import Joiner
from pdrt.control.leader import Leader
from pdrt.control.likely import PromptPart
from pdrt.control.marks import Marks
from pdrt.control.meter import Meter
from pdrt.control.openai import OpenAIVoice
from pdrt.control.order import PATHS, parse_prefill_again, parse_rebind
from pdrt.control.prompted import choices_of, prompt_of
from pdrt.control.reader import Reader
from pdrt.control.reply import Reply, StreamReply, Voice, WholeReply, long_json_of
from pdrt.control.resume import take_up
from pdrt.control.traces import TRACEPARENT, Served, Told
from pdrt.control.webclient import WebClient
from pdrt.errors import Conflict, DeadlinePassed, NotFound, PdrtError
from pdrt.messages import Output, Submit

PD_PATH: Final = web.RequestKey("pd_path", str)  # set on the requests whose answers carry x-pd-path
PromptOf: TypeAlias = Callable[[Output], Awaitable[PromptPart]]
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Outcome:
    """What the log and the metrics tell of a request."""

    code: str = "ok"
    room: int = -1
    answers: list[Answer] = field(default_factory=list)
    times: Times | None = None  # of a prompt that others answer, or of the only answer
    key: str = ""  # name of the client's API key

    @property
    def usage(self) -> Json:
        usages = [answer.usage() for answer in self.answers]
        return {
            name: sum(usage[name] for usage in usages) for usage in usages[:1] for name in usage
        }

    @property
    def timings(self) -> Json | list[Json]:
        """Of a batch each prompt's own."""
        if len(self.answers) > 1:
            return [answer.times.json() for answer in self.answers]
        return self.times.json() if self.times is not None else {}


class Serving:
    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._meter = Meter(leader.registry, leader.text)
        self._client_rooms: set[int] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """A client's request, or one leg of it."""
        leader, times = self._leader, Times(self._leader.clock())
        request[PD_PATH] = "local" if leader.role == "hybrid" else "disagg"  # if it is refused
        with self._told(request) as outcome:
            outcome.times = times
            body = await read_json(request, leader.limits.max_body_bytes)
            call = open_call(leader, request, PATHS[request.path], body, times)
            outcome.room, request[PD_PATH] = call.room, call.path
            if leader.role == "prefill":
                return await self._prefill_leg(call, outcome)
            # Of a leg it is None: the router has seen to it.
            with (
                self._held(request, call) as outcome.key,
                claimed(self._client_rooms, call.order.client_room),
            ):
                if call.order.prompts:
                    return await self._answer_batch(request, call, outcome)
                client = WebClient(request, leader.role)
                await self._answer(call, client, outcome)
                return client.begun

    async def prefill_again(self, request: web.Request) -> web.StreamResponse:
        """For a decode leader: compute a retracted room's prompt and output once more."""
        leader = self._leader
        if leader.role != "prefill":
            raise NotFound(f"this is a {leader.role} instance")
        with self._told(request) as outcome:
            body = parse_prefill_again(await read_json(request, leader.limits.max_body_bytes))
            request[REQUEST_ID], outcome.room = body.request_id, body.bootstrap_room
            submit = submit_again(leader, body)
            if leader.dispatcher.is_in_flight(submit.room):
                # Decode has what the older attempt sent, or it would not ask: that one ends well
                # as soon as the transport says so, and must not be superseded.
                raise Conflict(f"room {submit.room} is in flight already; ask again")
            outcome.times = Times(leader.clock())
            deadline = outcome.times.arrived + body.time_left_s
            return await self._prefill(submit, body.disagg_prefill_dp_rank, deadline, outcome)

    async def rebind(self, request: web.Request) -> web.StreamResponse:
        """For the router: a room's prompt is computed anew, perhaps elsewhere."""
        leader = self._leader
        body = parse_rebind(await read_json(request, leader.limits.max_body_bytes))
        leader.dispatcher.rebind(rebind_of(leader, body))
        return web.json_response({"status": "ok"})

    async def _prefill_leg(self, call: Call, outcome: Outcome) -> web.StreamResponse:
        async with _until(call.deadline - self._leader.clock()):
            submit = await submit_of(self._leader, call)
        rank = -1 if call.leg is None else call.leg.disagg_prefill_dp_rank
        return await self._prefill(submit, rank, call.deadline, outcome, call)

    async def _prefill(
        self,
        submit: Submit,
        dp_rank: int,
        deadline: float,
        outcome: Outcome,
        call: Call | None = None,
    ) -> web.StreamResponse:
        """Answer once decode's memory holds the prompt, with what only this side can tell of it."""
        leader = self._leader
        told: Json = {}
        async with _until(deadline - leader.clock()):
            with leader.dispatcher.submit(submit, None if dp_rank < 0 else dp_rank) as stream:
                output = await _prefilled(stream)
            if (times := outcome.times) is not None:
                times.spent_ms, times.last = output.spent_ms, leader.clock()
                self._meter.spent(times)
            if call is not None and call.order.is_prompt_told:
                part = await prompt_of(call, submit, output, leader.text)
                told = await leader.text.run(self._voice(call).prompt, part)
        leader.served()
        done: Json = {
            "status": "prefilled",
            "request_id": submit.request_id,
            "bootstrap_room": submit.room,
            "attempt": submit.attempt,
            "usage": {
                "prompt_tokens": submit.prompt_tokens,
                "cached_tokens": output.cached_tokens,
            },
            "timings_ms": times.json() if times is not None else {},
        }
        if told:
            done |= {"prompt": told, "model": leader.model}
        body = await asyncio.to_thread(long_json_of, done) if told else long_json_of(done)
        return web.Response(body=body, content_type="application/json")

    async def _answer_batch(
        self, request: web.Request, call: Call, outcome: Outcome
    ) -> web.StreamResponse:
        """Each prompt is a request of its own to the workers."""
        client = WebClient(request, self._leader.role)
        batch = Batch(Joiner(call.order), client)

        async def one(index: int, part: Call) -> bool:
            try:
                await self._answer(part, batch.part(index), outcome)
            except PdrtError as error:
                await batch.part(index).break_off(error)
            return batch.broken is None

        await batch.run([one(i, part) for i, part in enumerate(parts_of(self._leader, call))])
        if batch.broken is not None and not batch.has_begun:
            raise batch.broken
        await batch.end()
        return client.begun

    async def _answer(self, call: Call, reader: Reader, outcome: Outcome) -> None:
        voice = self._voice(call)
        reply = self._reply(reader, call, voice)
        leader, resumed = self._leader, None if call.leg is None else call.leg.resumed
        try:
            async with _until(call.deadline - leader.clock()):
                submit = await submit_of(leader, call)
                choices = await choices_of(call, submit, leader.text)
                best = call.order.best_of and call.order.n
                answer = Answer(submit.prompt_tokens, choices, call.times, best=best)
                if resumed is not None:
                    await take_up(answer, resumed, voice)
                prompt = partial(prompt_of, call, submit, text=leader.text)
                is_told = call.order.is_prompt_told and resumed is None
                with leader.dispatcher.submit(submit) as stream:
                    await self._pump(stream, answer, reply, prompt if is_told else None)
                outcome.answers.append(answer)
                await reply.end(answer)
        except PdrtError as error:
            outcome.code = error.code
            await reply.fail(error)
        else:
            leader.served()

    async def _pump(
        self, stream: Stream, answer: Answer, reply: Reply, prompt: PromptOf | None
    ) -> None:
        """From the worker to the client, until the answer has ended."""
        async for output in stream:
            is_first = not answer.has_begun
            if is_first and prompt is not None and not output.problem:
                answer.prompt = answer.prompt or await prompt(output)
            delta = answer.take(output, self._leader.clock())
            if delta.finish:
                stream.stop(delta.index)  # before a slow client is waited for
            elif output.problem and is_first:
                raise error_of(output.problem)  # nothing was said: it can have its own status
            if delta.ids or delta.finish:
                await reply.say(delta, answer)
            if answer.is_over:
                return
            if output.problem:
                raise error_of(output.problem)
        raise PdrtError("the worker's outputs ended without an end")

    def _reply(self, reader: Reader, call: Call, voice: Voice) -> Reply:
        if not call.order.stream:
            return WholeReply(reader, voice)
        leg = call.leg
        marks = Marks() if leg is not None and leg.marks else None
        is_resumed = leg is not None and leg.resumed is not None
        return StreamReply(reader, voice, marks, resumed=is_resumed)

    def _voice(self, call: Call) -> GenerateVoice | OpenAIVoice:
        leader, order = self._leader, call.order
        bytes_of, with_odds = leader.text.bytes_of, order.odds is not None
        if order.dialect == "generate":
            shown = call.request_id, call.shown_room, call.path
            return GenerateVoice(*shown, bytes_of, with_odds)
        created = None if call.leg is None else call.leg.created
        return OpenAIVoice(
            call.request_id,
            leader.model,
            int(leader.wall()) if created is None else created,
            is_chat=order.dialect == "chat",
            bytes_of=bytes_of,
            with_odds=with_odds,
            with_usage=order.include_usage,
            with_usage_always=order.usage_always,
        )

    def _held(self, request: web.Request, call: Call) -> AbstractContextManager[str]:
        """A client's request counts for its API key; a leg has been counted by the router."""
        leader, header = self._leader, request.headers.get("authorization", "")
        if leader.keydoor is None or call.leg is not None or leader.is_member(header):
            return nullcontext("")
        return leader.keydoor.held(header, cost_of(call.order))

    @contextmanager
    def _told(self, request: web.Request) -> Iterator[Outcome]:
        """Count and log how a request ended, also when its client left."""
        outcome = Outcome()
        try:
            yield outcome
        except PdrtError as error:
            outcome.code = error.code
            raise
        except asyncio.CancelledError:
            outcome.code = "client_gone"
            raise
        except Exception:
            outcome.code = "internal"
            raise
        finally:
            self._tell(request, outcome)

    def _tell(self, request: web.Request, outcome: Outcome) -> None:
        self._meter.ended(request.path, outcome.code)
        for answer in outcome.answers if outcome.code == "ok" else ():
            self._meter.answered(answer)
        self._trace(request, outcome)
        log.info(
            "request_ended",
            request_id=request_id_of(request),
            room=outcome.room,
            path=request.path,
            code=outcome.code,
            **({"key": outcome.key} if outcome.key else {}),
            **outcome.usage,
            **({"timings_ms": told} if (told := outcome.timings) else {}),
        )

    def _trace(self, request: web.Request, outcome: Outcome) -> None:
        leader, times = self._leader, outcome.times
        if leader.tracing is None or times is None or CANARY_HEADER in request.headers:
            return
        told: dict[str, Told] = {
            "request_id": request_id_of(request),
            "room": outcome.room,
            "path": request.path,
            **outcome.usage,
            **{f"{phase}_ms": ms for phase, ms in times.phases.items()},
        }
        served = Served(
            leader.role, times.arrived, leader.clock(), times.events(), told, outcome.code
        )
        leader.tracing.served(request.headers.get(TRACEPARENT, ""), served)


async def _prefilled(stream: Stream) -> Output:
    """The worker's last word, once it is done. Raises what it failed with."""
    async for output in stream:
        if output.problem:
            raise error_of(output.problem)
        if output.finish:
            return output
    raise PdrtError("the worker's outputs ended without an end")


@asynccontextmanager
async def _until(left: float) -> AsyncIterator[None]:
    """Raises DeadlinePassed when `left` seconds are over."""
    if left <= 0:
        raise DeadlinePassed("the request's deadline has passed")
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError:
        raise DeadlinePassed("the request's deadline has passed") from None
