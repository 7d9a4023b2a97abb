"""What yardctl changes of API keys: creates, changes and revokes them.

A key's secret is made here, shown once, and told to nobody else: the command carries its hash. It never goes into
an argument, a log line or the text of an error.
"""

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from controlplane.ctl.commanding import carry_out
from controlplane.ctl.connect import Place, open_api, open_connection, open_log
from controlplane.ctl.failures import CtlError, NotKnownYet, SentPerhaps
from controlplane.ctl.gatewaysheard import GatewaysHeard, Reached, Silent
from controlplane.ctl.newkey import NewKey, make_key
from controlplane.ctl.show import length, print_json
from events.log import EventLog, LogError
from events.subjects import event_subject
from schemas.commands import KeyChange, KeyCreate, KeyRevoke, Outcome

SHOWN_ONCE: Final = "this is the only time it is shown; the yard knows its hash alone"


async def create(place: Place, body: KeyCreate, timeout_s: float, output: str) -> None:
    """Creates a key of the given name and rights and prints it; id and hash of `body` are put in here.

    Raises as `carry_out`. When it is not known whether the key was created, it is printed all the same.
    """
    async with open_log(place) as log:
        await create_on(log, body, make_key(), timeout_s, output, prefix=place.prefix)


async def create_on(
    log: EventLog,
    body: KeyCreate,
    key: NewKey,
    timeout_s: float,
    output: str,
    *,
    prefix: str = "yard",
) -> None:
    """As `create`, on an open log.

    1. accepted: the key is printed; 2. perhaps: too, with how to find out; 3. no: it is not; 4. somebody lost his
    patience: what may have come of it is told, the secret is not.
    """
    body = replace(body, id=key.id, hash=key.hash())
    try:
        outcome = await carry_out(log, body, prefix=prefix, timeout_s=timeout_s)
    except (NotKnownYet, SentPerhaps) as error:  # 2
        _show(key, body.name, None, output)
        raise type(error)(
            *error.lines,
            "the key printed above may or may not be valid, now or in a minute",
            *_ways(key.id),
        ) from None
    except CtlError:  # 3
        raise
    except BaseException:  # 4
        _tell(f"whether the key {key.id} was created is not known; nobody has its secret")
        _tell(*_ways(key.id))
        raise
    _show(key, body.name, outcome, output)  # 1
    _tell(outcome.sentence, *outcome.lines, SHOWN_ONCE)


def _ways(id: str) -> tuple[str, str]:
    return f"find out: yardctl key show {id}", f"or end it: yardctl key revoke {id}"


def _tell(*lines: str) -> None:
    """To a person, beside the key on stdout."""
    for line in lines:
        print(line, file=sys.stderr)


def _show(key: NewKey, name: str, outcome: Outcome | None, output: str) -> None:
    """Prints the key. Raises CtlError when it cannot be written: it is valid then, and nobody has it."""
    try:
        if output == "json":
            told = None if outcome is None else msgspec.to_builtins(outcome)
            print_json({"id": key.id, "name": name, "key": key.text(), "outcome": told})
        else:
            print(key.text())
        sys.stdout.flush()
    except OSError as error:
        # What could not be written is written once more at the end of the program, and would fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CtlError(
            f"the key {key.id} could not be written ({error.strerror}), and nobody has its secret",
            f"end it: yardctl key revoke {key.id}",
        ) from None


async def change(place: Place, body: KeyChange, timeout_s: float, output: str) -> None:
    """Changes what is given of a key. Raises as `carry_out`."""
    async with open_log(place) as log:
        outcome = await carry_out(log, body, prefix=place.prefix, timeout_s=timeout_s)
    if output == "json":
        print_json(msgspec.to_builtins(outcome))
        return
    for line in (outcome.sentence, *outcome.lines):
        print(line)


