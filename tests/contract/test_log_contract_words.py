"""What every EventLog and Wire does with words: messages nobody can read, commands, beacons, requests."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.log import Broken, Recorded, StreamIdentity, Unavailable
from events.subjects import event_subject
from schemas.beacons import LeaderBeacon, LogsReply, LogsRequest
from schemas.commands import Command, ModelActivate, ModelRemove
from tests.support import drafts
from tests.support.aio import until
from tests.support.logstages import Play, Stage, player, read


@pytest.fixture(params=["memory", "jetstream"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs a scene on a fresh stage."""
    return player(request.param, tmp_path)


# --- messages nobody can read ---


def _envelope(subject: str) -> dict[str, Any]:
    """A valid body of a model event, as plain JSON to be spoiled."""
    return {
        "specversion": "1.0",
        "id": "another-id",
        "source": "/cp/1",
        "type": "dev.modelyard.model.changed",
        "subject": subject,
        "time": "2026-01-01T00:00:00Z",
        "datacontenttype": "application/json",
        "dataschema": "urn:modelyard:model:1",
        "actor": "system",
        "rev": 2,
        "epoch": 1,
        "data": {
            "state": {"name": "m", "incarnation": "i-1", "description": "later"},
            "change": {"type": "model.changed", "by": "x", "fields": []},
            "reason": "",
        },
    }


@pytest.mark.parametrize(
    "spoil",
    [
        {"payload": b"\xff\xfe not json"},
        {
            "payload": b'{"stream":"YARD_EVENTS","seq":5}'
        },  # a PubAck, as an injected reply leaves it
        {"subject": "yard.evt.model.other"},
        {"type": "dev.modelyard.replica.ready"},
        {"type": "org.example.model.changed"},
        {"dataschema": "urn:modelyard:replica:1"},
        {"dataschema": "urn:modelyard:model:0"},
        {"specversion": "2.0"},
        {"data": {"state": {"name": 5}, "change": {"type": "model.changed"}, "reason": ""}},
        {"epoch": 0},
    ],
    ids=lambda s: next(iter(s)) + "-" + str(next(iter(s.values())))[:24],
)
def test_log_22_junk_as_the_last_message_leaves_the_state_before_in_force(
    play: Play, spoil: dict[str, Any]
) -> None:
    async def scene(stage: Stage) -> None:
        subject = drafts.model_subject("m")
        live = stage.other.follow(["yard.evt.>"])
        good = await stage.log.append(drafts.model("m", 0), epoch=1)
        await read(live, 1)
        payload = spoil.get("payload") or msgspec.json.encode({**_envelope(subject), **spoil})
        seq = await stage.junk(subject, payload)
        await stage.log.append(drafts.model("n", 0), epoch=1)

        seen = {i.seq: i for i in await read(live, seq + 1)}
        told = seen[seq]
        assert isinstance(told, Broken)
        assert told.subject == subject
        assert told.previous is None  # this reader has it
        assert isinstance(seen[seq + 1], Recorded)  # and the stream is not blocked
        await live.close()

        fresh = stage.other.follow(["yard.evt.>"])
        items = {i.seq: i for i in await read(fresh, seq + 1)}
        broken = items[seq]
        if "epoch" in spoil:
            # A stale epoch shows only against what was read before; a first pass sees this one alone.
            assert isinstance(broken, Recorded)
        else:
            assert isinstance(broken, Broken)
            assert broken.previous is not None
            assert broken.previous.id == good.ids[0]
            last = await stage.log.last(subject)
            assert isinstance(last, Broken)
            assert last.previous is not None
            assert last.previous.id == good.ids[0]
        await fresh.close()

    play(scene)


@pytest.mark.parametrize(
    "newer",
    [
        {"type": "dev.modelyard.model.translated"},
        {"dataschema": "urn:modelyard:model:99"},
    ],
    ids=["type", "version"],
)
def test_log_22_what_a_newer_program_wrote_is_kept_and_not_folded(
    play: Play, newer: dict[str, Any]
) -> None:
    async def scene(stage: Stage) -> None:
        subject = drafts.model_subject("m")
        await stage.log.append(drafts.model("m", 0), epoch=1)
        body = {**_envelope(subject), **newer}
        seq = await stage.junk(subject, msgspec.json.encode(body))
        follower = stage.other.follow(["yard.evt.>"])
        item = (await read(follower, seq))[-1]
        assert isinstance(item, Recorded)
        assert item.problem
        assert item.event is None
        assert item.state is None
        assert (item.noun, item.key, item.rev) == ("model", ("m",), 2)
        await follower.close()

    play(scene)


