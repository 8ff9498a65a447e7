"""A prefill and a decode scheduler with a wire between them that really copies blocks."""

from __future__ import annotations

from collections.abc import Callable

from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellStarted,
)
from pdrt.data.events import (
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
)
from pdrt.errors import PdrtError
from pdrt.messages import AskPrefill, Problem, Submit, unpack_ids
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.effects import Effect, Say
from pdrt.sched.events import Cancelled, ResumeLocally
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from tests.sched.fakes import EOS, FakeDevice, Rig, check_books, is_baseline, submit

GONE = Problem(code="cancelled", message="the other side left")


class Pair:
    """`refuses` says of a re-prefill whether the prefill side turns it down."""

    def __init__(
        self,
        limits: Limits,
        *,
        prefill_blocks: int,
        decode_blocks: int,
        slots: int = 64,
        refuses: Callable[[AskPrefill], bool] = lambda _ask: False,
    ) -> None:
        size = limits.block_size
        self.prefill = Rig(
            PrefillDisaggScheduler(limits, prefill_blocks), FakeDevice(prefill_blocks, size)
        )
        self.decode = Rig(
            DecodeDisaggScheduler(limits, decode_blocks, slots, {EOS}),
            FakeDevice(decode_blocks, size),
        )
        self._refuses = refuses
        self._submits: dict[int, Submit] = {}
        self._expected: set[tuple[int, int]] = set()
        self._admitted: dict[tuple[int, int], AdmitReceiver] = {}
        self.rounds = 0

    def submit(self, room: int, prompt: list[int], max_tokens: int) -> None:
        message = submit(room, prompt, max_tokens=max_tokens, time_left=1000.0)
        self._submits[room] = message
        self.decode.submit(message)
        self.prefill.submit(message)

    def cancel(self, room: int) -> None:
        """The client left: the router closes both legs."""
        self.prefill.feed(Cancelled(room, "client_gone"))
        self.decode.feed(Cancelled(room, "client_gone"))

    def round(self) -> None:
        """Both sides step once, and the wire carries what they want."""
        self.rounds += 1
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
            case ExpectHandshakes(room, attempt):
                self._expected.add((room, attempt))
                self._meet((room, attempt))
            case AdmitReceiver(room, attempt):
                self._admitted[room, attempt] = effect
                self._meet((room, attempt))
            case TellStarted(room, attempt):
                self.decode.feed(PromptStarted(room, attempt))
            case SendBlocks():
                self._copy(effect)
            case AskPrefill():
                self._ask(effect)
            case AbortReceiver(room, attempt):
                self._abort((room, attempt))
            case AbortSend(room, attempt):
                self._stop((room, attempt))
            case Say():
                raise AssertionError("rigs keep what is said to themselves")

    def _meet(self, key: tuple[int, int]) -> None:
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
            self.decode.device.pool[place] = list(self.prefill.device.pool[block])
        if effect.last is not None:
            del self._admitted[key]
            self._expected.discard(key)
            self.decode.feed(Received(*key, effect.last))
            self.prefill.feed(SendEnded(*key, None))

    def _ask(self, ask: AskPrefill) -> None:
        first = self._submits[ask.room]
        tokens = unpack_ids(ask.tokens)
        prompt, said = tokens[: first.prompt_tokens], tokens[first.prompt_tokens :]
        again = submit(ask.room, prompt, said=said, attempt=ask.attempt, time_left=1000.0)
        if self._refuses(ask) or not self._takes(again):
            self.decode.feed(ResumeLocally(ask.room))

    def _takes(self, again: Submit) -> bool:
        try:
            self.prefill.submit(again)
        except PdrtError:
            return False
        return True

    def _abort(self, key: tuple[int, int]) -> None:
        if key in self._expected:
            self._expected.discard(key)
            self.prefill.feed(SendFailed(*key, GONE))
            self.prefill.feed(SendEnded(*key, GONE))
        if self._admitted.pop(key, None) is not None:
            self.decode.feed(Quiet(*key))

    def _stop(self, key: tuple[int, int]) -> None:
        if key not in self._expected:
            return
        self._expected.discard(key)
        self.prefill.feed(SendEnded(*key, GONE))
        self.decode.feed(ReceiveFailed(*key, GONE))
        if self._admitted.pop(key, None) is not None:
            self.decode.feed(Quiet(*key))
