"""What all cards come to for a demand without a place, said of thousands as it would be of each."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain import crowds, placement
from controlplane.domain.index import StepIndex
from controlplane.domain.placement import Demand, NoRoom, Verdict, Wait, place
from controlplane.domain.scene import Scene
from schemas.model import Model
from schemas.node import EngineInfo, NodeChanged
from tests.support.worlds import Yard, counting_ids, model, profile


def verdict(y: Yard, entry: Model, at_once: int, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    monkeypatch.setattr(placement, "JUDGED_AT_ONCE", at_once)
    index = StepIndex()
    index.sync(y.world)
    live = y.live()
    scene = Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )
    return place(scene, Demand(model=entry, wanted_at=y.now - timedelta(seconds=5)))


def full(nodes: int) -> Yard:
    """Every card of 8 GiB is taken by a model that keeps it; one of each node has 4 GiB and is free."""
    y = Yard()
    for n in range(nodes):
        y.node(f"n{n:02}", {"gpu0": 8, "gpu1": 8, "gpu2": 4})
    y.settle()
    for n in range(2 * nodes):
        y.add(model(f"m{n:02}", 7, minimum=1))
        y.advance(6, by=3)
    y.advance(30, by=10)
    assert sum(r.phase == "ready" for r in y.world.replicas.values()) == 2 * nodes
    return y


def test_only_those_told_by_name_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    y = full(10)
    entry = model("new", 6)
    y.add(entry)
    judged = 0
    judge = crowds.judge

    def counted(*args: object) -> object:
        nonlocal judged
        judged += 1
        return judge(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(crowds, "judge", counted)
    found = verdict(y, entry, 0, monkeypatch)
    assert isinstance(found, Wait)
    assert judged <= crowds.TOLD + 1
    assert found.report.counts == {"memory": 30}
    assert len(found.claimed) == 20, "the small ones are nobody's hope"
    assert found == verdict(y, entry, 10_000, monkeypatch)


def test_with_few_it_could_have_the_nearest_of_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One profile names its cards and is too large for each; of the other, six cards could be had."""
    y = full(3)
    profiles = [profile("p0", 9, card=("*/*",)), profile("p1", 5, card=("gpu",), priority=200)]
    entry = model("new", profiles=profiles)
    y.add(entry)
    found = verdict(y, entry, 0, monkeypatch)
    assert isinstance(found, Wait)
    assert [(c.profile, c.rank) for c in found.report.misses] == [("p1", 5)] * 6 + [
        ("p1", None)
    ] * 2
    assert found == verdict(y, entry, 10_000, monkeypatch)


def test_what_fits_nowhere_names_the_nearest_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    y = full(4)
    entry = model("new", 9)
    y.add(entry)
    found = verdict(y, entry, 0, monkeypatch)
    assert isinstance(found, NoRoom)
    assert found.report.counts == {"memory": 12}
    assert [c.cards for c in found.report.misses] == [("gpu0",)] * 4 + [("gpu1",)] * 4
    assert found == verdict(y, entry, 10_000, monkeypatch)


def test_cards_whose_engine_loads_no_adapters_are_of_another_sort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y = full(4)
    for n in range(4):
        engine = EngineInfo(name="vllm", version="1", card_kinds=("gpu",), adapters=n % 2 == 0)
        state = replace(y.world.nodes[f"n{n:02}"], engines=(engine,))
        y.append("node", (f"n{n:02}",), NodeChanged(), state)
    entry = model("new", profiles=[profile("p", 6, engine="vllm")], max_loaded_adapters=2)
    y.add(entry)
    found = verdict(y, entry, 0, monkeypatch)
    assert isinstance(found, Wait)
    assert found.report.counts == {"card": 6, "memory": 6}
    assert found == verdict(y, entry, 10_000, monkeypatch)
