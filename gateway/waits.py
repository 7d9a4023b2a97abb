"""Holds the tickets of those who wait for a model, and gives each its one outcome: a run, an answer, or to look again.

The waiting room (gateway/domain/waitingroom.py) says who leaves it with what, this who hears of it and when its timers
fire. It does no I/O; whether a request can go on now, and its run, are the gateway's.
"""

import asyncio
from collections.abc import Callable, Container, Mapping
from typing import Protocol

from gateway.adapterdesk import Seeking
from gateway.clock import Clock
from gateway.domain.adapteranswers import loads_none_yet
from gateway.domain.admission import (
    Keep,
    Refuse,
    Release,
    Route,
    Standing,
    Wait,
    ends_the_wait,
    failed_start,
    out_of_reach,
    queue_full,
    settle,
    timed_out,
    undecided,
)
from gateway.domain.affinity import Affinity
from gateway.domain.answers import Answer, leaving
from gateway.domain.cards import CardRef
from gateway.domain.oncards import no_cards_yet
from gateway.domain.rights import may_not_wait
from gateway.domain.routing import Loss
from gateway.domain.table import Table
from gateway.domain.turns import Busy
from gateway.domain.waitingroom import Full, Joined, Key, Waiter, WaitingRoom
from gateway.inhand import Asked, Run, Ticket
from schemas.model import Model
from schemas.replica import Replica

FAILED_START_GRACE_S = 0.25
"""A failed start is followed by the control plane's refusal, which knows when to come back; without
one its waiters are answered after this."""


class Home(Protocol):
    """What waits need of their gateway. Looked up at each use, for all of it may be replaced."""

    clock: Clock
    table: Table | None
    on_demand: Callable[[Key], None]
    on_edge: Callable[[bool], None]

    @property
    def ejected(self) -> Mapping[str, Loss | str]: ...
    def standing(self) -> Standing: ...
    def admit(
        self, name: str, path: str, *, accepted: bool, on: CardRef | None = None
    ) -> Route | Wait | Answer: ...
    def start(
        self,
        route: Route,
        abort: Callable[[str], None],
        seeking: Seeking | None = None,
        *,
        affinity: Callable[[], Affinity | None] | None = None,
    ) -> Run | Answer | Busy: ...
    def finish(self, run: Run, *, used: bool) -> None: ...


