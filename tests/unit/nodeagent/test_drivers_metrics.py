"""Counters are read from the pages of known engines; strange pages tell nothing and break nothing."""

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.drivers.metrics import counters, samples
from schemas.beacons import EngineCounters

LLAMACPP = """
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
llamacpp:requests_deferred 3
llamacpp:n_decode_total 40
llamacpp:prompt_tokens_total 7
"""
VLLM = """
vllm:num_requests_running{engine="0",model_name="a } b"} 1.0
vllm:num_requests_running{engine="1",model_name="x"} 2.0
vllm:num_requests_waiting{engine="0"} 4.0 1395066363000
vllm:request_success_total{finished_reason="stop"} 5.0
"""


def test_llamacpp_s_page_gives_processing_plus_deferred_and_a_sign_of_work() -> None:
    assert counters(LLAMACPP) == EngineCounters(inflight=5, requests_total=47)


def test_vllm_s_labels_are_added_up() -> None:
    assert counters(VLLM) == EngineCounters(inflight=7, requests_total=5)


def test_an_engine_with_other_names_tells_nothing() -> None:
    assert counters("http_requests_total 5\n") == EngineCounters()
    assert counters("<html>") == EngineCounters()
    assert counters("llamacpp:requests_processing nan\n") == EngineCounters()


@given(st.text())
def test_no_page_breaks_it(text: str) -> None:
    samples(text)
    counters(text)


@given(
    st.dictionaries(
        st.sampled_from(["llamacpp:requests_processing", "llamacpp:requests_deferred"]),
        st.integers(0, 10_000),
        min_size=1,
    )
)
def test_inflight_is_the_sum_of_what_is_told(values: dict[str, int]) -> None:
    page = "".join(f"{name} {value}\n" for name, value in values.items())
    assert counters(page).inflight == sum(values.values())
