"""Asks the control plane to start models that requests wait for, as gateway/domain/demand.py decides.

It answers nobody: when no decision comes it tells the gateway to give up on those who waited. A wish,
once sent, is never taken back: the load is not owned by the request that asked for it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from events.log import EventLog, LogError, Unavailable
from gateway.domain import demand
from gateway.domain.admission import standing_refusal
from gateway.domain.demand import Asked, GiveUp, Hold, Send
from gateway.domain.waitingroom import Key
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from schemas.commands import Command, ModelActivate

log = logging.getLogger("gateway.activator")

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a task that somebody answers for: a TaskGroup's create_task."""

ACTOR = "gateway"

MIN_RESEND_S = 0.05
"""A setting of 0 must not make a loop of it."""


class Activator:
    """One open wish per (model, scope) at most; `close` ends its sends and timers."""

    def __init__(
        self,
        gateway: Gateway,
        events: EventLog,
        metrics: Metrics,
        *,
        new_command_id: Callable[[], str],
        spawn: Spawn,
    ) -> None:
        self._gateway = gateway
        self._events = events
        self._metrics = metrics
        self._new_command_id = new_command_id
        self._spawn = spawn
        self._asked: dict[Key, Asked] = {}
        self._commands: dict[Key, Command] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._sends: dict[Key, tuple[str, asyncio.Task[None]]] = {}

    def look(self, key: Key) -> None:
        """Decides about the demand of one (model, scope) again; cheap, called on every change."""
        gateway = self._gateway
        table = gateway.table
        self._cancel_timer(key)
        if table is None or key[0] not in table.models:
            self._asked.pop(key, None)
            return
        model, scope = key
        now = gateway.clock.now()
        entry = table.activation(model, scope)
        decision = demand.decide(
            entry,
            self._asked.get(key),
            model=model,
            scope=scope,
            oldest_joined_s=gateway.oldest_asking_s(key),
            refused=standing_refusal(table, model, entry, now) is not None,
            reached=not table.routable(model, scope) and table.may_ask_for(scope),
            now_s=gateway.clock.now_s(),
            now=now,
            resend_s=max(gateway.settings.resend_s, MIN_RESEND_S),
            no_decision_s=gateway.settings.no_decision_s,
        )
        match decision:
            case Send(message_id=message_id, asked=asked):
                self._asked[key] = asked
                self._send(key, message_id, asked.rev)
                # The send is under way: what it waits for next is in the same table of cases.
                self.look(key)
            case Hold(until_s=until_s, asked=asked):
                if asked is None:
                    self._asked.pop(key, None)
                else:
                    self._asked[key] = asked
                if until_s is not None:
                    self._timers[key] = asyncio.get_running_loop().call_at(until_s, self.look, key)
            case GiveUp(joined_until_s=joined_until_s):
                # Answering the last of them comes back here through the gateway; those who joined
                # later wait on, with a timer of their own.
                gateway.give_up(key, joined_until_s=joined_until_s)
                if gateway.room.count(key):
                    self.look(key)

    def _send(self, key: Key, message_id: str, rev: int) -> None:
        under_way = self._sends.get(key)
        if under_way is not None:
            if under_way[0] == message_id:
                return  # It is still being retried under the same id.
            under_way[1].cancel()
        self._gateway.asked_for(key)
        self._sends[key] = (message_id, self._spawn(self._publish(key, message_id, rev)))

    async def _publish(self, key: Key, message_id: str, rev: int) -> None:
        model, scope = key
        command = self._commands.get(key)
        wish = ModelActivate(model=model, scope=scope, rev=rev)
        if command is None or command.body != wish:
            command = Command(id=self._new_command_id(), body=wish, ttl_s=float(demand.TTL_S))
            self._commands[key] = command
        self._metrics.activates.inc()
        try:
            seq = await self._events.send(
                ACTOR,
                command,
                message_id=message_id,
                ttl_s=demand.TTL_S,
                traceparent=self._gateway.traceparent_of(key),
            )
        except LogError as error:
            self._metrics.activates_failed.inc()
            level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
            log.log(level, "wish not stored", extra={"model": model, "why": str(error)})
        else:
            log.info(
                "wish stored",
                extra={"model": model, "scope": scope, "rev": rev, "id": message_id, "seq": seq},
            )
        finally:
            mine = self._sends.get(key)
            if mine is not None and mine[0] == message_id:
                del self._sends[key]

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def forget_model(self, model: str) -> None:
        """The catalog has it no more."""
        for key in [k for k in self._commands if k[0] == model]:
            del self._commands[key]
        for key in [k for k in self._asked if k[0] == model]:
            del self._asked[key]

    @property
    def timers(self) -> int:
        return len(self._timers)

    def close(self) -> None:
        for key in list(self._timers):
            self._cancel_timer(key)
        for _, task in self._sends.values():
            task.cancel()