async def revoke(place: Place, said: str, timeout_s: float, output: str) -> None:
    """Revokes the key with this id or name and says which gateways refuse it already.

    Raises as `carry_out`, and NotKnownYet when one of them has not read of it in time.
    """
    from events.jetstream import JetStreamLog, JetStreamWire

    async with open_connection(place) as connection:
        log = JetStreamLog(connection, source="/ctl")
        gateways = GatewaysHeard(JetStreamWire(connection))

        async def known() -> Mapping[str, float] | None:
            try:
                async with open_api(place) as api:
                    return heard_by(await api.get("/v1/doctor"))
            except CtlError:
                return None

        await revoke_on(log, gateways, said, timeout_s, output, prefix=place.prefix, known=known)


def heard_by(doctor: Mapping[str, Any]) -> dict[str, float]:
    """Gateways a control plane has heard, and how long ago, by what it told."""
    return {one["name"]: float(one["silent_s"]) for one in doctor.get("gateways", ())}


async def _nobody() -> Mapping[str, float] | None:
    return {}


async def revoke_on(
    log: EventLog,
    gateways: GatewaysHeard,
    said: str,
    timeout_s: float,
    output: str,
    *,
    prefix: str = "yard",
    known: Callable[[], Awaitable[Mapping[str, float] | None]] = _nobody,
) -> None:
    """As `revoke`, on an open log. It listens to gateways before it asks, so that none is missed.

    `known` tells which gateways a control plane has heard, and how long ago; None: it could not be asked.
    """
    async with gateways:
        outcome = await carry_out(log, KeyRevoke(key=said), prefix=prefix, timeout_s=timeout_s)
        others = await known()
        try:
            found = await gateways.reached(await _seq_of(log, outcome, prefix), others)
        except LogError as error:
            raise NotKnownYet(
                outcome.sentence, f"how many gateways refuse it is not known: {error}"
            ) from error
    if output == "json":
        told: dict[str, Any] = msgspec.to_builtins(outcome)
        print_json({**told, "gateways": msgspec.to_builtins(found)})
    else:
        print(outcome.sentence)
        for line in _refusing(found, asked=others is not None):
            print(line)
    if found.behind:
        count = f"{len(found.behind)} of {len(found.behind) + len(found.known_to)}"
        raise NotKnownYet(
            f"{count} gateways have not read of it yet: {', '.join(found.behind)}",
            f"ask again: yardctl key revoke {said}",
        )


async def _seq_of(log: EventLog, outcome: Outcome, prefix: str) -> int:
    """The position of the key's last event; 0 when it ended meanwhile. Raises LogError."""
    of_keys = event_subject("key", prefix=prefix) + "."
    for ref in outcome.refs:
        if ref.startswith(of_keys):
            last = await log.last(ref)
            return last.seq if last is not None else 0
    return 0


def _refusing(found: Reached, *, asked: bool) -> list[str]:
    """`asked`: a control plane told which gateways there are besides those that are heard."""
    everyone = len(found.known_to) + len(found.behind)
    if not everyone:
        lines = ["no gateway is heard; one that starts reads of it before it answers"]
    elif not found.known_to:
        lines = [f"refused on 0 of {everyone} gateways so far"]
    else:
        who = ", ".join(found.known_to)
        lines = [f"refused on {len(found.known_to)} of {everyone} gateways: {who}"]
    if found.silent:
        many = "1 gateway does" if len(found.silent) == 1 else f"{len(found.silent)} gateways do"
        lines.append(
            f"{many} not answer: {', '.join(map(_silence, found.silent))}; one that hangs or is cut off from NATS refuses "
            "the key only when it has read of it"
        )
    if not asked:
        lines.append(
            "whether there are others that do not answer is not known: no control plane told"
        )
    return lines


def _silence(one: Silent) -> str:
    gone = f"gone in {one.gone_in_s:.0f} s" if one.gone_in_s > 0 else "counts as gone"
    return f"{one.name} (heard {length(one.silent_s)} ago, {gone})"


__all__ = ["change", "create", "revoke"]
