"""Counters are read from the pages of known engines; strange pages tell nothing and break nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.drivers.metrics import adapters_in_use, counters, samples
from schemas.adapternames import engine_name
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
    adapters_in_use(text)
    adapters_in_use(f"vllm:lora_requests_info{{{text}}} 1")


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


HEAD = "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
HEAD += "# TYPE vllm:lora_requests_info gauge\n"


def info(running: str, waiting: str, at: float | str, more: str = "") -> str:
    labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}{more}}} {at}\n"


def test_adapters_in_use_are_those_running_and_those_waiting() -> None:
    page = HEAD + info("a@00000000,b@11111111", "c@22222222", 1.7e9)
    assert adapters_in_use(page) == {"a@00000000", "b@11111111", "c@22222222"}


def test_of_all_combinations_that_ever_were_the_newest_counts() -> None:
    page = HEAD + info("old@00000000", "", 1.7e9) + info("new@00000000", "", "1.7000000009e+09")
    page += info("older@00000000", "", 1.6e9)
    assert adapters_in_use(page) == {"new@00000000"}
    # Both were so at that moment, as far as the page tells.
    assert adapters_in_use(info("a@00000000", "", 5) + info("b@00000000", "", 5)) == {
        "a@00000000",
        "b@00000000",
    }


def test_each_engine_of_a_page_has_its_own_newest() -> None:
    page = info("a@00000000", "", 9, ',engine="0"') + info("b@00000000", "", 3, ',engine="1"')
    assert adapters_in_use(page) == {"a@00000000", "b@00000000"}


def test_nothing_runs_when_the_engine_counts_nothing_though_the_last_combination_stays() -> None:
    idle = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    assert adapters_in_use(idle + HEAD + info("a@00000000", "", 9)) == frozenset()
    busy = idle.replace("running 0.0", "running 1.0")
    assert adapters_in_use(busy + HEAD + info("a@00000000", "", 9)) == {"a@00000000"}


@pytest.mark.parametrize(
    "page",
    [
        "",
        "vllm:num_requests_running 1.0\n",
        "vllm:num_requests_running 0.0\n",
        'vllm:lora_adapter_loaded{adapter_name="a@00000000",level="gpu"} 1\n',
    ],
)
def test_an_engine_that_does_not_tell_of_adapters_is_not_taken_for_idle(page: str) -> None:
    assert adapters_in_use(page) is None


def test_an_engine_that_tells_and_has_had_none_uses_none() -> None:
    assert adapters_in_use(HEAD) == frozenset()
    assert adapters_in_use(HEAD + info("", "", 5)) == frozenset()
    assert adapters_in_use(HEAD + info("a@00000000", "", "nan")) == frozenset()


@given(
    st.lists(
        st.text(
            st.sampled_from(',"\\ \u2028}') | st.characters(exclude_categories=["C"]), min_size=1
        ).filter(lambda name: name == name.strip() and "@" not in name),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
def test_no_name_in_use_is_missed_whatever_signs_it_holds(adapters: list[str]) -> None:
    names = [engine_name(adapter, "0123abcd4567", again) for again, adapter in enumerate(adapters)]
    joined = ",".join(names).replace("\\", "\\\\").replace('"', '\\"')
    found = adapters_in_use(info(joined, "", 1.7e9))
    assert found is not None
    assert found >= set(names)
