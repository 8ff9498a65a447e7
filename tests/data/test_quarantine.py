"""The ledger of who may still touch memory."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrt.data.quarantine import Ledger


def test_the_last_holder_releases_a_sealed_key() -> None:
    ledger: Ledger[str, int] = Ledger()
    ledger.hold("a", 1)
    ledger.hold("a", 2)
    assert not ledger.seal("a")
    assert not ledger.let_go("a", 1)
    assert ledger.sealed == 1
    assert ledger.let_go("a", 2)
    assert ledger.sealed == 0


def test_a_proof_that_comes_before_the_seal_counts() -> None:
    ledger: Ledger[str, int] = Ledger()
    ledger.hold("a", 1)
    assert not ledger.let_go("a", 1)
    assert ledger.seal("a")


def test_who_holds_nothing_releases_nothing() -> None:
    ledger: Ledger[str, int] = Ledger()
    ledger.hold("a", 1)
    ledger.seal("a")
    assert not ledger.let_go("a", 2)
    assert not ledger.let_go("b", 1)
    assert ledger.is_sealed("a")


def test_a_key_that_ended_by_itself_is_forgotten() -> None:
    ledger: Ledger[str, int] = Ledger()
    ledger.hold("a", 1)
    ledger.drop("a")
    assert len(ledger) == 0


class AnyOrder(RuleBasedStateMachine):
    """Each key is released exactly once, when it is sealed and nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[int, int] = Ledger()
        self.held: dict[int, set[int]] = {}
        self.sealed: set[int] = set()

    @rule(key=st.integers(0, 3), holder=st.integers(0, 3))
    def hold(self, key: int, holder: int) -> None:
        if key not in self.sealed:
            self.ledger.hold(key, holder)
            self.held.setdefault(key, set()).add(holder)

    @rule(key=st.integers(0, 3), holder=st.integers(0, 3))
    def let_go(self, key: int, holder: int) -> None:
        had = holder in self.held.get(key, set())
        self.held.get(key, set()).discard(holder)
        expected = had and not self.held[key] and key in self.sealed
        assert self.ledger.let_go(key, holder) is expected
        if expected:
            self.sealed.discard(key)

    @rule(key=st.integers(0, 3))
    def seal(self, key: int) -> None:
        if key not in self.sealed:
            is_free = not self.held.get(key)
            assert self.ledger.seal(key) is is_free
            if not is_free:
                self.sealed.add(key)

    @invariant()
    def sealed_keys_have_holders(self) -> None:
        assert self.ledger.sealed == len(self.sealed)
        assert all(self.ledger.holders(key) == self.held[key] for key in self.sealed)


AnyOrder.TestCase.settings = settings(max_examples=40, deadline=None)
test_any_order = AnyOrder.TestCase
