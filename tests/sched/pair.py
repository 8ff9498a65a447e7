"""A prefill and a decode scheduler with a wire between them that really copies blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellFirsts,
    TellStarted,
)
from pdrt.data.events import (
    FirstTokens,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
)
from pdrt.data.transfer import Key
from pdrt.device.chance import of_sequence
from pdrt.errors import PdrtError
from pdrt.messages import AskPrefill, Problem, Said, Submit, pack_ids, unpack_ids
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.effects import Effect, Say
from pdrt.sched.events import Cancelled, ResumeLocally
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from tests.sched.fakes import EOS, FakeDevice, Rig, check_books, is_baseline, submit

LOST = Problem(code="peer_lost", message="prefill is gone")
GONE = Problem(code="cancelled", message="the other side left")


class Pair:
    """`refuses` says of a re-prefill whether the prefill side turns it down, `breaks` of an attempt
    whether it is lost once its first token is out; written blocks are on their way `lag` rounds.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        prefill_blocks: int,
        decode_blocks: int,
        slots: int = 64,
        refuses: Callable[[AskPrefill], bool] = lambda _ask: False,
        device: Callable[[int, int], FakeDevice] = FakeDevice,
        lag: int = 0,
        breaks: Callable[[Key], bool] = lambda _key: False,
    ) -> None:
        size = limits.block_size
        self.prefill = Rig(
            PrefillDisaggScheduler(limits, prefill_blocks), device(prefill_blocks, size)
        )
        self.decode = Rig(
            DecodeDisaggScheduler(limits, decode_blocks, slots, {EOS}),
            device(decode_blocks, size),
        )
        self._refuses, self._lag, self._breaks = refuses, lag, breaks
        self._flying: list[tuple[int, SendBlocks]] = []  # and in which round they land
        self._submits: dict[int, Submit] = {}
        self._expected: set[Key] = set()
        self._admitted: dict[Key, AdmitReceiver] = {}
        self.rounds = self.blocks_moved = 0

    def submit(
        self,
        room: int,
        prompt: list[int],
        max_tokens: int,
        salt: str = "",
        *,
        n: int = 1,
        seed: int = 0,
    ) -> None:
        message = submit(
            room, prompt, max_tokens=max_tokens, time_left=1000.0, salt=salt, n=n, seed=seed
        )
        self._submits[room] = message
        self.decode.submit(message)
        self.prefill.submit(message)

    def resume(
        self,
        room: int,
        prompt: list[int],
        max_tokens: int,
        said: Mapping[int, Sequence[int]],
        *,
        n: int = 1,
        seed: int = 0,
    ) -> None:
        """Decode goes on with what another one began; prefill hears of it when it is asked."""
        begun = tuple(Said(index=i, tokens=pack_ids(list(ids))) for i, ids in said.items())
        whole = submit(room, prompt, max_tokens=max_tokens, time_left=1000.0, n=n, seed=seed)
        self._submits[room] = message = replace(whole, said=begun)
        self.decode.submit(message)

    def cancel(self, room: int) -> None:
        """The client left: the router closes both legs."""
        self.prefill.feed(Cancelled(room, "client_gone"))
        self.decode.feed(Cancelled(room, "client_gone"))

    def round(self) -> None:
        """Both sides step once, and the wire carries what they want."""
        self.rounds += 1
        self._land()
        self.prefill.step()
        self._carry()
        self.decode.step()
        self._carry()
        check_books(self.prefill.book)
        check_books(self.decode.book)

    def finish(self, rounds: int) -> None:
        for _ in range(rounds):
            if is_baseline(self.decode.book) and is_baseline(self.prefill.book):
                return
            self.round()
        left = (self.prefill.book.rooms, self.decode.book.rooms)
        raise AssertionError(f"not finished after {rounds} rounds: {left}")

    def _carry(self) -> None:
        while self.prefill.effects or self.decode.effects:
            for rig in (self.prefill, self.decode):
                effects, rig.effects = rig.effects, []
                for effect in effects:
                    self._carry_one(effect)

    def _carry_one(self, effect: Effect) -> None:
        match effect:
            case OpenReceiver(room, attempt):
                self.decode.feed(ReceiverReady(room, attempt))
            case AdmitReceiver(room, attempt):
                self._admitted[room, attempt] = effect
                self._meet((room, attempt))
            case AbortReceiver(room, attempt, _, is_served):
                self._abort((room, attempt), is_served)
            case AskPrefill():
                self._ask(effect)
            case Say():
                raise AssertionError("rigs keep what is said to themselves")
            case _:
                self._carry_to_decode(effect)

    def _carry_to_decode(self, effect: Effect) -> None:
        match effect:
            case ExpectHandshakes(room, attempt):
                self._expected.add((room, attempt))
                self._meet((room, attempt))
            case TellStarted(room, attempt):
                self.decode.feed(PromptStarted(room, attempt))
            case TellFirsts():
                self._tell_firsts(effect)
            case SendBlocks():
                self._flying.append((self.rounds + self._lag, effect))
                self._land()
            case AbortSend(room, attempt):
                self._stop((room, attempt), GONE)
            case _:
                raise AssertionError(effect)

    def _tell_firsts(self, told: TellFirsts) -> None:
        key = told.room, told.attempt
        if key not in self._admitted:
            return
        self.decode.feed(
            FirstTokens(*key, told.tokens, told.logprobs, told.tops, told.cached_tokens)
        )
        if self._breaks(key):
            self.prefill.feed(SendFailed(*key, LOST))
            self._stop(key, LOST)

    def _land(self) -> None:
        due = [effect for at, effect in self._flying if at <= self.rounds]
        self._flying = [(at, effect) for at, effect in self._flying if at > self.rounds]
        for effect in due:
            self._copy(effect)

    def _meet(self, key: Key) -> None:
        if key in self._expected and key in self._admitted:
            self.prefill.feed(SenderReady(*key, self._admitted[key].first_block))

    def _copy(self, effect: SendBlocks) -> None:
        key = (effect.room, effect.attempt)
        target = self._admitted.get(key)
        if target is None:
            return  # decode left; the source is let go all the same
        for i, block in enumerate(effect.blocks, effect.first_block):
            if i < target.first_block:
                continue  # another rank wants it
            place = target.blocks[i - target.first_block]
            self.decode.device.copy_from(self.prefill.device, block, place)
            self.blocks_moved += 1
        if effect.last is not None:
            del self._admitted[key]
            self._expected.discard(key)
            self.decode.feed(Received(*key, effect.last))
            self.prefill.feed(SendEnded(*key, None))

    def _ask(self, ask: AskPrefill) -> None:
        first = self._submits[ask.room if ask.of_room < 0 else ask.of_room]
        tokens = unpack_ids(ask.tokens)
        prompt, said = tokens[: first.prompt_tokens], tokens[first.prompt_tokens :]
        again = submit(
            ask.room, prompt, said=said, attempt=ask.attempt, time_left=1000.0, salt=first.salt
        )
        again = replace(again, sampling=of_sequence(first.sampling, ask.index))
        if self._refuses(ask) or not self._takes(again):
            self.decode.feed(ResumeLocally(ask.room))

    def _takes(self, again: Submit) -> bool:
        try:
            self.prefill.submit(again)
        except PdrtError:
            return False
        return True

    def _abort(self, key: Key, is_served: bool) -> None:
        if key in self._expected:
            self._expected.discard(key)
            if not is_served:
                self.prefill.feed(SendFailed(*key, GONE))
            self.prefill.feed(SendEnded(*key, None if is_served else GONE))
        if self._admitted.pop(key, None) is not None:
            self.decode.feed(Quiet(*key))

    def _stop(self, key: Key, problem: Problem) -> None:
        if key not in self._expected:
            return
        self._expected.discard(key)
        self.prefill.feed(SendEnded(*key, problem))
        self.decode.feed(ReceiveFailed(*key, problem))
        if self._admitted.pop(key, None) is not None:
            self.decode.feed(Quiet(*key))
