"""What yardctl changes of LoRA adapters in the catalog: adds, removes and pins them, and watches one come.

Where they are loaded is its agents' to change: adapterslots.py asks those.
"""

import msgspec

from controlplane.ctl.acts import tell
from controlplane.ctl.adapterwatch import watch_on
from controlplane.ctl.commanding import carry_out
from controlplane.ctl.connect import Place, open_connection, open_log
from controlplane.ctl.failures import CtlError
from controlplane.ctl.show import console, print_json
from events.log import EventLog, Wire
from schemas.commands import AdapterAdd, AdapterPin, AdapterRemove


async def add(
    place: Place, body: AdapterAdd, timeout_s: float, wait_s: float | None, output: str
) -> None:
    """Adds one and, unless `wait_s` is None, stays until it is ready.

    With `-o json` only the state it ended in is printed. Raises AdapterRefused, and as `carry_out`.
    """
    from events.jetstream import JetStreamLog, JetStreamWire

    async with open_connection(place) as connection:
        log = JetStreamLog(connection, source="/ctl")
        wire = JetStreamWire(connection)
        await add_on(log, wire, body, timeout_s, wait_s, output, prefix=place.prefix)


async def add_on(
    log: EventLog,
    wire: Wire,
    body: AdapterAdd,
    timeout_s: float,
    wait_s: float | None,
    output: str,
    *,
    prefix: str = "yard",
) -> None:
    """As `add`, on an open log and wire."""
    outcome = await carry_out(log, body, prefix=prefix, timeout_s=timeout_s)
    if output == "table":
        tell(outcome)
    if wait_s is None:
        if output == "json":
            print_json(msgspec.to_builtins(outcome))
        return
    # With JSON on stdout the course goes where a person may still read it.
    out = console(stderr=output == "json")
    try:
        found = await watch_on(log, wire, body.name, out, prefix=prefix, timeout_s=wait_s)
    except CtlError:
        # It says itself how it ended: ready it will not be, or not in this time.
        raise
    except BaseException:
        # Ctrl-C, or a connection that is lost for good.
        console(stderr=True).print(f"it goes on: yardctl adapter show {body.name}")
        raise
    if output == "json":
        print_json(msgspec.to_builtins(found))


async def remove(place: Place, name: str, timeout_s: float) -> None:
    await _act(place, AdapterRemove(adapter=name), timeout_s)


async def pin(place: Place, name: str, timeout_s: float, *, pinned: bool) -> None:
    await _act(place, AdapterPin(adapter=name, pinned=pinned), timeout_s)


async def _act(place: Place, body: AdapterRemove | AdapterPin, timeout_s: float) -> None:
    async with open_log(place) as log:
        outcome = await carry_out(log, body, prefix=place.prefix, timeout_s=timeout_s)
    # What was decided, then what follows from it in each replica.
    for line in (outcome.sentence, *outcome.lines):
        print(line)
