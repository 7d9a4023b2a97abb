"""kill -9 of each part of a yard under load: what clients see, and what the log says afterwards."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from nodeagent import processes
from tests.support.aio import run, until
from tests.system.load import Loop
from tests.system.yard import SystemYard, chat, client, scripted_model, system_yard


async def load_model(yard: SystemYard, name: str, gateway: int = 0) -> int:
    """Asks once, so that the model is ready; returns the pid of its engine."""
    async with client(yard.gateway(gateway)) as http:
        answer = await http.post("/v1/chat/completions", json=chat(name))
        assert answer.status_code == 200, answer.text
    ready = await yard.event("replica.ready", lambda e: e.state.model == name)
    return ready.state.pid


async def one_live_engine(yard: SystemYard, name: str) -> None:
    """No engine without an owner, no duplicate: processes carrying a launch id = live replicas in the log."""
    live = {
        e.key[1]
        for e in latest(yard, "replica").values()
        if e.state is not None and e.state.phase in ("starting", "ready", "draining")
    }
    # An engine's launcher leaves a moment after the log told the engine's end.
    await until(lambda: engines_of(yard.data) == live, "processes and log to agree about what runs")
    of_model = [r for r in live if latest(yard, "replica")[("local", r)].state.model == name]
    assert len(of_model) == 1


def latest(yard: SystemYard, noun: str) -> dict[tuple[str, ...], object]:
    return {e.key: e for e in yard.events if e.noun == noun}


def engines_of(data: Path) -> set[str]:
    """Launch ids of living processes of this data folder: engines by their mark, launchers by their lock."""
    folder = data / "nodeagent" / "replicas"
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            mark = processes.mark_of(int(entry.name))
            if mark is not None and Path(mark.folder).parent == folder:
                found.add(mark.launch)
            lock = (entry / "fd" / "0").readlink()
        except OSError:
            continue
        if lock.name == processes.LOCK and lock.parent.parent == folder:
            found.add(lock.parent.name)
    return found


@pytest.mark.timeout(120)
def test_inv_6_nats_control_plane_and_agent_may_die_under_load(tmp_path: Path) -> None:
    """All answers stay 200, the engine is untouched, and the log is whole afterwards."""

    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(scripted_model("steady", "--load-s", "0.2"))
            engine = await load_model(yard, "steady")
            async with Loop(yard.gateway(), "steady") as loop:
                await loop.more_answers(20)
                for part in ("nats", "controlplane", "nodeagent"):
                    old = yard.kill(part)
                    await until(
                        lambda part=part, old=old: (
                            yard.running.supervisor.pids.get(part, old) != old
                        ),
                        f"{part} to be started again",
                    )
                    await loop.more_answers(40)
            assert loop.bad() == []
            os.kill(engine, 0)
            # The yard still works: a change is accepted and an unload is carried out.
            before = yard.position
            await yard.ctl("model", "unload", "steady")
            await yard.event("replica.stopped", after=before)
            await yard.event("card.released", after=before)
            await until(lambda: engines_of(yard.data) == set(), "the launcher to end too")

    run(story(), 110)


@pytest.mark.alone
@pytest.mark.timeout(90)
def test_inv_6_an_engine_that_dies_comes_back_and_streams_end_with_an_error(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(
                scripted_model("frail", "--load-s", "0.5", "--pace-s", "0.02", "--tokens", "10")
            )
            engine = await load_model(yard, "frail")
            async with Loop(yard.gateway(), "frail") as loop:
                await loop.more_answers(20)
                before = yard.position
                killed = time.monotonic()
                os.kill(engine, signal.SIGKILL)
                failed = await yard.event("replica.failed", after=before)
                assert failed.state.was_ready
                back = await yard.event("replica.ready", after=failed.seq)
                assert back.key != failed.key, "every restart is a new id"
                assert time.monotonic() - killed < 0.5 + 2.0
                await loop.more_answers(20)
            for answer in loop.bad():
                if answer.status == 200:
                    assert answer.error_frame, answer
                else:
                    assert answer.status == 503, answer
                    assert answer.code in ("model_loading", "start_failed"), answer
            await one_live_engine(yard, "frail")

    run(story(), 80)


@pytest.mark.alone
@pytest.mark.timeout(90)
def test_inv_6_a_gateway_that_dies_is_back_within_three_seconds(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, gateways=2) as yard:
            await yard.add(scripted_model("steady", "--load-s", "0.2"))
            await load_model(yard, "steady")
            async with (
                Loop(yard.gateway(0), "steady") as first,
                Loop(yard.gateway(1), "steady") as second,
            ):
                await first.more_answers(20)
                await second.more_answers(20)
                yard.kill("gateway")
                killed = time.monotonic()
                await first.more_answers(20)
                await second.more_answers(20)
            assert second.bad() == []
            assert all(a.status is None for a in first.bad()), "connection errors and nothing else"
            back = min(a.at for a in first.answers if a.at > killed and a.status == 200)
            assert back - killed < 3.0

    run(story(), 80)


@pytest.mark.timeout(120)
def test_scn_a10_the_agent_dies_during_a_load_and_the_next_one_owns_the_process(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(scripted_model("slow", "--load-s", "2"))
            async with client(yard.gateway()) as http:
                asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat("slow")))
                starting = await yard.event("replica.starting")
                yard.kill("nodeagent")
                answer = await asking
                assert answer.status_code == 200, answer.text
            assert [e.key for e in await yard.in_log("replica.ready")][-1] == starting.key, (
                "adopted, not restarted"
            )
            await one_live_engine(yard, "slow")

    run(story(), 110)


@pytest.mark.timeout(120)
def test_inv_4_the_leader_dies_at_starting_and_fifty_cold_requests_get_one_engine(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, gateways=2, controlplanes=2) as yard:
            await yard.add(scripted_model("cold", "--load-s", "3"))
            async with client(yard.gateway(0)) as one, client(yard.gateway(1)) as two:
                asking = [
                    asyncio.create_task(http.post("/v1/chat/completions", json=chat("cold")))
                    for _ in range(25)
                    for http in (one, two)
                ]
                await yard.event("replica.starting")
                leader = yard.of("leader.elected")[-1].state
                name = "controlplane" if leader.instance == "cp-1" else "controlplane-2"
                yard.kill(name)
                answers = await asyncio.gather(*asking)
            assert [a.status_code for a in answers] == [200] * 50
            assert len({e.key for e in yard.of("replica.starting")}) == 1
            assert len(await yard.in_log("replica.ready")) >= 1
            # At once: the record names this host and a dead pid, so nobody waits for silence.
            after = await yard.event("leader.elected", lambda e: e.state.pid != leader.pid)
            assert after.seq > yard.of("replica.starting")[0].seq
            await one_live_engine(yard, "cold")

    run(story(), 110)


@pytest.mark.timeout(90)
def test_log_23_a_gateway_serves_from_its_snapshot_while_nats_is_away(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(scripted_model("steady", "--load-s", "0.1"), scripted_model("cold"))
            await load_model(yard, "steady")
            snapshot = yard.data / "gateway" / "gw-1" / "routes.json"
            await until(
                lambda: snapshot.exists() and "ready" in snapshot.read_text(), "the snapshot"
            )
            nats = yard.kill("nats", signal.SIGSTOP)
            try:
                old = yard.kill("gateway")
                await until(
                    lambda: yard.running.supervisor.pids.get("gateway", old) != old,
                    "the gateway to be started again",
                )
                async with client(yard.gateway()) as http:

                    async def serves() -> bool:
                        try:
                            answer = await http.post("/v1/chat/completions", json=chat("steady"))
                        except httpx.HTTPError:
                            return False
                        return answer.status_code == 200

                    await until(serves, "the gateway to serve from its snapshot", 15)
                    refused = await http.post("/v1/chat/completions", json=chat("cold"))
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "yard_unavailable"
            finally:
                os.kill(nats, signal.SIGCONT)

    run(story(), 80)
