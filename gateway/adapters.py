"""Has adapters loaded where their requests go: asks agents, one question at a time for each adapter and replica.

A question outlives the request it was asked for, so a client that leaves abandons no load others wait for. Which
replica it is was chosen before (gateway/adapterdesk.py); what an answer makes of a request is decided here and
nowhere else. It never talks to an engine: loading is the agent's affair.
"""

import asyncio
import logging
from datetime import timedelta
from typing import Final, NoReturn, assert_never

from events.log import LogError, Wire
from gateway.activator import Spawn
from gateway.adapterdesk import Adapted, Seeking
from gateway.domain.adapteranswers import at_fault, no_place, nobody_answers
from gateway.domain.answers import Answer, leaving
from gateway.domain.pins import Held
from gateway.gateway import Gateway, Run
from gateway.http.exchange import Exchange
from gateway.metrics import Metrics
from schemas import codes
from schemas.adapterasks import Ensure, EnsureAnswer
from schemas.beacons import AgentBeacon
from schemas.replica import Replica
from schemas.slots import BadAdapter

log = logging.getLogger("gateway.adapters")

RPC: Final = "adapters"

LOAD_S: Final = 120.0
"""So long one replica may take to load an adapter for a request; then another one is asked."""

ASK_S: Final = 5.0
"""How long an agent may hold a question open."""

FIRST_ASK_S: Final = 1.0
"""The same while other replicas could be tried: one that has no place says so sooner."""

TRANSIT_S: Final = 2.0
"""What a question may take besides. An agent that answers later counts as silent."""

PAUSE_S: Final = 0.25
"""Between two questions when every replica was tried and none could say yes or no."""

REFUSED_S: Final = 15.0
"""A replica that did not load it in `LOAD_S` may be tried again after this."""

FOR_GOOD: Final = frozenset({codes.NO_ADAPTERS, codes.ROUTE_OFF})
"""Refusals that do not pass by themselves in a moment, although they name no time."""


class Elsewhere(Exception):
    """The request goes back to be routed again: this replica is not for it, now or at all."""


class Refused(Exception):
    """The request ends with an answer."""

    def __init__(self, reply: Answer) -> None:
        super().__init__(reply.message)
        self.answer = reply


