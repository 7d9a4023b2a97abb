"""Hundreds of adapters over a yard of three gateways and four engines: how often they are loaded, and by whom answered."""

from pathlib import Path

import pytest

from tests.support.aio import run
from tests.system.adapters import (
    ADAPTERS,
    GATEWAYS,
    PACED,
    REPLICAS,
    REQUESTS,
    Diary,
    Traffic,
    add_adapters,
    base_entry,
    lru_misses,
    replicas_ready,
    settings_for,
    zipf_trace,
)
from tests.system.hubs import tell
from tests.system.yard import system_yard

LIMIT = 8


def test_the_peer_misses_as_often_as_its_size_says() -> None:
    trace = zipf_trace(REQUESTS, ADAPTERS)
    assert trace == zipf_trace(REQUESTS, ADAPTERS)
    assert lru_misses(trace, len(ADAPTERS)) == len(set(trace)), "each once"
    assert lru_misses(trace, 0) == len(trace)
    assert lru_misses(["a", "b", "a", "c", "a", "b"], 2) == 4
    assert 500 < lru_misses(trace, LIMIT * REPLICAS) < 1000


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_req_b40_loads_stay_within_1_3_times_those_of_one_cache_that_knows_everything(
    tmp_path: Path,
) -> None:
    trace = zipf_trace(REQUESTS, ADAPTERS)
    best = lru_misses(trace, LIMIT * REPLICAS)

    async def story() -> None:
        async with system_yard(
            tmp_path, gateways=GATEWAYS, settings=settings_for(tmp_path, REPLICAS)
        ) as yard:
            await yard.add(base_entry(tmp_path, replicas=REPLICAS, limit=LIMIT, script=PACED))
            await add_adapters(yard, tmp_path / "adapters", ADAPTERS)
            await replicas_ready(yard, REPLICAS)
            traffic = Traffic([yard.gateway(n) for n in range(GATEWAYS)], trace)
            await traffic.run()
            diary = Diary(tmp_path / "diary")
            loads = len(diary.loads())
            tell(f"{loads} loads, at best {best}; {traffic.how()}")
            assert traffic.bad() == []
            assert traffic.wrong() == []
            assert all(answer.model == answer.adapter for answer in traffic.answers)
            assert diary.wrong() == []
            assert diary.evicted_in_use() == []
            assert diary.gone() == []
            assert diary.refused_loads() == [], "nothing was loaded twice, and nothing failed"
            assert loads <= 1.3 * best
            assert diary.most_loaded() <= LIMIT + 1
            assert traffic.how()["hit"] > 0.4 * REQUESTS

    run(story(), 290)
