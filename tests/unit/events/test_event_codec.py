"""The bytes of an event: what CloudEvents requires, headers of their own, ids that sort by time."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from events.codec import (
    StoredMessage,
    decode_command,
    decode_event,
    encode_command,
    encode_event,
    place_of,
)
from events.envelope import event_headers, uuid7
from events.log import Broken, Recorded
from events.subjects import NotASubject
from events.upcasts import NoUpcast, lift
from schemas.commands import Command, ModelAdd
from tests.support import drafts

NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)


def encoded() -> dict[str, object]:
    raw = encode_event(drafts.model("m.1", 0), id_="id-1", source="/cp/a", epoch=4, now=NOW)
    decoded: dict[str, object] = msgspec.json.decode(raw)
    return decoded


def test_the_envelope_is_structured_cloudevents_json() -> None:
    event = encoded()
    assert {k: event[k] for k in ("specversion", "id", "source", "type", "subject", "time")} == {
        "specversion": "1.0",
        "id": "id-1",
        "source": "/cp/a",
        "type": "dev.modelyard.model.added",
        "subject": "yard.evt.model.m%2E1",
        "time": "2026-05-06T07:08:09Z",
    }
    assert event["datacontenttype"] == "application/json"
    assert event["dataschema"] == "urn:modelyard:model:1"
    assert event["epoch"] == 4
    assert "causationid" not in event


def test_an_event_keeps_its_own_time_when_reported_later() -> None:
    earlier = NOW - timedelta(hours=1)
    draft = msgspec.structs.replace(drafts.model("m", 0), time=earlier)
    raw = encode_event(draft, id_="i", source="/agent/n", epoch=1, now=NOW)
    item = decode_event(StoredMessage(seq=1, subject=draft.subject, payload=raw, stored_at=NOW))
    assert isinstance(item, Recorded)
    assert (item.time, item.stored_at) == (earlier, NOW)


def test_another_prefix_is_another_yard() -> None:
    draft = msgspec.structs.replace(drafts.model("m", 0), subject="test.evt.model.m")
    raw = encode_event(draft, id_="i", source="/cp/a", epoch=1, now=NOW, prefix="test")
    message = StoredMessage(seq=1, subject="test.evt.model.m", payload=raw, stored_at=NOW)
    assert isinstance(decode_event(message, "test"), Recorded)
    assert isinstance(decode_event(message), Broken)


def test_unknown_fields_of_an_event_are_ignored() -> None:
    event = encoded()
    event["novel"] = 1
    data = event["data"]
    assert isinstance(data, dict)
    data["state"]["novel"] = {"x": 1}
    message = StoredMessage(
        seq=1,
        subject="yard.evt.model.m%2E1",
        payload=msgspec.json.encode(event),
        stored_at=NOW,
    )
    item = decode_event(message)
    assert isinstance(item, Recorded)
    assert item.problem is None


def test_a_message_nested_without_end_is_broken_and_ends_no_reader() -> None:
    deep = b"[" * 9000 + b"]" * 9000
    for payload in (
        deep,
        b'{"x":%b}' % deep,
        msgspec.json.encode(encoded())[:-1] + b',"x":' + deep + b"}",
    ):
        message = StoredMessage(
            seq=1, subject="yard.evt.model.m%2E1", payload=payload, stored_at=NOW
        )
        assert isinstance(decode_event(message), Broken)
        asked = decode_command(
            StoredMessage(
                seq=1, subject="yard.cmd.admin.model.remove", payload=payload, stored_at=NOW
            )
        )
        assert asked.problem is not None


def test_a_body_larger_than_any_event_is_broken() -> None:
    message = StoredMessage(
        seq=1, subject="yard.evt.model.m", payload=b" " * 300_000, stored_at=NOW
    )
    assert isinstance(decode_event(message), Broken)


@pytest.mark.parametrize(
    ("subject", "noun", "key"),
    [
        ("yard.evt.model.qwen2%2E5-7b", "model", ("qwen2.5-7b",)),
        ("yard.evt.leader.current", "leader.current", ()),
        ("yard.evt.leader.log", "leader.log", ()),
        ("yard.evt.activation.m.n1%7Egpu0", "activation", ("m", "n1~gpu0")),
        ("yard.evt.adapter.a", "adapter", ("a",)),
        ("yard.evt.leader.future", "leader", ("future",)),
    ],
)
def test_a_subject_names_a_noun_and_a_key(subject: str, noun: str, key: tuple[str, ...]) -> None:
    place = place_of(subject)
    assert (place.noun, place.key) == (noun, key)


@pytest.mark.parametrize(
    "subject",
    [
        "yard.cmd.a.model.add",
        "yard.evt.model",
        "yard.evt.model.a.b",
        "yard.evt.model.%2e",  # not how we spell it
        "yard.evt.model.%FF",
        "yard.evt.leader.log.x",
    ],
)
def test_what_is_no_event_subject_is_refused(subject: str) -> None:
    with pytest.raises(NotASubject):
        place_of(subject)


def test_every_publish_has_headers_of_its_own() -> None:
    first = event_headers(stream="S", type_="t", rev=1, expected_seq=3, message_id="i")
    assert first == {
        "Nats-Expected-Stream": "S",
        "Nats-Expected-Last-Subject-Sequence": "3",
        "Nats-Msg-Id": "i",
        "Yard-Type": "t",
        "Yard-Rev": "1",
    }
    first["Nats-Msg-Id"] = "changed by the library"
    assert event_headers(stream="S", type_="t", rev=1, expected_seq=3)["Yard-Rev"] == "1"


def test_log_29_a_tombstone_rolls_up_and_expires() -> None:
    headers = event_headers(
        stream="S", type_="model.deleted", rev=1, expected_seq=3, tombstone=True, ttl_s=5
    )
    assert headers["Nats-Rollup"] == "sub"
    assert headers["Nats-TTL"] == "604800"


def test_a_fenced_last_message_commits_the_batch() -> None:
    headers = event_headers(
        stream="S",
        type_="t",
        rev=1,
        expected_seq=9,
        expected_subject="yard.evt.leader.current",
        batch=("b", 4, True),
    )
    assert headers["Nats-Expected-Last-Subject-Sequence-Subject"] == "yard.evt.leader.current"
    assert headers["Nats-Batch-Id"] == "b"
    assert headers["Nats-Batch-Sequence"] == "4"
    assert headers["Nats-Batch-Commit"] == "1"
    assert "Nats-Msg-Id" not in headers


def test_ids_are_version_7_and_sort_by_time() -> None:
    first = uuid7(NOW, b"\xff" * 10)
    later = uuid7(NOW + timedelta(milliseconds=1), b"\x00" * 10)
    assert first < later
    assert first[14] == "7"
    assert first[19] in "89ab"
    assert int(first.replace("-", "")[:12], 16) == int(NOW.timestamp() * 1000)
    with pytest.raises(ValueError, match="ten"):
        uuid7(NOW, b"")


def test_a_missing_version_step_is_said() -> None:
    with pytest.raises(NoUpcast):
        lift("replica", 0, 2, {"state": {}, "change": {}, "reason": ""})


def test_a_version_step_leaves_its_argument_alone() -> None:
    body = {"state": {"memory_mib": 2}, "change": {}, "reason": ""}
    assert lift("replica", 1, 2, body)["state"] == {"memory_bytes": 2 * 1024 * 1024}
    assert body["state"] == {"memory_mib": 2}


def test_a_command_is_read_as_it_was_sent() -> None:
    command = Command(id="c", body=ModelAdd(entry={"name": "m", "x": [1, None]}), ttl_s=5)
    message = StoredMessage(
        seq=3, subject="yard.cmd.al%2Eice.model.add", payload=encode_command(command), stored_at=NOW
    )
    got = decode_command(message)
    assert (got.actor, got.name, got.command, got.problem) == ("al.ice", "model.add", command, None)