class Waits:
    """Everybody who waits at one gateway. A request is in the room and has a ticket here, or neither."""

    def __init__(self, home: Home, *, max_requests: int, max_bytes: int) -> None:
        self.room = WaitingRoom(max_requests=max_requests, max_bytes=max_bytes)
        self._home = home
        self._tickets: dict[int, Ticket] = {}
        self._some_may_not_start = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_due_s = 0.0  # when it fires; not every loop's timers tell
        self._grace_timers: set[asyncio.TimerHandle] = set()

    # -- coming and going ------------------------------------------------------------------------

    def join(
        self,
        model: Model,
        scope: str,
        *,
        size_bytes: int,
        deadline_s: float,
        asked: Asked | None = None,
        on_asked: Callable[[], None] = lambda: None,
        accepted: bool = False,
    ) -> Ticket | Answer:
        """Admits a request to the waiting room and sees to it that the model is asked for.

        With `asked` its run is begun the moment there is a replica; without, it only hears of it. `accepted`: it was
        let in before, and is not turned away because the room is full now.
        """
        table = self._home.table
        assert table is not None, "without a table there is no model to wait for"
        key = (model.name, scope)
        if asked is not None and not asked.caller.may_activate:
            if refused := may_not_wait(asked.caller, table, key):
                return refused
            self._some_may_not_start = True
        joined = self.room.join(
            key,
            size_bytes=size_bytes,
            now_s=self._home.clock.now_s(),
            deadline_s=deadline_s,
            position=table.position,
            accepted=accepted,
        )
        match joined:
            case Full(what=what, limit=limit):
                return queue_full(
                    table, model.name, what, limit, self._home.clock.now(), scope=scope
                )
            case Joined(waiter=waiter, first=first):
                ticket = Ticket(
                    waiter=waiter,
                    asked=asked,
                    on_asked=on_asked,
                    outcome=asyncio.get_running_loop().create_future(),
                )
                self._tickets[waiter.ticket] = ticket
                self._arm_deadline()
                if first:
                    self._home.on_edge(False)
                self._home.on_demand(key)
                return ticket

    def asked_for(self, key: Key) -> None:
        """A wish for `key` goes out now."""
        for ticket in self._tickets.values():
            if ticket.waiter.key == key:
                ticket.on_asked()

    def leave(self, ticket: Ticket) -> None:
        """The client is gone; safe to call after an outcome it never saw. The load goes on."""
        self._tickets.pop(ticket.waiter.ticket, None)
        outcome = ticket.outcome
        if outcome.done() and not outcome.cancelled():
            run = outcome.result()
            if isinstance(run, Run):
                self._home.finish(run, used=False)
        if self.room.leave(ticket.waiter.ticket):
            self._arm_deadline()
            self._after_leaving(ticket.waiter.key)

    def oldest_asking_s(self, key: Key) -> float | None:
        """Since when somebody waits for `key` who may have it started."""
        if not self._some_may_not_start:
            return self.room.oldest_joined_s(key)
        for ticket in self._tickets.values():
            asked = ticket.asked
            if ticket.waiter.key == key and (asked is None or asked.caller.may_activate):
                return ticket.waiter.joined_s
        return None

    def traceparent_of(self, key: Key) -> str:
        """The trace of whoever waits longest for `key`: a wish is sent for them."""
        for ticket in self._tickets.values():
            if ticket.waiter.key == key and ticket.asked is not None:
                return ticket.asked.traceparent
        return ""

    @property
    def open_tickets(self) -> int:
        """How many have a ticket and no outcome yet."""
        return len(self._tickets)

    # -- what the table and replicas do to them ---------------------------------------------------

    def settle_model(self, model: str) -> None:
        """Looks again at everybody who waits for `model`."""
        self.settle_models((model,))

    def settle_models(self, models: Container[str]) -> None:
        """Looks again at everybody who waits for one of these.

        In one pass: a node's event must not cost everybody who waits times all models.
        """
        for key in self.room.waited_for():
            if key[0] in models:
                self._settle(key)

    def settle_all(self) -> tuple[Key, ...]:
        """Looks again at everybody; returns what was waited for before that."""
        keys = self.room.waited_for()
        for key in keys:
            self._settle(key)
        return keys

    def _settle(self, key: Key) -> None:
        table = self._home.table
        if table is None:
            return
        match settle(table, key[0], self._home.standing(), self._home.clock.now(), scope=key[1]):
            case Release():
                self._release(key)
            case Refuse(answer=reply, decided_at=seq):
                told = (
                    self.room.release(key) if seq is None else self.room.refuse(key, decided_at=seq)
                )
                self._resolve(key, told, reply)
            case Keep():
                self._turn_away(key)
        # Also when nobody is left: the wish that was open is decided or not needed any more.
        self._home.on_demand(key)

    def _turn_away(self, key: Key) -> None:
        """Answers those who may not start what nobody starts any more."""
        table = self._home.table
        if not self._some_may_not_start or table is None:
            return
        for ticket in list(self._tickets.values()):
            if ticket.waiter.key != key or ticket.asked is None:
                continue
            refused = may_not_wait(ticket.asked.caller, table, key)
            if refused is not None and self.room.leave(ticket.waiter.ticket):
                self._resolve(key, (ticket.waiter,), refused)

    def refuse_adapters(self, bases: set[str]) -> None:
        """Answers those who wait for an adapter of these models that is not to be had any more."""
        for ticket in list(self._tickets.values()):
            asked, key = ticket.asked, ticket.waiter.key
            if asked is None or key[0] not in bases or asked.name in (key[0], ""):
                continue
            decision = self._home.admit(asked.name, asked.path, accepted=True, on=asked.on)
            if isinstance(decision, Answer) and self.room.leave(ticket.waiter.ticket):
                self._resolve(key, (ticket.waiter,), decision)

    def _release(self, key: Key) -> None:
        """Begins a run for everybody who waits for `key`, in order of arrival.

        Each is admitted as if it came now; those that ask the same hear the same.
        """
        waiters = self.room.release(key)
        found: dict[tuple[str, str, CardRef | None], Route | Wait | Answer] = {}
        for waiter in waiters:
            ticket = self._tickets.pop(waiter.ticket, None)
            if ticket is None or ticket.outcome.done():
                continue
            asked = ticket.asked
            outcome: Run | Answer | None = None
            if asked is not None:
                wanted = (asked.name, asked.path, asked.on)
                decision = found.get(wanted)
                if decision is None:
                    decision = found[wanted] = self._home.admit(
                        asked.name, asked.path, accepted=True, on=asked.on
                    )
                if isinstance(decision, Answer):
                    outcome = decision
                elif isinstance(decision, Route) and (
                    # One whose name has become an adapter's meanwhile looks again, as for that.
                    decision.adapter is None or asked.seeking is not None
                ):
                    begun = self._home.start(
                        decision, asked.abort, asked.seeking, affinity=asked.affinity
                    )
                    # Who finds no seat comes back in the order of arrival, and gets in line.
                    outcome = None if isinstance(begun, Busy) else begun
            ticket.outcome.set_result(outcome)
        self._after_resolving(key, waiters)

    def failed(self, replica: Replica, seq: int) -> None:
        """A start failed. The refusal of it usually follows in milliseconds; do not sit out more."""
        table = self._home.table
        if table is None:
            return
        keys = [
            key
            for key in self.room.waited_for()
            if key[0] == replica.model and ends_the_wait(table, replica, scope=key[1])
        ]
        if not keys:
            return

        def answer_waiters() -> None:
            self._grace_timers.discard(handle)
            now_table = self._home.table
            if now_table is None:
                return
            # Whatever starts by now was not what they waited for: a failed start answers its waiters.
            now = self._home.clock.now()
            for key in keys:
                reply = failed_start(now_table, replica, now, scope=key[1])
                self._resolve(key, self.room.refuse(key, decided_at=seq), reply)

        handle = asyncio.get_running_loop().call_later(FAILED_START_GRACE_S, answer_waiters)
        self._grace_timers.add(handle)

    # -- other ends -------------------------------------------------------------------------------

    def give_up(self, key: Key, *, joined_until_s: float) -> None:
        """Nobody decided in time for those who joined until then."""
        table = self._home.table
        model, scope = key
        if table is not None and (ready := table.routable(model, scope)):
            # One that answers here can only be of no use to who waits for an adapter.
            answers = any(r.id not in self._home.ejected for r in ready)
            reply = loads_none_yet(model) if answers else out_of_reach(model)
        elif table is not None and not table.may_ask_for(scope):
            reply = no_cards_yet(model, scope)
        else:
            reply = undecided(model)
        self._resolve(key, self.room.give_up(key, joined_until_s=joined_until_s), reply)

    def dismiss_all(self) -> None:
        """This gateway ends: whoever still waits is told to come back."""
        for key in self.room.waited_for():
            self._resolve(key, self.room.release(key), leaving())

    def close(self) -> None:
        """Releases every timer."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        for handle in self._grace_timers:
            handle.cancel()
        self._grace_timers.clear()

    def _expire(self) -> None:
        self._deadline_timer = None
        now_s, now = self._home.clock.now_s(), self._home.clock.now()
        table = self._home.table
        for waiter in self.room.expire(now_s):
            model, scope = waiter.key
            assert table is not None, "whoever waits joined with a table"
            reply = timed_out(table, model, now_s - waiter.joined_s, now, scope=scope)
            self._resolve(waiter.key, (waiter,), reply)
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        """One timer for the whole room, at its next deadline."""
        due_s = self.room.next_deadline_s()
        timer = self._deadline_timer
        if timer is not None:
            if due_s is not None and self._deadline_due_s <= due_s:
                return  # It fires early at worst, finds nobody and is armed again.
            timer.cancel()
            self._deadline_timer = None
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_at(due_s, self._expire)
            self._deadline_due_s = due_s

    def _resolve(self, key: Key, waiters: tuple[Waiter, ...], reply: Answer) -> None:
        """Gives those just taken out of the room their one outcome."""
        for waiter in waiters:
            ticket = self._tickets.pop(waiter.ticket, None)
            if ticket is not None and not ticket.outcome.done():
                ticket.outcome.set_result(reply)
        self._after_resolving(key, waiters)

    def _after_resolving(self, key: Key, waiters: tuple[Waiter, ...]) -> None:
        if waiters:
            self._arm_deadline()
            self._after_leaving(key)

    def _after_leaving(self, key: Key) -> None:
        if self.room.count(key) == 0:
            self._home.on_edge(False)
            self._home.on_demand(key)
