"""A connection's life: no server yet, wrong and changed passwords, missing rights, a client closed for good."""

import asyncio
from pathlib import Path

import pytest

from events.connection import connect
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import Misconfigured, Unavailable
from events.provision import ensure_streams
from events.pull import PullTimes
from schemas.beacons import LeaderBeacon, LogsReply, LogsRequest
from schemas.commands import Command, ModelRemove
from schemas.settings import NatsSettings
from tests.support import drafts
from tests.support.aio import run, until
from tests.support.logstages import BUDGET, TIMES, open_connection
from tests.support.natsserver import NatsServer
from tests.support.tcpproxy import TcpProxy

_USERS = """
authorization {{ users: [
  {{ user: control, password: "{password}" }}
  {{ user: limited, password: "l", permissions: {{
      publish: {{ allow: ["yard.evt.model.mine", "$JS.API.CONSUMER.CREATE.YARD_EVENTS.*.yard.evt.plan.n1",
        "$JS.API.CONSUMER.MSG.NEXT.YARD_EVENTS.*", "$JS.API.CONSUMER.DELETE.YARD_EVENTS.*",
        "$JS.API.STREAM.INFO.YARD_EVENTS", "$JS.API.STREAM.MSG.GET.YARD_EVENTS"] }}
      subscribe: {{ allow: ["_INBOX_limited.>"] }} }} }}
] }}
"""


