"""Sentences about the log that hold for any bytes, any names and any order of faults."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from events.codec import StoredMessage, decode_command, decode_event, place_of
from events.epochs import Epochs
from events.log import Broken, Recorded
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker, matches
from events.subjects import decode_token, encode_token, event_subject
from tests.golden.record import FOLDER
from tests.support import drafts
from tests.support.aio import run
from tests.support.loghistory import Fold

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GOLDEN = [p.read_bytes() for p in sorted(FOLDER.iterdir())]
names = st.text(min_size=1, max_size=20).filter(lambda t: t.isprintable())
json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def message(subject: str, payload: bytes) -> StoredMessage:
    return StoredMessage(seq=1, subject=subject, payload=payload, stored_at=NOW)


@given(names, st.binary(max_size=200))
def test_no_bytes_can_make_a_reader_raise(name: str, payload: bytes) -> None:
    assert isinstance(decode_event(message(event_subject("model", name), payload)), Broken)
    assert decode_command(message("yard.cmd.a.model.add", payload)).problem


@given(st.sampled_from(GOLDEN), st.data())
def test_an_event_with_any_field_replaced_is_read_or_refused_never_raised(
    payload: bytes, data: st.DataObject
) -> None:
    envelope: dict[str, Any] = msgspec.json.decode(payload)
    subject = envelope["subject"]
    where: dict[str, Any] = envelope
    while True:
        key = data.draw(st.sampled_from(sorted(where)))
        inner = where[key]
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            where = inner
            continue
        where[key] = data.draw(json_values)
        break
    item = decode_event(message(subject, msgspec.json.encode(envelope)))
    assert isinstance(item, Recorded | Broken)


@given(names)
def test_a_name_comes_back_out_of_its_token(name: str) -> None:
    token = encode_token(name)
    assert not set(token) & set(".*> \t")
    assert decode_token(token) == name
    assert place_of(event_subject("model", name)).key == (name,)


@given(st.lists(st.sampled_from(["a", "b", "*", ">"]), min_size=1, max_size=4), st.data())
def test_a_pattern_matches_what_it_was_made_from(pattern: list[str], data: st.DataObject) -> None:
    if ">" in pattern[:-1]:
        pattern = [p for p in pattern[:-1] if p != ">"] + pattern[-1:]
    subject = [
        data.draw(st.sampled_from(["a", "b", "c"])) if p in ("*", ">") else p for p in pattern
    ]
    assert matches(".".join(pattern), ".".join(subject))
    assert not matches(".".join(pattern), ".".join(["z", *subject])) or pattern[0] in ("*", ">")


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12))
def test_the_epochs_a_reader_believes_never_go_back(steps: list[tuple[int, bool]]) -> None:
    epochs = Epochs()
    believed = 0
    for seq, (epoch, started) in enumerate(steps, start=10):
        item = Recorded(
            seq=seq, subject="yard.evt.card.n.cpu", noun="node" if started else "card",
            key=("n",) if started else ("n", "cpu"), id="", type="node.started" if started else "card.measured",
            time=NOW, stored_at=NOW, rev=1, epoch=epoch, actor="", reason="", event=None, state=None,
        )  # fmt: skip
        if epochs.is_stale(item):
            assert item.epoch < believed
            continue
        epochs.show(item)
        believed = max(believed, seq if started else item.epoch)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("abc")),
        st.tuples(st.just("delete"), st.sampled_from("abc")),
        st.tuples(st.just("lose_ack"), st.just("")),
        st.tuples(st.just("cut"), st.just("")),
        st.tuples(st.just("restore"), st.just("")),
        st.tuples(st.just("replace"), st.just("")),
        st.tuples(st.just("lose_tail"), st.just("")),
        st.tuples(st.just("let_run"), st.just("")),
    ),
    max_size=25,
)


@given(OPERATIONS)
def test_whatever_happens_a_follower_ends_where_a_fresh_one_does(
    operations: list[tuple[str, str]],
) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        writer, reader = MemoryLog(broker, source="/cp/1"), MemoryLog(broker, source="/cp/2")
        fold = Fold()
        follower = reader.follow(["yard.evt.>"])
        following = asyncio.create_task(fold.follow(follower))
        revs: dict[str, int] = {}
        for operation, name in operations:
            match operation:
                case "append" | "delete":
                    expected = broker.events.last_of(drafts.model_subject(name))
                    rev = revs[name] = revs.get(name, 0) + 1
                    draft = (
                        drafts.model(name, expected, rev)
                        if operation == "append"
                        else drafts.model_deleted(name, expected, rev)
                    )
                    await writer.append(draft, epoch=1)
                case "lose_ack":
                    broker.lose_acks = 1
                case "cut":
                    reader.connection.disconnect()
                case "restore":
                    reader.connection.reconnect()
                case "replace":
                    broker.replace_events()
                case "lose_tail":
                    broker.lose_tail(max(0, broker.events.last_seq - 2))
                case _:
                    for _ in range(5):
                        await asyncio.sleep(0)
        reader.connection.reconnect()
        end = (await writer.identity()).last_seq
        await fold.reach(end)
        fresh = Fold()
        second = writer.follow(["yard.evt.>"])
        catching_up = asyncio.create_task(fresh.follow(second))
        await fresh.reach(end)
        assert fold.states == fresh.states
        for task in (following, catching_up):
            task.cancel()
        await asyncio.gather(following, catching_up, return_exceptions=True)
        await follower.close()
        await second.close()

    run(main())
