"""Holds what one gateway knows and has in hand, and turns each change of the table into its effects.

Everything here is synchronous and runs on one loop: a decision and what it reserves (a place in the
waiting room, a count on a replica, an answer owed) is one call that nothing can come between. It does no
I/O: requests, log, engines and files are the affair of the tasks around it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.adapterdesk import Adapted, AdapterDesk, Seeking
from gateway.clock import Clock
from gateway.domain.admission import (
    Route,
    Standing,
    Wait,
    admit,
)
from gateway.domain.affinity import Affinity, first_near, ranked
from gateway.domain.answers import Answer, leaving
from gateway.domain.cards import CardRef
from gateway.domain.pins import Held, Pins
from gateway.domain.routing import (
    NOBODY_ELSE,
    SERVING_PHASES,
    Loss,
    Why,
    choose,
    end_of_answers,
    end_of_drain,
    loss_by_log,
)
from gateway.domain.table import (
    AdapterTouched,
    Change,
    ModelTouched,
    NodeTouched,
    ReplicaChanged,
    SlotsChanged,
    Table,
)
from gateway.domain.turns import BUSY, FULL, Busy
from gateway.domain.usage import Usage
from gateway.domain.waitingroom import Key
from gateway.ejections import Ejections
from gateway.inhand import Asked, Run
from gateway.line import Line
from gateway.waits import Waits
from schemas.model import Model
from schemas.replica import Replica
from schemas.settings import GatewaySettings

RESTED = ("parked", "starting")
"""Phases a replica serves again from, if it ever does; `starting`: also when it resumes."""

_MOST_ORDERS = 4096
"""Of so many conversations it is remembered which replicas they prefer."""

DEFAULT_WAIT_S = GatewaySettings().wait_s


class Gateway:
    """The state of one gateway. Others hand it callbacks: `on_demand(key)` when somebody's wait may need
    a wish to be sent, `on_edge(urgent)` when a beacon is due, `on_suspect(replica)` when a replica must
    be probed before anything is routed there again, `on_stall(replica)` when it was silent for longer than it
    may be, `on_node()` when a node's standing changed,
    `on_model_gone(model)` and
    `on_endpoint_gone(endpoint)` when nothing of them need be kept."""

    def __init__(self, gateway_id: str, settings: GatewaySettings, clock: Clock) -> None:
        self.id = gateway_id
        self.settings = settings
        self.clock = clock
        self.wait_s = settings.wait_s if settings.wait_s > 0 else DEFAULT_WAIT_S
        self.table: Table | None = None
        self.synced = False
        self.stopped: str | None = None
        """What keeps the table from following the log any more, for a person."""
        self.draining = False
        self.is_connected: Callable[[], bool] = lambda: False
        self.others_inflight: Callable[[], Mapping[str, int]] = lambda: NOBODY_ELSE
        self.has_seat: Callable[[str, int, int], bool] = lambda _, ours, limit: ours < limit
        self.on_seat_free: Callable[[], None] = lambda: None
        self.usage = Usage()
        self.desk = AdapterDesk(clock)
        self.waits = Waits(
            self, max_requests=settings.waiting_requests, max_bytes=settings.waiting_bytes
        )
        self.room = self.waits.room
        self.line = Line(
            clock,
            self._attempt,
            max_requests=settings.waiting_requests,
            max_bytes=settings.waiting_bytes,
        )
        self.ejections = Ejections(clock)
        self.ejections.on_probe = lambda replica: self.on_suspect(replica)
        self.on_demand: Callable[[Key], None] = lambda key: None
        self.on_edge: Callable[[bool], None] = lambda urgent: None
        self.on_suspect: Callable[[Replica], None] = lambda replica: None
        self.on_node: Callable[[], None] = lambda: None
        self.on_model_gone: Callable[[str], None] = lambda model: None
        self.on_stall: Callable[[Replica], None] = lambda replica: self.judge(replica, good=False)
        self.on_endpoint_gone: Callable[[str], None] = lambda endpoint: None
        # Who waits, and who sees to them, need to know the gateway alone.
        self.join = self.waits.join
        self.leave = self.waits.leave
        self.asked_for = self.waits.asked_for
        self.give_up = self.waits.give_up
        self.oldest_asking_s = self.waits.oldest_asking_s
        self.traceparent_of = self.waits.traceparent_of
        self._runs: dict[str, set[Run]] = {}
        # Routes that were found, by names and paths of the table, until anything changes that they depend on: the table
        # and who refused a connection.
        self._routes: dict[tuple[str, str], Route] = {}
        self._routed_without: frozenset[str] = frozenset()
        self._orders: dict[int, tuple[tuple[Replica, ...], Sequence[Replica]]] = {}

    @property
    def ejected(self) -> Mapping[str, Loss | str]:
        """Replicas that did not answer, and how."""
        return self.ejections.refused

    @property
    def pins(self) -> Pins:
        """The adapters this gateway counts on."""
        return self.desk.pins

    # -- requests --------------------------------------------------------------------------------

    def standing(self, *, draining: bool = False) -> Standing:
        return Standing(
            synced=self.synced,
            # What is decided from now on is not seen here: nobody waits for it.
            connected=self.stopped is None and self.is_connected(),
            draining=draining,
            ejected=self.ejections.refused_ids,
        )

    def admit(
        self, name: str, path: str, *, accepted: bool, on: CardRef | None = None
    ) -> Route | Wait | Answer:
        """What happens to a request (under the base URL of the card `on`) now; nothing is reserved yet.

        `accepted`: it was let in before, so a gateway that ends still serves it.
        """
        plain = on is None and (accepted or not self.draining)
        if plain:
            refused = self.ejections.refused_ids
            if refused is not self._routed_without:
                self._routes.clear()
                self._routed_without = refused
            route = self._routes.get((name, path))
            if route is not None:
                return route
        standing = self.standing(draining=self.draining and not accepted)
        decision = admit(self.table, name, path, standing, self.clock.now(), on=on)
        if plain and isinstance(decision, Route):
            self._routes[name, path] = decision
        return decision

    def scope_known(self, on: CardRef | None) -> str:
        """The scope of a card that is there, for logs and labels; empty for none and for made-up ones."""
        table = self.table
        if on is None or table is None or table.card(on) is None:
            return ""
        return on.scope

    def start(
        self,
        route: Route,
        abort: Callable[[str], None],
        seeking: Seeking | None = None,
        *,
        affinity: Callable[[], Affinity | None] | None = None,
        has_turn: bool = False,
        needs_seat: bool = True,
    ) -> Run | Answer | Busy:
        """Chooses a replica of the route and counts the request on it, in one step.

        For an adapter it is counted under its pin there too, before anybody is asked: so nothing stops that
        replica meanwhile. Then there may be none that would take it. Where the model has a `concurrency` only
        replicas with a free seat take it, and it is nobody's turn but the line's (`has_turn`) while there is one.
        """
        held: Held | None = None
        adapted: Adapted | None = None
        candidates = route.candidates
        if needs_seat:
            candidates = self.ejections.outliers.without(candidates)
        limit = route.model.concurrency
        if limit and needs_seat:
            if not has_turn and self.line.has(route.model.name):
                return BUSY
            running = self.usage.by_replica
            candidates = tuple(
                [r for r in candidates if self.has_seat(r.id, running.get(r.id, 0), limit)]
            )
            if not candidates:
                return FULL if has_turn and self._is_full(route.model) else BUSY
        why: Why = "only"
        if route.adapter is None and len(candidates) == 1:
            replica = candidates[0]
        elif route.adapter is None:
            inflight, others = self.usage.by_replica, self.others_inflight()
            tie = None if affinity is None else affinity()
            if tie is not None:
                replica, why = first_near(self._ranked(candidates, tie), inflight, others), tie.by
            else:
                least = choose(candidates, inflight, key=self.id, others=others)
                assert least is not None, "a route has candidates"
                replica, why = least, "least-loaded"
        else:
            assert self.table is not None, "an adapter is found in a table"
            assert seeking is not None, "a request for an adapter says what it has met"
            chosen = self.desk.choose(
                route.adapter,
                candidates,
                seeking,
                self.table.adapters,
                self.usage.by_replica,
                connected=self.is_connected(),
            )
            if isinstance(chosen, Answer):
                return chosen
            replica, held, adapted = chosen
            why = "adapter"
        run = Run(
            route.model.name, replica, abort, held=held, adapted=adapted, why=why, shares=limit > 0
        )
        self._count(run)
        return run

    def start_hit(self, route: Route, abort: Callable[[str], None]) -> Run | None:
        """The same for a request for an adapter that has met nothing so far, where one replica alone has it loaded and
        nobody need be asked; None: `start` has to look further.
        """
        table = self.table
        assert table is not None, "an adapter is found in a table"
        if route.model.concurrency or self.ejections.outliers or not self.is_connected():
            return None
        found = self.desk.hit(route, table.adapters, self.usage.by_replica)
        if found is None:
            return None
        replica, held = found
        run = Run(route.model.name, replica, abort, held=held, why="adapter")
        self._count(run)
        return run

    def _count(self, run: Run) -> None:
        replica = run.replica
        runs = self._runs.get(replica.id)
        if runs is None:
            runs = self._runs[replica.id] = set()
        runs.add(run)
        if self.usage.begin(run.model, replica.id):
            self.on_edge(False)

    def _ranked(self, candidates: tuple[Replica, ...], tie: Affinity) -> Sequence[Replica]:
        """Kept for the conversations of late, as long as a route has the same candidates."""
        kept = self._orders.get(tie.key)
        if kept is not None and kept[0] is candidates:
            return kept[1]
        if len(self._orders) >= _MOST_ORDERS:
            self._orders.clear()
        order = ranked(candidates, tie)
        self._orders[tie.key] = (candidates, order)
        return order

    def finish(self, run: Run, *, used: bool) -> None:
        """Ends what `start` counted. `used`: the client got an answer from it."""
        now_s, held = self.clock.now_s(), run.held
        if held is not None:
            pins = self.desk.pins
            pins.end(held, now_s)
            if pins.is_asked(run.replica.id) and held.is_idle:
                # Another adapter waits for a place there, perhaps for this one.
                self.on_edge(False)
        runs = self._runs[run.replica.id]
        runs.discard(run)
        if not runs:
            del self._runs[run.replica.id]
        edge = self.usage.end(run.model, run.replica.id, now_s, used=used)
        if edge:
            table = self.table
            known = None if table is None else table.replicas.get(run.replica.id)
            self.on_edge(known is None or known.phase == "draining")
        if self.line:
            self.line.look(run.model, changed=False)
        if run.shares:
            self.on_seat_free()

    def _is_full(self, model: Model) -> bool:
        """Whether no replica of a model with a `concurrency` has a free seat."""
        running, table = self.usage.by_replica, self.table
        ready = () if table is None else table.routable(model.name)
        return not any(self.has_seat(r.id, running.get(r.id, 0), model.concurrency) for r in ready)

    def _attempt(self, asked: Asked) -> Run | Answer | Busy | None:
        """Begins a run for a request whose turn it is, admitted as if it came now."""
        decision = self.admit(asked.name, asked.path, accepted=True, on=asked.on)
        if isinstance(decision, Answer):
            return decision
        if isinstance(decision, Wait) or (decision.adapter is not None and asked.seeking is None):
            # No replica serves it now, or its name has become an adapter's.
            return None
        return self.start(
            decision, asked.abort, asked.seeking, affinity=asked.affinity, has_turn=True
        )

    @property
    def open_tickets(self) -> int:
        """How many requests wait for a model to run."""
        return self.waits.open_tickets

    def waiting(self, scope: str | None = None) -> dict[str, int]:
        """How many requests wait for each model, or for a turn at it; in one scope only the former."""
        counts = self.room.by_model(scope)
        if scope is None and self.line:
            for model, count in self.line.by_model().items():
                counts[model] = counts.get(model, 0) + count
        return counts

    def suspect(self, replica: Replica, loss: Loss) -> None:
        """Routes nothing to this replica until a probe passed: it refused, broke or was another launch."""
        known = None if self.table is None else self.table.replicas.get(replica.id)
        if known is None or known.endpoint != replica.endpoint or known.phase not in SERVING_PHASES:
            return  # The log knows already that this launch is over, or parked.
        self.ejections.refuse(replica, loss)
        self.on_suspect(replica)
        self.line.look(replica.model)

    def judge(self, replica: Replica, *, good: bool) -> None:
        """It answered a request as an engine should, or failed it: who fails often is left out for a while."""
        if good:
            self.ejections.outliers.good(replica.id)
            return
        table = self.table
        if table is not None and replica.id in table.replicas:
            self.ejections.judge(replica, table.routable(replica.model), good=False)

    def why_broke(self, replica_id: str) -> str | None:
        """Why an answer of this replica broke off, when it was asked to leave; None: nobody asked it."""
        known = None if self.table is None else self.table.replicas.get(replica_id)
        return end_of_drain(known, replica_id)

    def trust(self, replica_id: str) -> None:
        """A probe passed, or the replica is over: routing follows the log again."""
        if not self.ejections.passed(replica_id):
            return
        replica = None if self.table is None else self.table.replicas.get(replica_id)
        if replica is not None:
            self.waits.settle_model(replica.model)
            self.line.look(replica.model)

    # -- changes of the table --------------------------------------------------------------------

    def install(self, table: Table, *, synced: bool) -> None:
        """Swaps the table; requests at replicas that the new one does not know are routed again."""
        before = self.table
        # A log that was replaced is no reason to let in who was not let in before.
        table.keys.had_any = before is not None and before.keys.any
        self.table = table
        self.synced = synced
        self._routes.clear()
        for replica_id in list(self._runs):
            self._abort_lost(replica_id, table.replicas.get(replica_id))
        for replica in table.replicas.values():
            if replica.phase in RESTED:
                self._rested(replica)
        ejected = {*self.ejections.refused, *self.ejections.outliers.until_s}
        for replica_id in ejected - table.replicas.keys():
            self.ejections.over(replica_id)
        self._recheck()
        if before is not None:
            for replica_id in before.replicas.keys() - table.replicas.keys():
                self.desk.replica_over(replica_id)
            for replica_id, places in before.adapters.places.items():
                after = table.adapters.places.get(replica_id)
                self.desk.places_changed(replica_id, places, after)
        keys = self.waits.settle_all()
        # What became of adapters meanwhile is in the table and in no event.
        self.waits.refuse_adapters({model for model, _ in keys})
        self.line.look_all()
        for model in () if before is None else before.models.keys() - table.models.keys():
            self.on_model_gone(model)
        self.on_edge(True)

    def stop_reading(self, why: str) -> None:
        """The table does not follow the log any more: what it knows goes on serving, like a snapshot's. What it does
        not know may be there, no event is confirmed, and nothing is loaded that nobody here would see come."""
        self.stopped = why
        self.synced = False
        self._routes.clear()

    def apply(self, changes: Iterable[Change], *, position: int) -> None:
        """Carries out what a batch of events changed, after all of it is in the table.

        1. requests without a byte at a replica that ended or was parked are taken back, those at others
           stay. Each event counts: within one batch a replica may be parked and ready again
        2. whoever waits for a touched model is released, answered, or waits on
        3. a drain is confirmed at once: the beacon carries a position behind that event
        4. of a parked one nothing is kept: it comes back proven, and not over an old connection
        5. an adapter that is loaded no more is nobody's hit; who waits for one that nobody may load now is
           answered
        """
        table = self.table
        assert table is not None, "changes come after a table"
        table.advance(position)
        self._routes.clear()
        touched: set[str] = set()
        bases: set[str] = set()
        everybody = False
        draining = False
        for change in changes:
            match change:
                case ReplicaChanged(before=before, after=after):
                    known = after or before
                    if known is None:
                        continue
                    touched.add(known.model)
                    draining = draining or (after is not None and after.phase == "draining")
                    self._abort_lost(known.id, after)  # 1
                    if after is not None and after.phase in RESTED:
                        self._rested(after)  # 4
                    if known.id not in table.replicas:
                        self._over(known.id)
                        if known.endpoint is not None:
                            self.on_endpoint_gone(known.endpoint)
                    if after is not None and after.phase == "failed":
                        self.waits.failed(after, change.seq)
                case ModelTouched(model=model):
                    touched.add(model)
                    if model not in table.models:
                        self._forget_model(model)
                case AdapterTouched(base=base):
                    bases.add(base)
                case SlotsChanged(replica=replica_id, before=before, after=after):
                    self.desk.places_changed(replica_id, before, after)  # 5
                case NodeTouched():
                    everybody = True
                    self.on_node()
        self._recheck()
        if everybody:
            self.waits.settle_all()  # 2
        else:
            self.waits.settle_models(touched)  # 2
        if bases:
            self.waits.refuse_adapters(bases)  # 5
        if self.line:
            for model in self.line.by_model():
                if everybody or model in touched or model in bases:
                    self.line.look(model)  # 2
        if draining:
            self.on_edge(True)  # 3

    def _abort_lost(self, replica_id: str, after: Replica | None) -> None:
        """What has no byte is taken back; a begun answer ends with the sentence in it."""
        for run in list(self._runs.get(replica_id, ())):
            loss = loss_by_log(after, run.replica)
            if loss is None or run.lost is not None:
                continue
            if not run.has_byte:
                run.lost = loss
                run.abort(f"the replica {replica_id} is no longer this launch ({loss})")
                continue
            why = end_of_answers(after, replica_id)
            if why is not None:
                run.lost = loss
                run.abort(why)

    def _rested(self, replica: Replica) -> None:
        """A replica was parked: every connection to it is of the past."""
        self._over(replica.id)
        if replica.endpoint is not None:
            self.on_endpoint_gone(replica.endpoint)

    def _over(self, replica_id: str) -> None:
        """The launch is over, or parked: what was suspected of it is of the past."""
        self.ejections.over(replica_id)
        self.desk.replica_over(replica_id)

    def _recheck(self) -> None:
        """Never more than half of a model's replicas are left out for their answers, however many are ready now."""
        table = self.table
        outliers = self.ejections.outliers
        if table is None or not outliers:
            return
        for model in {table.replicas[r].model for r in outliers.until_s if r in table.replicas}:
            self.ejections.recheck(table.routable(model))

    def _forget_model(self, model: str) -> None:
        self.usage.forget_model(model)
        self.on_model_gone(model)

    # -- the end ---------------------------------------------------------------------------------

    def dismiss_all(self) -> None:
        """This gateway ends: whoever still waits is told to come back."""
        self.waits.dismiss_all()
        self.line.dismiss_all(leaving())

    def close(self) -> None:
        """Releases every timer."""
        self.waits.close()
        self.ejections.close()