def test_log_23_everything_starts_without_a_server_and_connects_when_it_comes(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        server = NatsServer(tmp_path)
        loop = asyncio.get_running_loop()
        began = loop.time()
        connection = await connect(
            server.settings, name="cp", user="", password="", inbox_prefix="_INBOX_cp"
        )
        assert loop.time() - began < 1.5
        assert not connection.connected
        log = JetStreamLog(connection, source="/cp/1", budget=BUDGET, times=TIMES)
        wire = JetStreamWire(connection)
        heard: list[str] = []
        await wire.on_beacon("leader", LeaderBeacon, lambda name, _: heard.append(name))
        await wire.beacon("leader", "a", LeaderBeacon(instance="a", term=1, position=0))
        with pytest.raises(Unavailable):
            await log.append(drafts.model("m", 0), epoch=1)
        with pytest.raises(Unavailable):
            await ensure_streams(connection, "yard-1", 1)
        follower = log.follow(["yard.evt.>"])
        assert not (await follower.next()).connected
        waiting = asyncio.create_task(follower.next())
        commands = log.follow_commands(after=0)
        waiting_commands = asyncio.create_task(commands.next())
        with server:
            await until(lambda: connection.connected, "the connection", 5)
            await ensure_streams(connection, "yard-1", 1)
            await log.append(drafts.model("m", 0), epoch=1)
            batch = await asyncio.wait_for(waiting, 10)
            while not batch.items:
                batch = await asyncio.wait_for(follower.next(), 5)
            assert [i.seq for i in batch.items] == [1]

            async def beacon_heard() -> bool:
                await wire.beacon("leader", "b", LeaderBeacon(instance="b", term=1, position=0))
                return heard != []

            await until(beacon_heard, "a beacon")
            assert "a" not in heard
            waiting_commands.cancel()
            await asyncio.gather(waiting_commands, return_exceptions=True)
            await commands.close()
            await follower.close()
            await connection.close()

    run(main(), 30)


def test_log_25_a_changed_password_is_taken_up_by_a_client_the_server_closed(
    tmp_path: Path,
) -> None:
    """The library closes for good on an authorization error; another client takes over with the new one."""

    async def main() -> None:
        extra = _USERS.format(password="old")
        with NatsServer(tmp_path, extra=extra) as server:
            password = "old"
            connection = await connect(
                server.settings,
                name="cp",
                user="control",
                password=lambda: password,
                inbox_prefix="_INBOX_control",
            )
            assert connection.connected
            await ensure_streams(connection, "yard-1", 1)
            log = JetStreamLog(connection, source="/cp/1", budget=BUDGET, times=TIMES)
            follower = log.follow(["yard.evt.>"])
            await follower.next()
            text = server.configuration.read_text()
            server.configuration.write_text(text.replace('"old"', '"new"'))
            server.reload()
            await until(lambda: not connection.connected, "the server to hang up")
            with pytest.raises(Unavailable):
                await log.append(drafts.model("m", 0), epoch=1)
            password = "new"
            await until(lambda: connection.connected, "the connection", 10)
            await log.append(drafts.model("m", 0), epoch=1)
            items: list[int] = []
            while not items:
                items += [i.seq for i in (await asyncio.wait_for(follower.next(), 10)).items]
            assert items == [1]
            await follower.close()
            await connection.close()

    run(main(), 40)


def test_a_wrong_password_never_connects_and_never_blocks(tmp_path: Path) -> None:
    async def main() -> None:
        with NatsServer(tmp_path, extra=_USERS.format(password="right")) as server:
            connection = await connect(
                server.settings,
                name="cp",
                user="control",
                password="wrong",
                inbox_prefix="_INBOX_control",
            )
            assert not connection.connected
            assert not await connection.wait_connected(0.3)
            await connection.close()

    run(main())


def test_log_25_a_missing_right_is_told_at_once_and_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        with NatsServer(tmp_path, extra=_USERS.format(password="c")) as server:
            control = await connect(
                server.settings, name="cp", user="control", password="c", inbox_prefix="_INBOX_c"
            )
            await ensure_streams(control, "yard-1", 1)
            limited = await connect(
                server.settings,
                name="limited",
                user="limited",
                password="l",
                inbox_prefix="_INBOX_limited",
            )
            log = JetStreamLog(limited, source="/agent/n1", budget=BUDGET, times=TIMES)
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(Misconfigured, match=r"(?i)permissions violation"):
                await log.append(drafts.model("theirs", 0), epoch=1)
            with pytest.raises(Misconfigured):
                await ensure_streams(limited, "yard-1", 1)
            assert loop.time() - began < BUDGET.ack_timeout_s
            done = await log.append(drafts.model("mine", 0), epoch=1)
            assert done.seqs == (1,)

            allowed = log.follow(["yard.evt.plan.n1"])
            assert (await asyncio.wait_for(allowed.next(), 5)).synced
            refused = log.follow(["yard.evt.plan.n2"])
            with pytest.raises(Misconfigured):
                await asyncio.wait_for(refused.next(), 5)
            await allowed.close()
            await refused.close()
            await limited.close()
            await control.close()

    run(main(), 30)


def test_a_request_with_a_foreign_reply_subject_is_not_answered(tmp_path: Path) -> None:
    """Else whoever may ask could make this process publish its answer on any subject it may write."""

    async def main() -> None:
        with NatsServer(tmp_path) as server:
            agent = await open_connection(server.url, "agent")
            caller = await open_connection(server.url, "caller")
            await ensure_streams(agent, "yard-1", 1)
            asked: list[str] = []

            async def answer(request: LogsRequest) -> LogsReply:
                asked.append(request.replica)
                return LogsReply()

            wire = JetStreamWire(agent)
            serving = await wire.serve("replica_logs", "n1", LogsRequest, answer)
            body = b'{"replica":"r"}'

            async def refused() -> bool:
                for reply in ("yard.evt.model.stolen", "_INBOX.x"):
                    await caller.publish_with_reply("yard.rpc.replica_logs.n1", body, reply)
                return wire.refused >= 2

            await until(refused, "the requests to arrive")
            reply = await JetStreamWire(caller).request(
                "replica_logs", "n1", LogsRequest(replica="fine"), LogsReply, timeout_s=2
            )
            assert reply == LogsReply()
            assert asked == ["fine"]
            log = JetStreamLog(caller, source="/cp/1", budget=BUDGET, times=TIMES)
            assert (await log.identity()).last_seq == 0
            await serving.close()
            await caller.close()
            await agent.close()

    run(main())


def test_a_hundred_subscriptions_and_requests_survive_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        with NatsServer(tmp_path) as server:
            connection = await open_connection(server.url, "one")
            heard: set[str] = set()
            for n in range(100):
                await connection.subscribe(f"x.{n}", lambda m: heard.add(m.subject))
            await asyncio.to_thread(server.restart)
            await until(lambda: connection.connected, "the connection")

            async def all_heard() -> bool:
                for n in range(100):
                    await connection.publish(f"x.{n}", b"")
                return len(heard) == 100

            await until(all_heard, "every subscription to be heard")
            await connection.close()

    run(main())


def test_closing_while_the_server_is_away_is_short(tmp_path: Path) -> None:
    async def main() -> None:
        with NatsServer(tmp_path) as server:
            connection = await open_connection(server.url, "one")
            await asyncio.to_thread(server.kill)
            await until(lambda: not connection.connected, "the loss")
            await asyncio.wait_for(connection.close(), 2)
            server.start()
            again = await connect(
                NatsSettings(url=server.url), name="n", user="", password="", inbox_prefix=""
            )
            assert again.connected
            await again.close()

    run(main())


def test_log_06_what_was_queued_when_the_line_broke_is_not_sent_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        with NatsServer(tmp_path) as server:
            async with TcpProxy("127.0.0.1", server.port) as proxy:
                connection = await open_connection(proxy.url, "one")
                await ensure_streams(connection, "yard-1", 1)
                client = connection._client
                assert client is not None
                # The moment between queueing and writing, made to last.
                await client._send_command(b"PUB yard.evt.model.zombie 2\r\n{}\r\n")
                assert client.pending_data_size > 0
                proxy.cut_once()
                await until(lambda: connection.generation == 2, "another connection")
                log = JetStreamLog(connection, source="/cp/1", budget=BUDGET, times=TIMES)
                assert (await log.append(drafts.model("m", 0), epoch=1)).seqs == (1,)
                await connection.close()

    run(main())


def test_a_reconnect_is_followed_at_once_not_after_missed_heartbeats(tmp_path: Path) -> None:
    async def main() -> None:
        with NatsServer(tmp_path) as server:
            async with TcpProxy("127.0.0.1", server.port) as proxy:
                connection = await open_connection(proxy.url, "one")
                await ensure_streams(connection, "yard-1", 1)
                patient = PullTimes(heartbeat_s=8.0, expires_s=20.0)
                log = JetStreamLog(connection, source="/cp/1", budget=BUDGET, times=patient)
                follower = log.follow(["yard.evt.>"])
                commands = log.follow_commands(after=0)
                await follower.next()
                reading = asyncio.create_task(commands.next())
                await asyncio.sleep(0)
                proxy.cut_once()
                await until(lambda: connection.generation == 2, "another connection")
                await log.append(drafts.model("m", 0), epoch=1)
                await log.send("a", Command(id="c", body=ModelRemove(model="m")))
                items: list[int] = []
                while not items:
                    items += [i.seq for i in (await asyncio.wait_for(follower.next(), 3)).items]
                assert [c.id for c in await asyncio.wait_for(reading, 3)] == ["c"]
                await follower.close()
                await commands.close()
                await connection.close()

    run(main())
