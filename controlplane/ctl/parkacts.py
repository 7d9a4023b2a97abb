"""`yardctl replica park` and `resume`: sends the command and on wish follows the replica until it is so.

The wish to wait is a limit in seconds, None for not waiting.
"""

import asyncio
from collections.abc import Callable

from msgspec import to_builtins

from controlplane.ctl.acts import tell
from controlplane.ctl.commanding import carry_out
from controlplane.ctl.connect import Place, open_log
from controlplane.ctl.failures import CtlError, NotKnownYet
from controlplane.ctl.show import console, print_json
from controlplane.ctl.tail import pretty
from events.log import EventLog, Recorded
from events.subjects import encode_token
from schemas.commands import Outcome, ReplicaPark, ReplicaResume
from schemas.replica import TERMINAL_PHASES, Replica, ReplicaParked

Reached = Callable[[Recorded, Replica], str | None]
"""The sentence to end with once it is so; raises CtlError when it never will be."""


async def park(
    place: Place, replica: str, timeout_s: float, wait_s: float | None, output: str
) -> None:
    await _act(place, ReplicaPark(replica=replica), timeout_s, wait_s, output, is_parked())


async def resume(
    place: Place, replica: str, timeout_s: float, wait_s: float | None, output: str
) -> None:
    await _act(place, ReplicaResume(replica=replica), timeout_s, wait_s, output, is_resumed)


def is_parked() -> Reached:
    """A fresh one for each wait: it remembers whether the replica drained meanwhile."""
    drained = False

    def reached(item: Recorded, replica: Replica) -> str | None:
        nonlocal drained
        if replica.phase == "parked":
            return f"{replica.id}: parked"
        if replica.phase in TERMINAL_PHASES:
            raise CtlError(f"{replica.id}: {replica.phase} instead: {_why(replica, item)}")
        if replica.phase == "ready" and drained:
            raise CtlError(f"{replica.id}: serves on: {_why(replica, item)}")
        drained = drained or replica.phase == "draining"
        return None

    return reached


def is_resumed(item: Recorded, replica: Replica) -> str | None:
    if replica.phase == "ready":
        return f"{replica.id}: ready"
    if replica.phase in TERMINAL_PHASES:
        raise CtlError(f"{replica.id}: {replica.phase} instead: {_why(replica, item)}")
    if isinstance(item.event, ReplicaParked) and item.event.refused:
        raise CtlError(f"{replica.id}: stays parked: {_why(replica, item)}")
    return None


def _why(replica: Replica, item: Recorded) -> str:
    return (
        item.reason or replica.reason or replica.last_line or replica.code or "no reason was told"
    )


async def _act(
    place: Place,
    body: ReplicaPark | ReplicaResume,
    timeout_s: float,
    wait_s: float | None,
    output: str,
    reached: Reached,
) -> None:
    async with open_log(place) as log:
        outcome = await carry_out(log, body, prefix=place.prefix, timeout_s=timeout_s)
        if output == "table":
            tell(outcome)
        if wait_s is not None:
            out = console()

            def show(item: Recorded) -> None:
                if output == "table":
                    out.print(pretty(item), soft_wrap=True)

            said = await watch(
                log, body.replica, reached, show, prefix=place.prefix, timeout_s=wait_s
            )
            if output == "table":
                print(said)
        if output == "json":
            print_json(_of(outcome))


def _of(outcome: Outcome) -> dict[str, object]:
    return to_builtins(outcome)


async def watch(
    log: EventLog,
    replica: str,
    reached: Reached,
    show: Callable[[Recorded], None],
    *,
    prefix: str,
    timeout_s: float,
) -> str:
    """Shows what becomes of a replica until `reached` gives a sentence, and returns that.

    Raises NotKnownYet when `timeout_s` ends first; `reached` may raise CtlError itself.
    """
    follower = log.follow([f"{prefix}.evt.replica.*.{encode_token(replica)}"])
    synced = False
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                batch = await follower.next()
                for item in batch.items:
                    if not isinstance(item, Recorded) or not isinstance(item.state, Replica):
                        continue
                    if synced:
                        show(item)
                    if (sentence := reached(item, item.state)) is not None:
                        return sentence
                synced = synced or batch.synced
    except TimeoutError:
        raise NotKnownYet(
            f"{replica}: not there after {timeout_s:g} s; it goes on: "
            f"yardctl events -f 'replica.*.{replica}'"
        ) from None
    finally:
        await follower.close()
