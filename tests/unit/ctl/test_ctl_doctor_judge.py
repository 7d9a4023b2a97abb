"""What `yardctl doctor` says about what it found: each fault has a sentence with what to do."""

import os
from pathlib import Path
from typing import Any

import pytest

from controlplane.ctl import checkup
from controlplane.ctl.judge import Facts, NatsFacts, Stream, judge, version_of

GIB = 1024**3
NATS = NatsFacts(
    version="2.15.1",
    jetstream=True,
    sync_always=True,
    store_dir="/store",
    max_store_bytes=6 * GIB,
    used_store_bytes=GIB,
    free_bytes=50 * GIB,
    streams=(Stream(name="YARD_EVENTS", replicas=1, used_bytes=10, limit_bytes=2 * GIB),),
)
DOCTOR: dict[str, Any] = {
    "instance": "cp-1",
    "leader": {"instance": "cp-1", "term": 12},
    "findings": [],
    "unreadable": [],
    "unknown_events": 0,
    "schema": 1,
    "log_schema": 1,
}


def facts(*, nats: dict[str, Any] | None = None, doctor: dict[str, Any] | None = None, **over: Any):
    parts = {name: getattr(NATS, name) for name in NatsFacts.__struct_fields__} | (nats or {})
    return Facts(
        **{
            "nats_version": "2.15.1",
            "doctor": DOCTOR | (doctor or {}),
            "monitoring": NatsFacts(**parts),
            "skew_s": 0.01,
            "gateway_ready": True,
        }
        | over
    )


def wrong(given: Facts) -> list[tuple[str, str, str]]:
    return [(c.name, c.verdict, c.sentence) for c in judge(given) if c.verdict != "ok"]


def test_a_healthy_yard_has_only_good_lines() -> None:
    assert wrong(facts()) == []


@pytest.mark.parametrize(
    ("given", "name", "verdict", "expected"),
    [
        (facts(nats_version=None, nats_error="no NATS"), "nats", "fail", "no NATS"),
        (facts(nats_version="2.12.2"), "nats", "fail", "need 2.12.3 or newer"),
        (facts(nats_version="v2.9.10-beta"), "nats", "fail", "need 2.12.3"),
        (facts(nats={"sync_always": False}), "durability", "fail", "sync_interval: always"),
        (facts(nats={"jetstream": False}), "durability", "fail", "JetStream is off"),
        (facts(monitoring=None), "durability", "warn", "not checked"),
        (facts(nats={"free_bytes": GIB}), "space", "fail", "may still take 5 GiB"),
        (
            facts(
                nats={
                    "streams": (
                        Stream(name="YARD_EVENTS", replicas=3, used_bytes=9, limit_bytes=10),
                    )
                }
            ),
            "space",
            "warn",
            "YARD_EVENTS holds 9 B of 10 B",
        ),
        (facts(nats={"streams": ()}), "streams", "fail", "no stream of events"),
        (facts(skew_s=-7.0), "clock", "warn", "-7.0 s from this machine's"),
        (facts(doctor={"leader": None}), "leader", "fail", "nobody leads"),
        (
            facts(doctor={"findings": [{"code": "x", "sentence": "the loop stands"}]}),
            "control plane",
            "fail",
            "the loop stands",
        ),
        (
            facts(doctor={"unreadable": [{"subject": "s", "seq": 3, "why": "junk"}]}),
            "log",
            "fail",
            "s cannot be read at sequence 3: junk",
        ),
        (facts(doctor={"unknown_events": 4}), "log", "warn", "4 events of a newer version"),
        (facts(doctor={"log_schema": 2}), "log", "fail", "schema 2"),
        (facts(gateway_ready=False), "gateway", "fail", "no routing table"),
        (facts(gateway_ready=False, gateway_error="gone"), "gateway", "fail", "gone"),
        (facts(loose_secrets=("/d/secrets/x",)), "secrets", "fail", "chmod go-rwx /d/secrets/x"),
    ],
)
def test_a_fault_is_named_with_what_to_do(
    given: Facts, name: str, verdict: str, expected: str
) -> None:
    ((found_name, found_verdict, sentence),) = wrong(given)
    assert (found_name, found_verdict) == (name, verdict)
    assert expected in sentence


def test_a_control_plane_that_is_away_is_one_fault() -> None:
    given = Facts(nats_version="2.15.1", monitoring=NATS, api_error="the API does not answer")
    assert wrong(given) == [("control plane", "fail", "the API does not answer")]


def test_versions() -> None:
    assert version_of("2.15.1") == (2, 15, 1)
    assert version_of("v2.15.0-RC.3") == (2, 15, 0)
    assert version_of("latest") is None


def test_the_monitoring_answers_are_read_for_the_few_fields_that_matter() -> None:
    varz = {
        "version": "2.15.1",
        "jetstream": {
            "config": {"max_storage": 6 * GIB, "store_dir": "/store", "sync_always": True},
            "stats": {"storage": GIB},
        },
    }
    jsz = {
        "account_details": [
            {
                "stream_detail": [
                    {
                        "name": "YARD_EVENTS",
                        "config": {"num_replicas": 1, "max_bytes": 2 * GIB},
                        "state": {"bytes": 10},
                    }
                ]
            }
        ]
    }
    assert checkup.read_monitoring(varz, jsz, lambda _: 50 * GIB) == NATS
    assert checkup.read_monitoring({}, {}).jetstream is False


def test_secrets_others_may_read_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o700)
    (folder / "tight").touch(mode=0o600)
    (folder / "loose").touch()
    os.chmod(folder / "loose", 0o640)
    assert checkup._loose_secrets(tmp_path) == (str(folder / "loose"),)
