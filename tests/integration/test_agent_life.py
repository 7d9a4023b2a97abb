"""One agent, real processes, the log in memory: start, ready, drain, stop, and the memory back."""

import httpx

from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from tests.support.agent_yard import Hand, a_stop, an_item, beside, running_agent
from tests.support.aio import run


def test_a_planned_replica_starts_is_ready_drains_and_gives_its_memory_back(tmp_path):
    async def story():
        broker = MemoryBroker()
        log = MemoryLog(broker, source="/agent/n1")
        hand_log = MemoryLog(broker)
        hand = Hand(hand_log, MemoryWire(hand_log.connection))
        async with (
            beside(hand.watch(), hand.beacons()),
            running_agent(tmp_path / "nodeagent", log, MemoryWire(log.connection)),
        ):
            item = an_item("r-1", "--load-s", "0.1", "--memory-mib", "8")
            await hand.plan(item)
            ready = await hand.phase("r-1", "ready")
            assert ready.endpoint is not None
            assert ready.has_key
            assert ready.load_s is not None
            assert "/v1/chat/completions" in ready.paths
            async with httpx.AsyncClient() as client:
                refused = await client.get(f"{ready.endpoint}/v1/models")
                assert refused.status_code == 401
                allowed = await client.get(
                    f"{ready.endpoint}/v1/models",
                    headers={"Authorization": "Bearer key-of-r-1"},
                )
                assert allowed.status_code == 200
            await hand.expect(
                lambda: hand.replica("r-1").measured_memory_bytes, "the measured memory"
            )
            await hand.plan(an_item("r-1", stop=a_stop()))
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.stop_decision == "d-1"
            await hand.expect(lambda: "card.released" in hand.types(), "card.released")
            card = hand.card()
            assert card.leases == ()
            await hand.plan()
        kinds = [t for t in hand.types() if t not in ("card.measured", "plan.changed")]
        assert kinds == [
            "node.started",
            "card.leased",
            "replica.starting",
            "replica.ready",
            "replica.ready",
            "replica.draining",
            "replica.stopped",
            "card.released",
            "node.stopped",
        ]

    run(story())
