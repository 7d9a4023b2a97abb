"""The whole way of a demand through the leader's decisions, on the simulated yard."""

from tests.support.worlds import model, yard


def test_req_a2_a_request_loads_the_model_and_idle_time_gives_its_memory_back() -> None:
    y = yard().add(model("a", idle_s=60))
    y.settle()
    assert y.items() == []
    assert y.request("a") == "waits"
    y.until(lambda: y.phase("a") == "ready", 10)
    y.until(lambda: y.activation("a").answered, 5)
    assert y.events("activation") == [
        "activation.placing",
        "activation.loading",
        "activation.ready",
        "activation.ready",
    ]
    y.until(lambda: y.phase("a") == "idle", 70)
    y.until(lambda: not y.items(), 5)
    assert y.world.cards[("n1", "gpu0")].leases == ()
