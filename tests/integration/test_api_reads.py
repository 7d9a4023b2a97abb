"""The read API of a whole control plane, over the log in memory, with a real server on a free port."""

from pathlib import Path

from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from tests.support.aio import run, until
from tests.support.controlplanes import add_command, api, leads, plane, running


def test_a_command_becomes_a_state_that_the_api_shows_with_its_cause(tmp_path: Path) -> None:
    async def story() -> None:
        broker = MemoryBroker()
        log = MemoryLog(broker)
        async with running(plane(log, MemoryWire(log.connection), tmp_path)) as control:
            await until(leads(control), "a leader")
            command = add_command("qwen/2.5:7b")
            await log.send("anna", command)
            async with api(control) as client:
                await until(lambda: command.id in control.leader.world.outcomes, "an outcome")
                seq = control.leader.world.head("command", command.id).seq
                answer = await client.get(
                    "/v1/models/qwen/2.5:7b", params={"min_seq": seq, "wait": "5s"}
                )
                assert answer.status_code == 200, answer.text
                body = answer.json()
                assert body["applied_seq"] >= seq
                assert body["data"]["name"] == "qwen/2.5:7b"
                assert body["data"]["event"]["actor"] == "anna"
                assert body["data"]["event"]["causationid"] == command.id
                outcome = (await client.get(f"/v1/commands/{command.id}")).json()["data"]
                assert outcome["status"] == "accepted"
                ready = await client.get("/readyz")
                assert ready.json() == {"ready": True, "findings": []}

    run(story())
