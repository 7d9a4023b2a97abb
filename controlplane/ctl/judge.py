"""Judges what `yardctl doctor` gathered: each check is well, a warning, or a fault with what to do.

Pure: it asks nobody and knows no clock.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

from msgspec import Struct

from controlplane.ctl.show import size

OLDEST_SERVER: Final = (2, 12, 3)
SKEW_WARN_S: Final = 2.0

Verdict = Literal["ok", "warn", "fail"]


class Stream(Struct, frozen=True, kw_only=True):
    """One stream of the server. `limit_bytes` -1: none."""

    name: str
    replicas: int
    used_bytes: int
    limit_bytes: int


class NatsFacts(Struct, frozen=True, kw_only=True):
    """What the server's monitoring port told."""

    version: str
    jetstream: bool
    sync_always: bool
    store_dir: str = ""
    max_store_bytes: int = 0
    used_store_bytes: int = 0
    free_bytes: int | None = None
    streams: tuple[Stream, ...] = ()


class Facts(Struct, frozen=True, kw_only=True):
    """None where a part was not asked or did not answer; `*_error` says why in the second case."""

    nats_version: str | None = None
    nats_error: str | None = None
    doctor: dict[str, Any] | None = None
    api_error: str | None = None
    monitoring: NatsFacts | None = None
    skew_s: float | None = None
    gateway_ready: bool | None = None
    gateway_error: str | None = None
    loose_secrets: tuple[str, ...] = ()


class Check(Struct, frozen=True, kw_only=True):
    """One line of the report."""

    name: str
    verdict: Verdict
    sentence: str


def judge(facts: Facts) -> tuple[Check, ...]:
    """Every check in the order of the report."""
    return (
        *_nats(facts),
        *_durability(facts.monitoring),
        *_clock(facts.skew_s),
        *_controlplane(facts),
        *_gateway(facts),
        *_secrets(facts.loose_secrets),
    )


def _ok(name: str, sentence: str) -> Check:
    return Check(name=name, verdict="ok", sentence=sentence)


def _warn(name: str, sentence: str) -> Check:
    return Check(name=name, verdict="warn", sentence=sentence)


def _fail(name: str, sentence: str) -> Check:
    return Check(name=name, verdict="fail", sentence=sentence)


def version_of(text: str) -> tuple[int, ...] | None:
    """`2.15.1-RC.2` -> (2, 15, 1); None when it is no version."""
    try:
        return tuple(int(part) for part in text.removeprefix("v").split("-")[0].split("."))
    except ValueError:
        return None


def _nats(facts: Facts) -> Iterator[Check]:
    if facts.nats_version is None:
        yield _fail("nats", facts.nats_error or "it was not asked")
        return
    found = version_of(facts.nats_version)
    oldest = ".".join(map(str, OLDEST_SERVER))
    if found is None or found < OLDEST_SERVER:
        yield _fail(
            "nats", f"nats-server is {facts.nats_version}; atomic batches need {oldest} or newer"
        )
    else:
        yield _ok("nats", f"nats-server {facts.nats_version} answers, the admin login works")


def _durability(nats: NatsFacts | None) -> Iterator[Check]:
    if nats is None:
        yield _warn(
            "durability",
            "not checked: the monitoring port of the NATS server is not known or not reachable here",
        )
        return
    if not nats.jetstream:
        yield _fail(
            "durability",
            "JetStream is off; after a full disk the server needs a restart once there is space",
        )
        return
    if nats.sync_always:
        yield _ok("durability", "every append is synced to disk (sync_interval: always)")
    else:
        yield _fail(
            "durability",
            "appends are not synced to disk: set `sync_interval: always` in nats.conf, or a power "
            "loss takes back what was acknowledged",
        )
    left = nats.max_store_bytes - nats.used_store_bytes
    if nats.free_bytes is not None and nats.max_store_bytes > 0:
        if left > nats.free_bytes:
            yield _fail(
                "space",
                f"JetStream may still take {size(left)} but {nats.store_dir} has "
                f"{size(nats.free_bytes)} free: lower max_file_store or make room, or a full disk "
                "turns JetStream off",
            )
        else:
            yield _ok("space", f"{size(nats.free_bytes)} free for at most {size(left)} more")
    for stream in nats.streams:
        if stream.limit_bytes > 0 and stream.used_bytes > 0.8 * stream.limit_bytes:
            yield _warn(
                "space",
                f"{stream.name} holds {size(stream.used_bytes)} of {size(stream.limit_bytes)}; at the "
                "limit nothing can be changed any more",
            )
    events = [s for s in nats.streams if s.name.endswith("_EVENTS")]
    if not events:
        yield _fail("streams", "there is no stream of events; has a control plane ever started?")
    for stream in events:
        if stream.replicas < 3:
            yield _ok("copies", f"{stream.name} has {stream.replicas} copy: fine on one machine")
        else:
            yield _ok("copies", f"{stream.name} has {stream.replicas} copies")


def _clock(skew_s: float | None) -> Iterator[Check]:
    if skew_s is None:
        return
    if abs(skew_s) > SKEW_WARN_S:
        yield _warn(
            "clock",
            f"the NATS server's clock is {skew_s:+.1f} s from this machine's; run NTP on both",
        )
    else:
        yield _ok("clock", f"the NATS server's clock is {skew_s:+.3f} s from this machine's")


def _controlplane(facts: Facts) -> Iterator[Check]:
    doctor = facts.doctor
    if doctor is None:
        yield _fail("control plane", facts.api_error or "it was not asked")
        return
    leader = doctor.get("leader")
    if not leader:
        yield _fail("leader", "nobody leads; nothing can be decided until a control plane does")
    else:
        yield _ok("leader", f"{leader.get('instance')} leads, term {leader.get('term')}")
    findings = doctor.get("findings") or []
    for finding in findings:
        yield _fail("control plane", str(finding.get("sentence")))
    if not findings:
        yield _ok("control plane", f"{doctor.get('instance')} is ready")
    for broken in doctor.get("unreadable") or []:
        yield _fail(
            "log",
            f"{broken.get('subject')} cannot be read at sequence {broken.get('seq')}: "
            f"{broken.get('why')}; nothing is written over it",
        )
    unknown = doctor.get("unknown_events") or 0
    if unknown:
        yield _warn(
            "log", f"{unknown} events of a newer version were kept but not understood; upgrade"
        )
    schema, log_schema = doctor.get("schema"), doctor.get("log_schema")
    if isinstance(schema, int) and isinstance(log_schema, int) and schema < log_schema:
        yield _fail(
            "log", f"the log has schema {log_schema}, this control plane knows {schema}: upgrade it"
        )


def _gateway(facts: Facts) -> Iterator[Check]:
    if facts.gateway_ready is None:
        return
    if facts.gateway_ready:
        yield _ok("gateway", "it has its routing table and serves")
    else:
        yield _fail("gateway", facts.gateway_error or "it answers, but has no routing table yet")


def _secrets(loose: tuple[str, ...]) -> Iterator[Check]:
    for path in loose:
        yield _fail("secrets", f"others may read {path}: chmod go-rwx {path}")
