"""The numbers a yard has when nobody says otherwise are those the documents promise."""

from schemas.model import Profile, Scaling
from schemas.settings import MIB, Settings


def test_req_a17_the_default_wait_is_45_seconds() -> None:
    assert Settings().gateway.wait_s == 45.0


def test_defaults_are_those_of_the_design() -> None:
    settings = Settings()
    cp, gateway, agent = settings.controlplane, settings.gateway, settings.nodeagent
    assert (Scaling().idle_timeout_s, cp.drain_timeout_s, agent.stop_grace_s) == (900, 60, 10)
    assert Profile(name="p", engine="command", memory_bytes=1).start_timeout_s == 600
    assert (gateway.beacon_s, cp.stale_gateway_s, agent.gateway_gone_s) == (1, 10, 10)
    assert (agent.beacon_s, cp.unreachable_after_s, cp.leader_silence_s) == (5, 30, 3)
    assert (cp.backoff_s, cp.backoff_max_s, cp.quarantine_after, cp.quarantine_s) == (
        15,
        300,
        5,
        1800,
    )
    assert (gateway.waiting_requests, gateway.waiting_bytes) == (1000, 256 * MIB)
    assert (gateway.body_limit_bytes, agent.engine_log_bytes) == (64 * MIB, 8 * MIB)
    assert (agent.port_first, agent.port_last, agent.port_rest_s) == (20000, 29999, 600)
    assert gateway.listen.endswith(":8080")
    assert cp.listen.endswith(":8081")
    assert settings.nats.url.endswith(":4222")
    assert agent.allow_commands is False
