"""Leases, lines, claims and VMs of a node over time, as sentences that must hold after every step.

The machine carries out what the domain decides as the agent does; processes, engines and readings are played.
"""

from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nodeagent.domain import assignments, granting, leases
from nodeagent.domain.answering import Asker, decide, standing
from nodeagent.domain.held import Held
from nodeagent.domain.line import Change, dequeue, line, queue
from schemas.card import PRIORITIES, Card, CardLeased, ProcessRef, Waiter
from schemas.cardasks import (
    CardAnswer,
    CardAsk,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)
from schemas.cardstate import is_free
from schemas.plan import Plan, PlanItem, Stop
from schemas.replica import TERMINAL_PHASES
from tests.support.agent_yard import a_held, a_launch, an_item

START = datetime(2026, 1, 1, tzinfo=UTC)
SIZES = {"cpu": 100, "gpu0": 60, "gpu1": 60}
ROUNDS = 30


class CardsOfANode(RuleBasedStateMachine):
    """Two gpus and the RAM of one node, in hands that never rest."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.cards = {
            name: Card(
                node="n1",
                id=name,
                kind="cpu" if name == "cpu" else "gpu",
                memory_bytes=size,
                rev=0,
            )
            for name, size in SIZES.items()
        }
        self.items: dict[str, PlanItem] = {}
        self.held: dict[str, Held] = {}
        self.used: set[str] = set()
        self.gone: set[ProcessRef] = set()
        self.wanted: dict[str, tuple[str, ...]] = {}
        self.fences: dict[str, int] = dict.fromkeys(SIZES, 0)
        self.wishes: dict[str, Stop] = {}
        self.next = 0

    def name(self, prefix: str) -> str:
        self.next += 1
        return f"{prefix}-{self.next}"

    # What people ask.

    @rule(
        cards=st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2, unique=True),
        memory=st.one_of(st.none(), st.integers(1, 70)),
        priority=st.sampled_from(PRIORITIES),
        pinned=st.booleans(),
        ttl_s=st.sampled_from([None, None, 50.0]),
        wait_s=st.sampled_from([0.0, 30.0, 300.0]),
        process=st.booleans(),
    )
    def acquire(self, cards, memory, priority, pinned, ttl_s, wait_s, process) -> None:
        id = self.name("l")
        self.wanted[id] = tuple(cards)
        ask = LeaseAcquire(
            id=id,
            name=f"n-{id}",
            cards=tuple(cards),
            memory_bytes=memory,
            pinned=pinned,
            priority=priority,
            ttl_s=ttl_s,
            wait_s=wait_s,
        )
        ref = ProcessRef(pid=self.next, started=1, boot="b") if process else None
        before = dict(self.cards)
        answer = self.ask(ask, ref)
        if answer.status == "refused":
            assert self.cards == before, "a refusal changes nothing"
            assert answer.sentence
        elif wait_s == 0:
            assert answer.status == "granted", "who does not wait is never in line"
        if answer.status == "granted":
            assert answer.fences.keys() == set(cards), "all cards or none"
        again = self.ask(ask, ref)
        if answer.status != "refused":
            assert again == answer, "an ask repeated under its id has no second effect"

    @precondition(lambda self: self.named() or line(self.cards))
    @rule(data=st.data())
    def release(self, data) -> None:
        ids = sorted({*self.named(), *(x.id for x in line(self.cards) if x.kind == "named")})
        if ids:
            self.ask(LeaseRelease(what=data.draw(st.sampled_from(ids))))

    @rule(card=st.sampled_from(sorted(SIZES)), kind=st.sampled_from(["game", "app"]))
    def claim(self, card, kind) -> None:
        ask = ClaimStart(id=self.name("c"), name="doom", card=card, kind=kind)
        answer = self.ask(ask, ProcessRef(pid=self.next, started=2, boot="b"))
        assert (answer.status == "granted") == (self.cards[card].vm is None)

    @precondition(lambda self: any(card.claims for card in self.cards.values()))
    @rule(data=st.data())
    def unclaim(self, data) -> None:
        ids = sorted(x.id for card in self.cards.values() for x in card.claims)
        self.ask(ClaimEnd(what=data.draw(st.sampled_from(ids))))

    @rule(card=st.sampled_from(["gpu0", "gpu1"]), wait_s=st.sampled_from([0.0, 20.0]))
    def attach(self, card, wait_s) -> None:
        self.ask(VmAttach(name="win", card=card, wait_s=wait_s))

    @rule(card=st.sampled_from(["gpu0", "gpu1"]))
    def detach(self, card) -> None:
        self.ask(VmDetach(card=card))

    # What the control plane plans.

    @rule(
        cards=st.sampled_from([("cpu",), ("gpu0",), ("gpu1",), ("gpu0", "gpu1")]),
        memory=st.integers(1, 60),
        exclusive=st.booleans(),
        evict=st.booleans(),
    )
    def want(self, cards, memory, exclusive, evict) -> None:
        name = self.name("r")
        holders = {x.holder for c in cards for x in self.cards[c].leases if x.kind == "named"}
        self.items[name] = an_item(
            name,
            launch=a_launch(exclusive=exclusive),
            cards=cards,
            memory_bytes=memory,
            evict=tuple(sorted(holders)) if evict else (),
            decided_at=self.now,
        )
        self.act()

    @precondition(lambda self: self.items)
    @rule(data=st.data(), park=st.sampled_from(["never", "may"]), stop=st.booleans())
    def want_otherwise(self, data, park, stop) -> None:
        name = data.draw(st.sampled_from(sorted(self.items)))
        wish = Stop(decision=self.name("d"), reason="drain", decided_at=self.now, park=park)
        self.items[name] = replace(self.items[name], stop=wish if stop else None)
        self.act()

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def take_out(self, data) -> None:
        del self.items[data.draw(st.sampled_from(sorted(self.items)))]
        self.act()

    # What happens by itself.

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def time_passes(self, seconds) -> None:
        self.now += timedelta(seconds=seconds)
        self.act()

    @rule(data=st.data())
    def a_process_ends(self, data) -> None:
        refs = sorted(self.processes(), key=lambda ref: (ref.pid, ref.started))
        if refs:
            self.gone.add(data.draw(st.sampled_from(refs)))
            self.act()

    @rule(data=st.data())
    def an_engine_is_ready(self, data) -> None:
        names = self.in_phase("starting")
        if names:
            name = data.draw(st.sampled_from(names))
            self.say(self.held[name], "ready", resuming=False)
            cpu = self.cards["cpu"]
            mine = leases.lease_of(cpu, name)
            if mine is not None and mine.kind == "parked":
                self.put(leases.release(cpu, name))
            self.act()

    @rule(data=st.data(), parks=st.booleans())
    def a_drain_ends(self, data, parks) -> None:
        names = self.in_phase("draining")
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        held = self.held[name]
        assert held.stop is not None
        if parks and held.stop.park == "may" and held.replica.cards != ("cpu",):
            self.park(name)
        else:
            self.held[name] = replace(held, ending=True)
        self.act()

    def park(self, name: str) -> None:
        cpu = self.cards["cpu"]
        need = leases.parked_to_evict(cpu, self.held, 10, {})
        if need != ():
            return
        for card in self.held[name].replica.cards:
            self.put(leases.parked(self.cards[card], name, 5, self.now))
        if not leases.lacks(cpu, 10, {}):
            self.put(leases.parked(cpu, name, 10, self.now))
        self.say(self.held[name], "parked", ending=False, park_way="sleep")

    @rule()
    def what_ended_is_gone(self) -> None:
        self.finish()
        self.act()

    def finish(self) -> None:
        """Engines told to end are gone, processes asked to leave have left, memory is back."""
        for name, held in sorted(self.held.items()):
            if held.ending and held.replica.phase not in TERMINAL_PHASES:
                self.say(held, "stopped")
                self.drop(name)
        for card in tuple(self.cards.values()):
            for lease in card.leases:
                if lease.leaving and lease.process is not None:
                    self.gone.add(lease.process)
                if lease.returning:
                    self.drop(lease.holder)

    # The agent.

    def ask(self, ask: CardAsk, process: ProcessRef | None = None) -> CardAnswer:
        asker = Asker(by="me", process=process)
        decided = decide(ask, asker, self.cards, self.held, self.facts(), self.now)
        if decided.changes:
            self.apply(decided.changes)
            self.act()
        if decided.answer is not None:
            return decided.answer
        found = standing(self.cards, decided.id)
        return found or CardAnswer(status="refused", id=decided.id, sentence="over")

    def facts(self) -> granting.Facts:
        return granting.Facts(ended=frozenset(self.gone))

    def act(self) -> None:
        for _ in range(ROUNDS):
            settled = granting.settle(self.cards, self.held, self.facts(), self.now)
            for batch in settled.batches:
                self.apply(batch)
            again = granting.settle(self.cards, self.held, self.facts(), self.now)
            assert again.batches == (), "settling twice changes nothing more"
            assert again.wishes == settled.wishes, "and wishes nothing else"
            self.wishes = dict(settled.wishes)
            actions = self.plan(settled)
            for action in actions:
                self.carry_out(action)
            if not actions and not settled.batches:
                return
        raise AssertionError("the node does not settle")

    def plan(self, settled: granting.Settled) -> tuple[assignments.Action, ...]:
        observed = assignments.Observed(
            held=self.held,
            cards=self.cards,
            used=self.used,
            unreported=frozenset(),
            engines=frozenset({"command"}),
            allow_commands=True,
            wishes=settled.wishes,
        )
        plan = Plan(node="n1", items=tuple(self.items.values()))
        return assignments.plan(plan, observed, self.now)

    def carry_out(self, action: assignments.Action) -> None:
        match action:
            case assignments.Start(item=item, cards=cards):
                for name in item.cards:
                    card = self.cards[name]
                    assert not card.claims, "nothing starts on a claimed card"
                    assert card.vm is None, "nothing starts on a card of a VM"
                self.put(*cards)
                self.say(self.fresh(item), "starting")
            case assignments.Refuse(item=item, reason=reason):
                assert reason
                self.say(self.fresh(item), "refused")
            case assignments.Wait(item=item, waiting_for=names, new=new):
                if new:
                    self.apply(queue(self.cards, assignments.waiter_of(item, names, self.now)))
                held = self.held.get(item.replica)
                if held is None or held.replica.phase == "waiting":
                    self.say(self.fresh(item), "waiting", waiting_for=names)
            case assignments.Unpark(replica=name, cards=cards):
                self.put(*cards)
                self.say(self.held[name], "starting", stop=None, resuming=True, card_revs={})
            case assignments.StayParked(replica=name, card_revs=revs):
                self.say(self.held[name], "parked", card_revs=revs)
            case assignments.LeaveLine(replica=name):
                self.apply(dequeue(self.cards, name, "withdrawn"))
            case assignments.Withdraw(item=item, replica=name):
                self.apply(dequeue(self.cards, name, "withdrawn"))
                held = self.held.get(name)
                self.say(held or self.fresh(item), "withdrawn")
                self.drop(name)
            case assignments.Drain(replica=name, stop=stop):
                self.say(self.held[name], "draining", stop=stop, taken_back=None)
            case assignments.Halt(replica=name, stop=stop):
                self.held[name] = replace(self.held[name], stop=stop, ending=True)
            case assignments.Resume(replica=name):
                assert name not in self.wishes, "a cause that stands is not called off"
                decision = action.decision
                self.say(self.held[name], "ready", stop=None, taken_back=decision)
            case assignments.Forget(replica=name):
                del self.held[name]
                self.used.add(name)

    def fresh(self, item: PlanItem) -> Held:
        return a_held(
            item.replica,
            "waiting",
            launch=item.launch,
            cards=item.cards,
            memory_bytes=item.memory_bytes,
        )

    def say(self, held: Held, phase: str, **fields) -> None:
        outer = {k: fields.pop(k) for k in ("stop", "ending", "resuming") if k in fields}
        replica = replace(held.replica, phase=phase, **fields)
        self.held[replica.id] = replace(held, replica=replica, **outer)

    def apply(self, batch: tuple[Change, ...]) -> None:
        before = line(self.cards)
        self.put(*(change.card for change in batch))
        for change in batch:
            if not isinstance(change.event, CardLeased):
                continue
            lease = leases.lease_of(change.card, change.event.holder)
            assert lease is not None
            was = {x.id: x for x in before}.get(lease.holder)
            since = was.since if was is not None else self.now
            mine = (PRIORITIES.index(lease.priority), since, lease.holder)
            for other in change.card.waiters:
                assert _rank(other) > mine, "the head of the line is never overtaken"

    def put(self, *cards: Card | None) -> None:
        for card in cards:
            assert card is not None
            assert card.rev >= self.cards[card.id].rev, "revisions only grow"
            self.cards[card.id] = card

    def drop(self, holder: str) -> None:
        for card in tuple(self.cards.values()):
            after = leases.release(card, holder)
            if after is not None:
                self.put(after)

    def named(self) -> set[str]:
        return {x.holder for c in self.cards.values() for x in c.leases if x.kind == "named"}

    def processes(self) -> set[ProcessRef]:
        found = {x.process for c in self.cards.values() for x in (*c.leases, *c.waiters, *c.claims)}
        return {ref for ref in found if ref is not None and ref not in self.gone}

    def in_phase(self, phase: str) -> list[str]:
        return sorted(n for n, h in self.held.items() if h.replica.phase == phase and not h.ending)

    # What must always hold.

    @invariant()
    def no_card_has_two_exclusive_leases(self) -> None:
        for card in self.cards.values():
            whole = [x for x in card.leases if x.exclusive]
            assert len(whole) <= 1
            if whole:
                others = [x for x in card.leases if x.kind != "parked"]
                assert others == whole, "an exclusive lease has the card for itself"

    @invariant()
    def grants_never_exceed_the_memory(self) -> None:
        for card in self.cards.values():
            assert sum(x.memory_bytes for x in card.leases) <= card.memory_bytes

    @invariant()
    def leases_and_places_in_line_are_on_all_their_cards_or_on_none(self) -> None:
        for id, cards in self.wanted.items():
            for there in (leases.lease_of, leases.waiter_of):
                found = {c.id for c in self.cards.values() if there(c, id) is not None}
                assert found in (set(), set(cards))

    @invariant()
    def no_holder_has_two_leases_on_a_card(self) -> None:
        for card in self.cards.values():
            holders = [lease.holder for lease in card.leases]
            assert len(holders) == len(set(holders))
            ids = [waiter.id for waiter in card.waiters]
            assert len(ids) == len(set(ids))

    @invariant()
    def a_vm_has_its_card_for_itself(self) -> None:
        for card in self.cards.values():
            if card.vm is not None and card.vm.attached:
                assert not card.leases

    @invariant()
    def whoever_runs_has_its_lease_and_whoever_has_one_is_known(self) -> None:
        for name, held in self.held.items():
            if held.replica.phase in ("starting", "ready", "draining"):
                for card in held.replica.cards:
                    lease = leases.lease_of(self.cards[card], name)
                    assert lease is not None
                    assert lease.kind == "replica"
        for card in self.cards.values():
            for lease in card.leases:
                if lease.kind != "named":
                    one = self.held[lease.holder]
                    assert one.replica.phase not in ("stopped", "withdrawn", "refused")

    @invariant()
    def a_free_card_is_nobodys(self) -> None:
        for card in self.cards.values():
            if is_free(card):
                assert not any(x.kind != "parked" for x in card.leases)
                assert (card.waiters, card.claims, card.vm) == ((), (), None)

    def teardown(self) -> None:
        """Every waiter is eventually granted or leaves the line."""
        self.act()
        for card in tuple(self.cards.values()):
            for claim in card.claims:
                self.ask(ClaimEnd(what=claim.id))
            if card.vm is not None:
                self.ask(VmDetach(card=card.id))
        for _ in range(40):
            waiting = line(self.cards)
            if not waiting:
                return
            self.now += timedelta(seconds=10)
            for name in self.in_phase("starting"):
                self.say(self.held[name], "ready", resuming=False)
            for name in self.in_phase("draining"):
                self.held[name] = replace(self.held[name], ending=True)
            self.finish()
            self.act()
        raise AssertionError(f"still in line: {[x.id for x in line(self.cards)]}")


def _rank(waiter: Waiter) -> tuple[int, datetime, str]:
    return (PRIORITIES.index(waiter.priority), waiter.since, waiter.id)


TestCardsOfANode = CardsOfANode.TestCase