def test_a_noun_of_a_newer_version_is_kept_too(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.log.append(drafts.model("m", 0), epoch=1)
        body = {
            **_envelope(drafts.model_subject("m")),
            "subject": "yard.evt.dream.a%2Eb",
            "type": "dev.modelyard.dream.added",
        }
        seq = await stage.junk("yard.evt.dream.a%2Eb", msgspec.json.encode(body))
        follower = stage.other.follow(["yard.evt.>"])
        item = (await read(follower, seq))[-1]
        assert isinstance(item, Recorded)
        assert (item.noun, item.key) == ("dream", ("a.b",))
        assert item.problem
        await follower.close()

    play(scene)


def test_an_agent_of_an_older_epoch_is_not_believed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        old = await stage.log.append(drafts.node_started("n1", 0), epoch=0)
        kept = await stage.log.append(drafts.replica_ready("n1", "r1", 0), epoch=old.seqs[0])
        new = await stage.log.append(drafts.node_started("n1", old.seqs[0], 2), epoch=0)
        late = await stage.log.append(
            drafts.replica_ready("n1", "r1", kept.seqs[0], 2), epoch=old.seqs[0]
        )
        fine = await stage.log.append(drafts.replica_ready("n1", "r2", 0), epoch=new.seqs[0])
        elsewhere = await stage.log.append(drafts.replica_ready("n2", "r3", 0), epoch=1)
        follower = stage.other.follow(["yard.evt.>"])
        items = {i.seq: i for i in await read(follower, elsewhere.seqs[0])}
        stale = items[late.seqs[0]]
        assert isinstance(stale, Broken)
        assert "stale epoch" in stale.why
        assert stale.previous is not None
        assert stale.previous.seq == kept.seqs[0]
        assert isinstance(items[fine.seqs[0]], Recorded)
        assert isinstance(items[elsewhere.seqs[0]], Recorded)
        await follower.close()

    play(scene)


# --- commands ---


def test_log_07_a_command_sent_twice_is_stored_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        command = Command(id="c-1", body=ModelRemove(model="m"))
        first = await stage.log.send("alice", command)
        assert await stage.other.send("alice", command) == first
        second = await stage.log.send("alice", Command(id="c-2", body=ModelRemove(model="m")))
        assert second == first + 1
        stage.lose_next_ack()
        third = await stage.log.send("alice", Command(id="c-3", body=ModelRemove(model="m")))
        assert third == second + 1
        follower = stage.other.follow_commands(after=0)
        got = [*await asyncio.wait_for(follower.next(), 5)]
        while len(got) < 3:
            got += await asyncio.wait_for(follower.next(), 5)
        assert [(c.seq, c.actor, c.name, c.id) for c in got] == [
            (1, "alice", "model.remove", "c-1"),
            (2, "alice", "model.remove", "c-2"),
            (3, "alice", "model.remove", "c-3"),
        ]
        assert got[0].command == command
        await follower.close()

    play(scene)


def test_gateways_share_one_message_id(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        body = ModelActivate(model="m")
        first = await stage.log.send(
            "gateway", Command(id="1", body=body), message_id="activate-m-any-0-1", ttl_s=60
        )
        second = await stage.other.send(
            "gateway", Command(id="2", body=body), message_id="activate-m-any-0-1", ttl_s=60
        )
        assert first == second

    play(scene)


def test_commands_are_followed_from_a_position_across_a_lost_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for n in range(3):
            await stage.other.send("a", Command(id=f"c{n}", body=ModelRemove(model="m")))
        follower = stage.log.follow_commands(after=2)
        assert [c.id for c in await asyncio.wait_for(follower.next(), 5)] == ["c2"]
        await stage.cut()
        await stage.other.send("a", Command(id="c3", body=ModelRemove(model="m")))
        await stage.restore()
        assert [c.id for c in await asyncio.wait_for(follower.next(), 5)] == ["c3"]
        await follower.close()

    play(scene)


def test_an_undecodable_command_is_handed_over_with_its_problem(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.junk_command("yard.cmd.bob.model.add", b"not json")
        await stage.junk_command(
            "yard.cmd.bob.model.add", b'{"id":"x","body":{"do":"model.add","surprise":1}}'
        )
        await stage.junk_command(
            "yard.cmd.bob.model.add", b'{"id":"y","body":{"do":"model.remove","model":"m"}}'
        )
        follower = stage.other.follow_commands(after=0)
        got = [*await asyncio.wait_for(follower.next(), 5)]
        while len(got) < 3:
            got += await asyncio.wait_for(follower.next(), 5)
        assert [(c.actor, c.command, c.id) for c in got] == [
            ("bob", None, None),
            ("bob", None, "x"),
            ("bob", None, "y"),
        ]
        assert all(c.problem for c in got)
        await follower.close()

    play(scene)


# --- the wire ---


async def _heard(inbox: asyncio.Queue[tuple[str, LeaderBeacon]]) -> tuple[str, LeaderBeacon]:
    return await asyncio.wait_for(inbox.get(), 5)


def test_a_beacon_reaches_every_listener_of_its_kind(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        inbox: asyncio.Queue[tuple[str, LeaderBeacon]] = asyncio.Queue()
        subscription = await stage.wire.on_beacon(
            "leader", LeaderBeacon, lambda name, body: inbox.put_nowait((name, body))
        )
        beacon = LeaderBeacon(instance="cp.1", term=3, position=9)
        sending = asyncio.create_task(_repeat(stage, beacon))
        assert await _heard(inbox) == ("cp.1", beacon)
        await stage.cut()
        await stage.wire.beacon("leader", "lost", beacon)  # dropped, not raised
        await stage.restore()
        while not inbox.empty():
            inbox.get_nowait()
        assert (await _heard(inbox))[0] == "cp.1"
        sending.cancel()
        await subscription.close()

    play(scene)


async def _repeat(stage: Stage, beacon: LeaderBeacon) -> None:
    while True:
        await stage.other_wire.beacon("leader", "cp.1", beacon)
        await asyncio.sleep(0.02)


def test_a_request_is_answered_by_the_node_it_names(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        async def answer(request: LogsRequest) -> LogsReply:
            if request.replica == "bad":
                raise ValueError("no such replica")
            return LogsReply(text=f"log of {request.replica}", next_offset=7)

        serving = await stage.other_wire.serve("replica_logs", "node.1", LogsRequest, answer)

        async def ask(node: str, replica: str) -> LogsReply:
            return await stage.wire.request(
                "replica_logs", node, LogsRequest(replica=replica), LogsReply, timeout_s=2
            )

        async def is_served() -> bool:  # the server may not know of the subscription yet
            try:
                return await ask("node.1", "r-1") == LogsReply(text="log of r-1", next_offset=7)
            except Unavailable:
                return False

        await until(is_served, "an answer")
        with pytest.raises(Unavailable, match="no such replica"):
            await ask("node.1", "bad")
        with pytest.raises(Unavailable, match="nobody"):
            await ask("node-2", "r-1")
        await stage.cut()
        with pytest.raises(Unavailable):
            await ask("node.1", "r-1")
        await stage.restore()
        await serving.close()

    play(scene)


def test_a_request_nobody_finishes_ends_in_time(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        async def never(request: LogsRequest) -> LogsReply:
            await asyncio.Event().wait()
            return LogsReply()

        serving = await stage.wire.serve("replica_logs", "n", LogsRequest, never)
        with pytest.raises(Unavailable):
            await stage.wire.request(
                "replica_logs", "n", LogsRequest(replica="r"), LogsReply, timeout_s=0.1
            )
        await serving.close()

    play(scene)


def test_the_identity_tells_the_stream_and_its_end(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        before = await stage.log.identity()
        assert before.stream_id
        assert before.created
        assert (before.last_seq, before.schema) == (0, 1)
        await stage.log.append(drafts.model("m", 0), epoch=1)
        after = await stage.other.identity()
        assert after == StreamIdentity(
            stream_id=before.stream_id, created=before.created, last_seq=1, schema=1
        )
        await stage.replace_history()
        replaced = await stage.log.identity()
        assert (replaced.stream_id, replaced.created) != (before.stream_id, before.created)

    play(scene)


def test_subjects_of_names_are_reversible(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for name in ("a.b", "ünï", "a/b c", "%2E", "*"):
            await stage.log.append(drafts.model(name, 0), epoch=1)
            last = await stage.other.last(event_subject("model", name))
            assert isinstance(last, Recorded)
            assert last.key == (name,)

    play(scene)
