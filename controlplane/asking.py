"""Asks the decision function for one term's next step, and keeps what it was asked with until that is dealt with.

It neither stores a decision nor judges one. A command or a report the function fails at, or whose decision no
log could store, is set aside here, so that it does not stop all the others.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from controlplane.alarms import Alarms
from controlplane.commandqueue import CommandQueue
from controlplane.domain.decision import Decision, Ids, Live, Step
from controlplane.domain.reports import Report
from controlplane.domain.world import World
from controlplane.metrics import Metrics
from controlplane.workers import Workers
from events.log import StoredCommand
from schemas.commands import Outcome
from schemas.settings import ControlplaneSettings

log = logging.getLogger(__name__)


class NextDecision(Protocol):
    """The decision function: `controlplane.domain.step.next_decision`, or a test's own."""

    def __call__(
        self,
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step: ...


class Asking:
    """The questions of one term. `commands` are that term's; without `workers` there are no reports."""

    def __init__(
        self,
        decide: NextDecision,
        commands: CommandQueue,
        workers: Workers | None,
        *,
        ids: Ids,
        settings: ControlplaneSettings,
        now: Callable[[], datetime],
        alarms: Alarms,
        metrics: Metrics,
    ) -> None:
        self._decide = decide
        self._commands = commands
        self._workers = workers
        self._ids = ids
        self._settings = settings
        self._now = now
        self._alarms = alarms
        self._metrics = metrics
        self._poison: int | None = None
        """The command whose decision no log could store."""
        self.deciding: Report | None = None
        """The report dealt with by the decision that is being stored."""

    def next_step(self, world: World, live: Live) -> Step | None:
        """The next step, or None when the decision function failed and a pause is due."""
        offered = self._offered(world)
        if offered and offered[0].seq == self._poison:
            return self._refusal(offered[0])
        reports = self._workers.offered() if self._workers is not None else ()
        try:
            with self._metrics.decide_s.time():
                step = self._ask(world, live, offered, reports)
        except Exception as error:  # noqa: BLE001 - one fault must not stop all decisions
            return self._isolate(world, live, offered, reports, error)
        self._alarms.down("decision_failed")
        return step

    def position(self, consumed: StoredCommand | None) -> int:
        """How far the commands are dealt with once `consumed` is."""
        return self._commands.position(consumed)

    def settle(self, command: StoredCommand | None) -> None:
        """What was to be done about `command` is done."""
        if command is not None:
            self._commands.settle(command)

    def settle_report(self, report: Report | None) -> None:
        """What was to be done about `report` is done."""
        self.deciding = None
        if report is not None and self._workers is not None:
            self._workers.settle(report)

    def set_aside(self, command: StoredCommand | None) -> bool:
        """The decision that was being stored is one no log can store. Whether to ask again at once.

        A command is refused next; one whose refusal cannot be stored either is dropped. A report's task
        failed, as far as whoever waits for it is concerned.
        """
        report, self.deciding = self.deciding, None
        if report is not None and self._workers is not None:
            self._workers.spoil(report)
        if command is None:
            return False
        log.error("a command cannot be carried out", extra={"seq": command.seq, "id": command.id})
        if command.seq == self._poison:
            self.settle(command)
        self._poison = command.seq
        return True

    def _ask(
        self,
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        reports: Sequence[Report],
    ) -> Step:
        return self._decide(
            world, live, commands, self._now(), self._ids, self._settings, reports=reports
        )

    def _offered(self, world: World) -> tuple[StoredCommand, ...]:
        """Commands still to be decided; one whose outcome is known already had its effect."""
        while offered := self._commands.offered():
            known = [c for c in offered if c.id is not None and c.id in world.outcomes]
            if not known:
                break
            for command in known:
                self.settle(command)
        return offered

    def _isolate(
        self,
        world: World,
        live: Live,
        offered: Sequence[StoredCommand],
        reports: Sequence[Report],
        error: Exception,
    ) -> Step | None:
        """Finds out whether the oldest command or report makes the decision function fail.

        Such a command is refused; of such a report the task failed.
        """
        log.error("a decision failed", exc_info=error)
        self._alarms.up("decision_failed", f"the decision function failed: {error!r}")
        if reports and self._workers is not None and self._works(world, live, offered):
            self._workers.spoil(reports[0])
            return None
        if offered and self._works(world, live, ()):
            return self._refusal(offered[0])
        return None

    def _works(self, world: World, live: Live, commands: Sequence[StoredCommand]) -> bool:
        """Whether the decision function answers when it is asked about these commands and no report."""
        try:
            self._ask(world, live, commands, ())
        except Exception:  # noqa: BLE001 - then it fails of something else, or not of that alone
            return False
        return True

    def _refusal(self, poison: StoredCommand) -> Step:
        """The step that refuses a command this version fails at; without an id it is only settled."""
        if poison.id is None or poison.name == "model.activate":
            return Step(consumed=poison)
        return Step(
            consumed=poison,
            decision=Decision(
                changes=(),
                what=f"{poison.name} refused: it could not be decided",
                cause=poison.id,
                actor=poison.actor,
                outcome=Outcome(
                    id=poison.id,
                    actor=poison.actor,
                    name=poison.name,
                    status="rejected",
                    at=self._now(),
                    code="internal",
                    sentence="the control plane failed to decide this command; its log has the reason",
                ),
            ),
        )
