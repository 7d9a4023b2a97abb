"""Leases over time, as sentences that must hold after every step."""

from datetime import UTC, datetime

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodeagent.domain import leases
from schemas.card import Card
from schemas.cardstate import held_bytes

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOLDERS = [f"r-{n}" for n in range(6)]
CARDS = {"cpu": 100, "gpu0": 60, "gpu1": 30}


class LeaseLedger(RuleBasedStateMachine):
    """Random grants, measurements and returns on three cards."""

    def __init__(self) -> None:
        super().__init__()
        self.cards = {
            name: Card(node="n", id=name, kind="gpu", memory_bytes=memory, rev=0)
            for name, memory in CARDS.items()
        }
        self.granted: dict[str, tuple[str, ...]] = {}
        self.released: list[tuple[str, str]] = []
        self.fences: dict[str, int] = dict.fromkeys(CARDS, 0)

    @rule(
        holder=st.sampled_from(HOLDERS),
        wanted=st.lists(st.sampled_from([*CARDS, "none"]), max_size=3, unique=True),
        memory=st.integers(0, 80),
    )
    def reserve(self, holder: str, wanted: list[str], memory: int) -> None:
        if holder in self.granted:  # an id is granted once
            return
        before = dict(self.cards)
        answer = leases.reserve(self.cards, holder, wanted, memory, NOW, {})
        if isinstance(answer, leases.NoRoom):
            assert answer.reason, "a refusal says why"
            assert self.cards == before, "a refusal changes nothing"
            fits = all(
                name in before
                and memory <= before[name].memory_bytes - held_bytes(before[name], {})
                for name in wanted
            )
            assert not (fits and wanted), "what fits on every card is never refused"
            return
        assert [card.id for card in answer.cards] == wanted, "all cards or none"
        for card in answer.cards:
            lease = leases.lease_of(card, holder)
            assert lease is not None
            assert lease.fence > self.fences[card.id], "fences only grow"
            self.fences[card.id] = lease.fence
            self.cards[card.id] = card
        self.granted[holder] = tuple(wanted)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.granted)))
        for name in self.granted[holder]:
            before = self.cards[name]
            self.cards[name] = leases.returning(before, holder)
            held = held_bytes(before, {})
            assert held_bytes(self.cards[name], {}) == held, "a stop alone frees nothing"

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def memory_is_back(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.granted)))
        for name in self.cards:
            after = leases.release(self.cards[name], holder)
            if after is not None:
                assert after.rev == self.cards[name].rev + 1
                self.released.append((holder, name))
                self.cards[name] = after
                self.fences[name] = after.rev
            assert leases.release(self.cards[name], holder) is None, "a lease ends once"
        expected = [(holder, name) for name in self.granted[holder]]
        assert sorted(x for x in self.released if x[0] == holder) == sorted(expected)
        del self.granted[holder]
        self.released = [x for x in self.released if x[0] != holder]

    @invariant()
    def no_card_is_given_beyond_its_memory(self) -> None:
        for card in self.cards.values():
            assert sum(lease.memory_bytes for lease in card.leases) <= card.memory_bytes

    @invariant()
    def no_holder_has_two_leases_on_a_card(self) -> None:
        for card in self.cards.values():
            holders = [lease.holder for lease in card.leases]
            assert len(holders) == len(set(holders))


TestLeaseLedger = LeaseLedger.TestCase