class _Question:
    """One question to an agent that is under way, and the requests that wait for its answer."""

    __slots__ = ("asked_s", "waiters")

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.waiters: list[asyncio.Future[EnsureAnswer | None]] = []

    def waiter(self) -> "asyncio.Future[EnsureAnswer | None]":
        """For one more who waits."""
        waiter: asyncio.Future[EnsureAnswer | None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        return waiter

    def answered(self, answer: EnsureAnswer | None) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(answer)


_Key = tuple[str, str, str]
"""Replica, pin name, and the engine-side name that the engine did not know (empty for a first question)."""


class Adapters:
    """The questions of one gateway. `number` tells its last beacon's; it hears agents' beacons by `heard`."""

    def __init__(
        self,
        gateway: Gateway,
        wire: Wire,
        metrics: Metrics,
        *,
        incarnation: str,
        spawn: Spawn,
    ) -> None:
        self._gateway = gateway
        self._wire = wire
        self._metrics = metrics
        self._incarnation = incarnation
        self._spawn = spawn
        self.number = 0
        self._questions: dict[_Key, _Question] = {}
        self._waiting: set[asyncio.Future[EnsureAnswer | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dismissed = False

    # -- requests --------------------------------------------------------------------------------

    def hit(self, run: Run) -> str:
        """The engine-side name of the run's adapter under a trusted pin, about which nothing is asked; empty: its
        agent must be asked, or was asked for this request already (`secure`)."""
        adapted, held = run.adapted, run.held
        assert adapted is not None, "only a run for an adapter needs one"
        assert held is not None, "it counts under a pin"
        seeking = adapted.seeking
        if seeking.asked_s or not held.is_trusted(self._gateway.clock.now_s()):
            return ""
        seeking.how = "hit"
        return held.engine_name

    def ask_ahead(self, run: Run) -> "asyncio.Future[EnsureAnswer | None] | None":
        """Asks the agent of a run that is no hit, before anybody waits for that. Once what is returned is done either
        `there` says that all is well, or `secure` goes on with the answer. None: there is nobody to ask now.
        """
        adapted = run.adapted
        assert adapted is not None, "only a run for an adapter needs one"
        if self._dismissed or not self._can_ask(run.replica):
            return None
        adapted.seeking.asked_s[run.replica.id] = self._gateway.clock.now_s()
        is_mine, question = self._question(run.replica, adapted, "")
        waiter = question.waiter()
        adapted.ahead = is_mine, waiter
        self._waiting.add(waiter)
        waiter.add_done_callback(self._waiting.discard)
        return waiter

    def there(self, run: Run) -> str:
        """The engine-side name of an adapter that was asked for ahead, if that is loaded now; empty: `secure` has to go
        on. Whoever sends a request under it takes `ahead` from the run."""
        adapted = run.adapted
        assert adapted is not None, "only a run for an adapter needs one"
        assert adapted.ahead is not None, "it was asked for ahead"
        is_mine, waiter = adapted.ahead
        answer = None if self._dismissed or not waiter.done() else waiter.result()
        if answer is None or answer.status != "ready":
            return ""
        _note(adapted.seeking, answer, is_mine=is_mine)
        return answer.engine_name

    async def secure(self, run: Run, exchange: Exchange, *, gone: str = "") -> str:
        """The engine-side name under which the run's adapter is loaded in its replica.

        `gone` is the name its engine said it does not know. Raises Elsewhere; Refused; EngineGone when the
        exchange is aborted, because the log says that the replica is no more.

        1. under a trusted pin: nothing is asked
        2. nobody can be asked, and it is known to be loaded there: without a pin
        3. otherwise its agent is asked until it says yes or no
        """
        adapted, held = run.adapted, run.held
        assert adapted is not None, "only a run for an adapter needs one"
        assert held is not None, "it counts under a pin"
        gateway = self._gateway
        seeking = adapted.seeking
        if not gone and adapted.ahead is None and held.is_trusted(gateway.clock.now_s()):  # 1
            seeking.how = "hit"
            return held.engine_name
        if gone:
            # What was asked ahead is another question.
            adapted.ahead = None
            gateway.pins.revoke(run.replica.id, adapted.pin)
            if not self._can_ask(run.replica):
                self.give_up_on(run, "its engine does not have it, and its agent cannot be asked")
                raise Elsewhere
        elif not self._can_ask(run.replica) and (name := self._unpinned(run, adapted)):  # 2
            return name
        seeking.asked_s.setdefault(run.replica.id, gateway.clock.now_s())
        while True:  # 3
            exchange.check()
            if not gateway.is_connected():
                raise Elsewhere
            name = await self._ask_once(run, adapted, exchange, gone)
            if name is not None:
                return name

    def give_up_on(self, run: Run, why: str, *, code: str = codes.LOAD_FAILED) -> None:
        """This request tries the run's replica no more; `why` is a sentence for its client."""
        adapted = run.adapted
        assert adapted is not None, "only a run for an adapter has one to give up"
        adapter = adapted.entry.adapter
        log.warning(
            "adapter given up on a replica",
            extra={"adapter": adapted.pin, "replica": run.replica.id, "why": why},
        )
        adapted.seeking.refused_by(
            run.replica.id,
            BadAdapter(
                adapter=adapter.name,
                version=adapter.version,
                code=code,
                reason=why,
                until=self._gateway.clock.now() + timedelta(seconds=REFUSED_S),
            ),
        )

    def _unpinned(self, run: Run, adapted: Adapted) -> str:
        """The name it is known to be loaded under without asking; empty: it is not known to be."""
        table = self._gateway.table
        places = None if table is None else table.adapters.places.get(run.replica.id)
        assert run.held is not None, "it counts under a pin"
        name = adapted.known_name(run.held, places)
        if name:
            adapted.seeking.how = "unpinned"
        return name

    def _can_ask(self, replica: Replica) -> bool:
        return self._gateway.is_connected() and not self._gateway.desk.is_silent(replica.node)

    async def _ask_once(
        self, run: Run, adapted: Adapted, exchange: Exchange, gone: str
    ) -> str | None:
        """One answer and what it means for this request; None: ask again."""
        gateway = self._gateway
        clock = gateway.clock
        seeking = adapted.seeking
        replica = run.replica
        ahead, adapted.ahead = adapted.ahead, None
        if ahead is None:
            is_mine, question = self._question(replica, adapted, gone)
            ahead = is_mine, question.waiter()
            began_s = clock.now_s()
        else:
            began_s = seeking.asked_s[replica.id]
        is_mine, waiter = ahead
        answer = await self._wait(waiter, exchange)
        now_s = clock.now_s()
        if answer is None:
            if not gone and (name := self._unpinned(run, adapted)):
                return name
            await self._unheard(replica, adapted, exchange)
        _note(seeking, answer, is_mine=is_mine)
        match answer.status:
            case "ready":
                return answer.engine_name
            case "loading":
                if now_s - seeking.asked_s[replica.id] >= LOAD_S:
                    # B59: a load that takes so long is the replica's fault.
                    why = f"the replica {replica.id} did not load it within {LOAD_S:.0f} s"
                    self.give_up_on(run, why, code=codes.LOAD_TIMEOUT)
                    raise Elsewhere
                if now_s - began_s < PAUSE_S:
                    # An agent may hold a question open; one that does not is not asked in a loop.
                    await self._pause(exchange)
            case "waiting":
                if seeking.full_since_s is None:
                    seeking.full_since_s = began_s
                waited_s = now_s - seeking.full_since_s
                if waited_s >= gateway.wait_s:
                    raise Refused(no_place(seeking.name, waited_s, answer.sentence))
                if seeking.put_off(replica.id, adapted.others) and now_s - began_s < PAUSE_S:
                    if answer.code == codes.IN_USE:
                        await self._step_back(run, adapted.pin, exchange)
                    else:
                        await self._pause(exchange)
                if adapted.others:
                    raise Elsewhere
            case "refused":
                await self._refused(replica, adapted, answer, exchange)
            case "not_here":
                await self._unheard(replica, adapted, exchange)
            case _:
                assert_never(answer.status)
        return None

    async def _refused(
        self, replica: Replica, adapted: Adapted, answer: EnsureAnswer, exchange: Exchange
    ) -> NoReturn:
        """Raises Refused or Elsewhere: the adapter's own fault ends the request, the replica's only this try."""
        seeking = adapted.seeking
        log.info(
            "adapter refused",
            extra={
                "adapter": adapted.pin,
                "replica": replica.id,
                "whose": answer.whose,
                "code": answer.code,
                "why": answer.sentence,
                "request": seeking.request_id,
            },
        )
        if answer.whose == "adapter":
            raise Refused(at_fault(seeking.name, answer.sentence))
        now = self._gateway.clock.now()
        if answer.until is None and answer.code not in FOR_GOOD:
            # It knows another version, or its files are on their way: that passes in a moment.
            await self._unheard(replica, adapted, exchange)
        seeking.refused_by(
            replica.id,
            BadAdapter(
                adapter=adapted.entry.adapter.name,
                version=adapted.entry.adapter.version,
                code=answer.code,
                reason=answer.sentence or answer.code or "its agent gave no reason",
                until=answer.until or now + timedelta(seconds=60),
                known=answer.known,
            ),
        )
        raise Elsewhere

    async def _unheard(self, replica: Replica, adapted: Adapted, exchange: Exchange) -> NoReturn:
        """Nobody could say yes or no. Raises Elsewhere, or Refused when that has lasted."""
        seeking = adapted.seeking
        now_s = self._gateway.clock.now_s()
        if seeking.unheard_since_s is None:
            seeking.unheard_since_s = now_s
        elif now_s - seeking.unheard_since_s >= self._gateway.settings.no_decision_s:
            raise Refused(nobody_answers(seeking.name))
        if seeking.put_off(replica.id, adapted.others):
            await self._pause(exchange)
        raise Elsewhere

    # -- questions -------------------------------------------------------------------------------

    def _question(self, replica: Replica, adapted: Adapted, gone: str) -> tuple[bool, _Question]:
        """The open question about this adapter there, and whether it was begun by this call."""
        key = (replica.id, adapted.pin, gone)
        question = self._questions.get(key)
        if question is not None:
            return False, question
        now_s = self._gateway.clock.now_s()
        question = self._questions[key] = _Question(now_s)
        # Before anything is sent: the next beacon lists it.
        held = self._gateway.pins.asking(replica.node, replica.id, adapted.pin, now_s)
        ask = Ensure(
            replica=replica.id,
            adapter=adapted.entry.adapter.name,
            version=adapted.entry.adapter.version,
            gateway=self._gateway.id,
            incarnation=self._incarnation,
            n=self.number,
            gone=gone,
            wait_s=FIRST_ASK_S if adapted.others else ASK_S,
            request=adapted.seeking.request_id,
        )
        task = self._spawn(self._ask(key, question, held, replica.node, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True, question

    async def _ask(
        self, key: _Key, question: _Question, held: Held, node: str, ask: Ensure
    ) -> None:
        gateway = self._gateway
        answer: EnsureAnswer | None = None
        try:
            answer = await self._wire.request(
                RPC, node, ask, EnsureAnswer, timeout_s=ask.wait_s + TRANSIT_S
            )
        except LogError as error:
            gateway.desk.unheard(node, gateway.clock.now_s() - question.asked_s)
            log.warning(
                "agent not heard", extra={"node": node, "adapter": held.pin, "why": str(error)}
            )
        else:
            gateway.desk.heard(node)
            if answer.status == "ready" and not answer.engine_name:
                log.error("agent told no name", extra={"node": node, "adapter": held.pin})
                answer = None
        finally:
            self._questions.pop(key, None)
            if answer is not None and answer.status == "ready":
                gateway.pins.granted(held, answer.engine_name, question.asked_s)
            elif answer is not None and answer.status in ("refused", "not_here"):
                gateway.pins.revoke(ask.replica, held.pin)
            gateway.pins.asked(held, gateway.clock.now_s())
            question.answered(answer)
            self._metrics.adapter_asks.labels("silent" if answer is None else answer.status).inc()

    async def _step_back(self, run: Run, pin: str, exchange: Exchange) -> None:
        """Pauses without a pin: what a person has unloaded leaves once nobody counts on it, and whoever waits for
        that counts too."""
        gateway, replica = self._gateway, run.replica
        assert run.held is not None, "it counts under a pin"
        gateway.pins.end(run.held, gateway.clock.now_s())
        gateway.pins.recall(replica.id, (pin,))
        if gateway.pins.get(replica.id, pin) is None:
            gateway.on_edge(True)
        try:
            await self._pause(exchange)
        finally:
            now_s = gateway.clock.now_s()
            run.held = gateway.pins.begin(replica.node, replica.id, pin, now_s)

    async def _pause(self, exchange: Exchange) -> None:
        waiter: asyncio.Future[EnsureAnswer | None] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(
            PAUSE_S, lambda: waiter.done() or waiter.set_result(None)
        )
        try:
            await self._wait(waiter, exchange)
        finally:
            timer.cancel()

    async def _wait(
        self, waiter: "asyncio.Future[EnsureAnswer | None]", exchange: Exchange
    ) -> EnsureAnswer | None:
        """Until `waiter` is done, the replica is lost (EngineGone) or this gateway ends (Refused)."""
        if self._dismissed:
            raise Refused(leaving())
        exchange.check()

        def lost(_: str) -> None:
            if not waiter.done():
                waiter.set_result(None)

        exchange.bind(lost)
        self._waiting.add(waiter)
        try:
            answer = await waiter
        finally:
            self._waiting.discard(waiter)
            exchange.bind(None)
        exchange.check()
        if self._dismissed:
            raise Refused(leaving())
        return answer

    # -- what comes from outside -----------------------------------------------------------------

    def heard(self, node: str, beacon: AgentBeacon) -> None:
        """An agent's beacon: what it heard of this gateway, and which pins it asks back."""
        gateway = self._gateway
        gateway.desk.heard(node)
        if beacon.heard_from.get(gateway.id) == self._incarnation:
            n = beacon.heard.get(gateway.id)
            if n is not None:
                gateway.pins.heard(node, n)
        dropped = False
        for replica, pins in beacon.recall.items():
            dropped = gateway.pins.recall(replica, pins) or dropped
        if dropped:
            # The agent waits for exactly this beacon before it evicts.
            gateway.on_edge(True)

    def dismiss(self) -> None:
        """This gateway ends: whoever still waits for an adapter is told to come back."""
        self._dismissed = True
        for waiter in list(self._waiting):
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Ends every open question; a load that was asked for goes on without it."""
        for task in list(self._tasks):
            task.cancel()

    @property
    def open_questions(self) -> int:
        return len(self._questions)


def _note(seeking: Seeking, answer: EnsureAnswer, *, is_mine: bool) -> None:
    """Who began the load, and how the adapter came to be there, by an answer to a question that this request was the
    first to ask, or not."""
    if is_mine and answer.how == "loaded":
        seeking.began_load = True
    if answer.status != "ready":
        return
    if seeking.began_load:
        seeking.how = "loaded"
    elif is_mine:
        seeking.how = answer.how
    else:
        seeking.how = "hit" if answer.how == "hit" else "joined"
