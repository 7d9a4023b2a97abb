"""What is in use, and when that begins and ends."""

from gateway.domain.usage import Usage


def test_edges_are_the_first_and_the_last_of_a_replica() -> None:
    usage = Usage()
    assert usage.begin("m", "r-1")
    assert not usage.begin("m", "r-1")
    # The first on another replica of the same model is an edge of that replica.
    assert usage.begin("m", "r-2")
    assert dict(usage.by_replica) == {"r-1": 2, "r-2": 1}
    assert not usage.end("m", "r-1", 1.0, used=True)
    assert usage.end("m", "r-1", 2.0, used=True)
    assert usage.end("m", "r-2", 3.0, used=True)
    assert dict(usage.by_replica) == {}


def test_req_a10_every_use_sets_the_clock_again_by_its_last_byte() -> None:
    usage = Usage()
    for begun_s, ended_s in ((0.0, 1.0), (5.0, 9.0)):
        usage.begin("m", "r-1")
        assert usage.last_use_age_s(begun_s).get("m", 0.0) == 0.0
        usage.end("m", "r-1", ended_s, used=True)
    assert usage.last_use_age_s(10.0) == {"m": 1.0}


def test_req_a11_a_running_request_is_use_for_as_long_as_it_lasts() -> None:
    usage = Usage()
    usage.begin("m", "r-1")
    usage.end("m", "r-1", 1.0, used=True)
    usage.begin("m", "r-1")
    assert usage.last_use_age_s(1000.0) == {"m": 0.0}
    assert dict(usage.by_replica) == {"r-1": 1}


def test_a_request_that_moved_on_is_no_use() -> None:
    usage = Usage()
    usage.begin("m", "r-1")
    usage.end("m", "r-1", 5.0, used=False)
    assert usage.last_use_age_s(6.0) == {}


def test_a_model_that_left_the_catalog_is_forgotten() -> None:
    usage = Usage()
    usage.begin("m", "r-1")
    usage.end("m", "r-1", 5.0, used=True)
    usage.forget_model("m")
    assert usage.last_use_age_s(6.0) == {}
