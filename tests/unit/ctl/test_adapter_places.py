"""`adapter load`, `unload`, `holders`, `list` and `show`: who is asked, what is printed, how it ends."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.ctl import adapterplaces, adapterslots, main
from controlplane.ctl.connect import Api, Place
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas.adapterasks import (
    AdapterHolders,
    Holder,
    LoadAdapter,
    SlotsAnswer,
    SlotsRequest,
    UnloadAdapter,
)

SINCE = datetime.now(UTC) - timedelta(hours=3, minutes=20)
SQL = {
    "name": "sql", "aliases": ["tables"], "base": "qwen", "phase": "ready", "rank": 16,
    "since": SINCE.isoformat(), "version": "0123abcd4567", "bytes": 4 * 1024**2,
    "event": {"type": "adapter.ready", "time": SINCE.isoformat(), "actor": "admin"},
}  # fmt: skip
OTHER = {**SQL, "name": "chat", "aliases": [], "base": "aya", "phase": "reading"}
REPLICAS = [
    {"id": f"r-{n}", "node": f"n{n}", "model": "qwen", "phase": "ready", "adapter_slots": 4}
    for n in (1, 2)
]
SLOT = {"adapter": "sql", "version": "0123abcd4567", "since": SINCE.isoformat()}

Ask = LoadAdapter | UnloadAdapter | AdapterHolders
Answer = Callable[[Ask], SlotsAnswer]


def holder(replica: str, **more: Any) -> Holder:
    more = {"state": "loaded", "how": "loaded", "since": SINCE, **more}
    return Holder(replica=replica, model="qwen", adapter="sql", version="0123abcd4567", **more)


class Yard:
    """What the API tells, the agents that answer, and yardctl beside them."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.resources: dict[str, list[dict[str, Any]]] = {
            "/v1/adapters": [SQL, OTHER],
            "/v1/models": [{"name": "qwen", "aliases": ["q"]}, {"name": "bare"}],
            "/v1/replicas": list(REPLICAS),
            "/v1/slots": [{"node": "n1", "replica": "r-1", "loaded": [SLOT]}],
        }
        self.agents: dict[str, Answer] = {}
        self.asked: list[tuple[str, Ask]] = []
        self._capsys = capsys

    def api(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/doctor":
            return httpx.Response(200, json={"log_seq": 1, "leader": None, "findings": []})
        found = self.resources[request.url.path]
        return httpx.Response(200, json={"data": found, "applied_seq": 1})

    def ctl(self, *arguments: str, expect: int = 0) -> tuple[list[str], list[str]]:
        """The lines of stdout and of stderr."""
        code = main.main(["adapter", *arguments])
        out, err = self._capsys.readouterr()
        assert code == expect, f"{code}: {out}{err}"
        assert "fault of yardctl" not in err
        return out.splitlines(), err.splitlines()

    @contextlib.asynccontextmanager
    async def open_api(self, _: Place) -> AsyncIterator[Api]:
        transport = httpx.MockTransport(self.api)
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            yield Api(client, "http://yard")

    @contextlib.asynccontextmanager
    async def open_wire(self, _: Place) -> AsyncIterator[MemoryWire]:
        log = MemoryLog(MemoryBroker())
        wire = MemoryWire(log.connection)
        async with contextlib.AsyncExitStack() as serving:
            for node, answer in self.agents.items():
                subscription = await wire.serve(
                    adapterslots.WHAT, node, SlotsRequest, self._agent(node, answer)
                )
                serving.push_async_callback(subscription.close)
            yield wire

    def _agent(self, node: str, answer: Answer) -> Any:
        async def serve(request: SlotsRequest) -> SlotsAnswer:
            assert request.wait_s <= adapterslots.WAIT_S
            self.asked.append((node, request.ask))
            return answer(request.ask)

        return serve


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Yard:
    made = Yard(capsys)
    monkeypatch.setattr(main, "open_api", made.open_api)
    monkeypatch.setattr(adapterplaces, "open_api", made.open_api)
    monkeypatch.setattr(adapterplaces, "open_wire", made.open_wire)
    monkeypatch.setattr(adapterslots, "PAUSE_S", 0.001)
    monkeypatch.setenv("YARD_DATA", "/nowhere")
    return made


def scripted(*answers: SlotsAnswer) -> Answer:
    """These, one after another, the last for ever; holders are asked beside."""
    left: list[SlotsAnswer] = list(answers)

    def answer(_: Ask) -> SlotsAnswer:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def holding(held: Sequence[Holder], change: SlotsAnswer | None = None) -> Answer:
    def answer(ask: Ask) -> SlotsAnswer:
        if isinstance(ask, AdapterHolders):
            return SlotsAnswer(status="done", holders=tuple(held))
        return change or SlotsAnswer(status="done")

    return answer


# Holders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sql", "tables", "qwen:sql", "q:sql", "q:tables"])
def test_holders_are_the_word_of_every_agent(yard: Yard, name: str) -> None:
    used = holder("r-1", uses=2, gateways=("gw-1",), idle_s=0.0)
    yard.agents = {
        "n2": holding([holder("r-2", how="person")]),
        "n1": holding([used]),
    }
    out, _ = yard.ctl("holders", name)
    assert [line.split()[:3] for line in out[1:]] == [["sql", "r-1", "n1"], ["sql", "r-2", "n2"]]
    assert "now" in out[1]
    assert "gw-1" in out[1]
    assert "never" in out[2]
    assert "by hand" in out[2]
    assert sorted(yard.asked, key=lambda asked: asked[0]) == [
        ("n1", AdapterHolders(adapter="sql")),
        ("n2", AdapterHolders(adapter="sql")),
    ]


def test_holders_as_json_have_their_node(yard: Yard) -> None:
    yard.agents = {"n1": holding([holder("r-1")]), "n2": holding([])}
    out, _ = yard.ctl("holders", "sql", "-o", "json")
    (row,) = json.loads("\n".join(out))
    assert (row["node"], row["replica"], row["how"]) == ("n1", "r-1", "loaded")


def test_without_a_name_every_adapter_is_asked_for(yard: Yard) -> None:
    yard.agents = {"n1": holding([]), "n2": holding([])}
    assert yard.ctl("holders")[0] == ["no adapter is loaded"]
    assert {ask for _, ask in yard.asked} == {AdapterHolders(adapter="")}


def test_a_silent_agent_is_told_and_what_others_said_is_shown(yard: Yard) -> None:
    yard.agents = {"n1": holding([holder("r-1")])}
    out, err = yard.ctl("holders", "sql", expect=3)
    assert "r-1" in out[1]
    assert err == ["yardctl: the agent of n2 does not answer; what is loaded there is not known"]


def test_nothing_is_known_when_no_agent_answers(yard: Yard) -> None:
    out, err = yard.ctl("holders", "sql", expect=3)
    assert out == []
    assert len(err) == 2


def test_only_nodes_whose_replicas_load_adapters_are_asked(yard: Yard) -> None:
    yard.resources["/v1/replicas"] = [
        {**REPLICAS[0], "adapter_slots": 0},
        {**REPLICAS[1], "phase": "stopped"},
    ]
    assert yard.ctl("holders", "sql")[0] == ["sql is loaded nowhere"]
    assert yard.asked == []


def test_a_removed_adapter_that_is_still_loaded_is_found_by_its_name(yard: Yard) -> None:
    yard.resources["/v1/adapters"] = []
    yard.agents = {"n1": holding([holder("r-1", state="leaving")]), "n2": holding([])}
    assert "leaving" in yard.ctl("holders", "sql")[0][1]
    yard.agents = {"n1": holding([]), "n2": holding([])}
    assert "there is no adapter 'sql'" in yard.ctl("holders", "sql", expect=1)[1][0]


# Load -------------------------------------------------------------------------------------------------


def test_a_load_goes_to_every_ready_replica_of_the_base(yard: Yard) -> None:
    yard.resources["/v1/replicas"] += [
        {**REPLICAS[0], "id": "r-3", "model": "aya"},
        {**REPLICAS[0], "id": "r-4", "phase": "draining"},
        {**REPLICAS[0], "id": "r-5", "adapter_slots": 0},
    ]
    yard.agents = {"n1": holding([]), "n2": holding([])}
    out, _ = yard.ctl("load", "tables")
    assert out == ["sql: loaded in r-1 on n1", "sql: loaded in r-2 on n2"]
    assert sorted(ask.replica for _, ask in yard.asked if isinstance(ask, LoadAdapter)) == [
        "r-1",
        "r-2",
    ]


def test_a_load_that_takes_long_is_asked_for_again_until_it_is_done(yard: Yard) -> None:
    yard.agents = {
        "n1": scripted(
            SlotsAnswer(status="loading"),
            SlotsAnswer(status="waiting", sentence="all 4 places are in use"),
            SlotsAnswer(status="waiting", sentence="all 4 places are in use"),
            SlotsAnswer(status="done"),
        )
    }
    out, err = yard.ctl("load", "sql", "--replica", "r-1")
    assert out == ["sql: loaded in r-1 on n1"]
    assert err == ["r-1 on n1: it is being loaded", "r-1 on n1: all 4 places are in use"]
    assert yard.asked == [("n1", LoadAdapter(replica="r-1", adapter="sql"))] * 4


def test_a_load_that_does_not_end_in_time_goes_on(yard: Yard) -> None:
    yard.agents = {"n1": scripted(SlotsAnswer(status="loading"))}
    _, err = yard.ctl("load", "sql", "--replica", "r-1", "--timeout", "0.05", expect=3)
    assert "it goes on: yardctl adapter holders" in err[-1]


@pytest.mark.parametrize(
    ("code", "expect"),
    [
        ("load_refused", 1),
        ("rank_too_high", 1),
        ("route_off", 1),
        ("conflict", 2),
        ("not_found", 2),
    ],
)
def test_what_was_tried_and_failed_is_1_and_a_no_is_2(yard: Yard, code: str, expect: int) -> None:
    no = SlotsAnswer(status="refused", code=code, sentence="the engine\nsaid no")
    yard.agents = {"n1": scripted(no), "n2": holding([])}
    out, err = yard.ctl("load", "sql", expect=expect)
    assert out == ["sql: loaded in r-2 on n2"]
    assert err == [f"yardctl: r-1 on n1: the engine said no [{code}]"]


def test_of_several_ends_the_worst_is_the_exit_code(yard: Yard) -> None:
    yard.resources["/v1/replicas"].append({**REPLICAS[0], "id": "r-3", "node": "n3"})
    yard.agents = {
        "n1": scripted(SlotsAnswer(status="refused", code="conflict", sentence="it drains")),
        "n2": scripted(SlotsAnswer(status="refused", code="load_failed", sentence="no memory")),
    }
    _, err = yard.ctl("load", "sql", expect=1)
    assert [line.strip().removeprefix("yardctl: ")[:3] for line in err] == ["r-2", "r-1", "r-3"]
    assert "whether it heard is not known" in err[2]


def test_a_load_as_json_tells_what_became_of_each(yard: Yard) -> None:
    yard.agents = {"n1": holding([])}
    out, _ = yard.ctl("load", "sql", "-o", "json", expect=3)
    told = {row["replica"]: row["state"] for row in json.loads("\n".join(out))}
    assert told == {"r-1": "done", "r-2": "silent"}


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ([], "yardctl model load qwen"),
        ([{**REPLICAS[0], "phase": "starting"}], "yardctl model load qwen"),
        ([{**REPLICAS[0], "adapter_slots": 0}], "r-1 of qwen load no adapters"),
    ],
)
def test_without_a_replica_to_load_it_into_that_is_said(
    yard: Yard, replicas: list[dict[str, Any]], says: str
) -> None:
    yard.resources["/v1/replicas"] = replicas
    assert says in " ".join(yard.ctl("load", "sql", expect=1)[1])


def test_unknown_names_are_told(yard: Yard) -> None:
    assert "no adapter 'x'" in yard.ctl("load", "x", expect=1)[1][0]
    assert "no replica 'r-9'" in yard.ctl("load", "sql", "--replica", "r-9", expect=1)[1][0]
    assert "no adapter 'x'" in yard.ctl("show", "x", expect=1)[1][0]


# Unload -----------------------------------------------------------------------------------------------


def test_scn_d8_an_unload_goes_to_whoever_holds_it_and_says_what_it_waits_for(yard: Yard) -> None:
    going = [
        SlotsAnswer(status="waiting", sentence="2 requests use it"),
        SlotsAnswer(status="done"),
    ]

    def first(ask: Ask) -> SlotsAnswer:
        if isinstance(ask, AdapterHolders):
            return SlotsAnswer(status="done", holders=(holder("r-1", uses=2),))
        return going.pop(0)

    yard.agents = {"n1": first, "n2": holding([])}
    out, err = yard.ctl("unload", "sql")
    assert err == ["r-1 on n1: 2 requests use it"]
    assert out == ["sql: unloaded in r-1 on n1"]
    asked = [ask for _, ask in yard.asked if not isinstance(ask, AdapterHolders)]
    assert asked == [UnloadAdapter(replica="r-1", adapter="sql")] * 2


def test_an_unload_by_force_says_so_to_the_one_replica(yard: Yard) -> None:
    yard.agents = {"n2": holding([])}
    yard.ctl("unload", "sql", "--replica", "r-2", "--force")
    assert yard.asked == [("n2", UnloadAdapter(replica="r-2", adapter="sql", force=True))]


def test_an_unload_that_ended_between_two_asks_is_done(yard: Yard) -> None:
    """An agent that has it no more says so; to the first ask that is a no, to a later one the end of what was asked."""
    gone = SlotsAnswer(status="refused", code="not_found", sentence="sql is not loaded in r-1")
    yard.agents = {"n1": scripted(SlotsAnswer(status="waiting"), gone)}
    out, err = yard.ctl("unload", "sql", "--replica", "r-1")
    assert out == ["sql: unloaded in r-1 on n1"]
    assert err == ["r-1 on n1: it is unloaded once nobody uses it"]
    yard.agents = {"n1": scripted(gone)}
    _, err = yard.ctl("unload", "sql", "--replica", "r-1", expect=2)
    assert err == ["yardctl: r-1 on n1: sql is not loaded in r-1 [not_found]"]


def test_what_is_loaded_nowhere_needs_no_unload(yard: Yard) -> None:
    yard.agents = {"n1": holding([]), "n2": holding([])}
    assert yard.ctl("unload", "sql")[0] == ["sql is loaded nowhere"]
    assert yard.ctl("unload", "sql", "-o", "json")[0] == ["[]"]
    assert "none of that name is loaded" in yard.ctl("unload", "x", expect=1)[1][0]


def test_an_unload_with_a_silent_agent_is_not_known_to_be_whole(yard: Yard) -> None:
    yard.agents = {"n1": holding([holder("r-1")])}
    out, err = yard.ctl("unload", "sql", expect=3)
    assert out == ["sql: unloaded in r-1 on n1"]
    assert "the agent of n2 does not answer" in err[0]


def test_a_silent_agent_is_told_beside_an_unload_that_was_refused(yard: Yard) -> None:
    no = SlotsAnswer(status="refused", code="conflict", sentence="it drains")
    yard.agents = {"n1": holding([holder("r-1")], no)}
    _, err = yard.ctl("unload", "sql", expect=2)
    assert err[0] == "yardctl: r-1 on n1: it drains [conflict]"
    assert "the agent of n2 does not answer" in err[1]


# List and show ----------------------------------------------------------------------------------------


def test_a_list_tells_states_and_places_by_base(yard: Yard) -> None:
    out, _ = yard.ctl("list")
    assert [line.split()[:3] for line in out[1:]] == [
        ["chat", "aya", "reading"],
        ["sql", "qwen", "ready"],
    ]
    assert "1/2" in out[2]
    assert len(yard.ctl("list", "--base", "qwen")[0]) == 2
    (row,) = json.loads("\n".join(yard.ctl("list", "--base", "qwen", "-o", "json")[0]))
    assert row == SQL


def test_a_base_may_be_named_by_its_alias_and_has_to_be_there(yard: Yard) -> None:
    assert yard.ctl("list", "--base", "q") == yard.ctl("list", "--base", "qwen")
    assert "bare has no adapter; add one" in yard.ctl("list", "--base", "bare")[0][0]
    assert "no model 'x'" in yard.ctl("list", "--base", "x", expect=1)[1][0]


def test_the_yard_at_a_glance_counts_adapters_by_state(
    yard: Yard, capsys: pytest.CaptureFixture[str]
) -> None:
    for resource in ("nodes", "cards", "replicas", "activations"):
        yard.resources[f"/v1/{resource}"] = []
    yard.resources["/v1/models"] = []
    yard.resources["/v1/adapters"] = [OTHER, SQL, {**SQL, "name": "three"}]
    assert main.main(["status"]) == 0
    assert "adapters 2 ready, 1 reading" in capsys.readouterr().out.splitlines()
    yard.resources["/v1/adapters"] = []
    assert main.main(["status"]) == 0
    assert "adapters" not in capsys.readouterr().out
    assert main.main(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapters"] == []


def test_an_empty_list_says_how_to_add_one(yard: Yard) -> None:
    yard.resources["/v1/adapters"] = []
    assert "yardctl adapter add" in yard.ctl("list")[0][0]
    assert yard.ctl("list", "-o", "json")[0] == ["[]"]


def test_one_is_shown_with_its_places(yard: Yard) -> None:
    out, _ = yard.ctl("show", "qwen:sql")
    assert out[0].split() == ["name:", "sql"]
    assert out[-2:] == ["loaded in:", "  r-1 on n1  asked for, 3h ago"]
    shown = json.loads("\n".join(yard.ctl("show", "sql", "-o", "json")[0]))
    assert shown["loaded"] == [{"node": "n1", "replica": "r-1", **SLOT}]
    assert shown["bad"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("add", "sql"),
        ("add", "sql", "--base", "qwen"),
        ("add", "", "--base", "qwen", "--source", "a/b"),
        ("add", "sql", "--base", "", "--source", "a/b"),
        ("add", "sql", "--base", "qwen", "--source", "nowhere"),
        ("show", ""),
        ("rm", ""),
        ("pin", ""),
        ("load", ""),
        ("unload", "sql", "--timeout", "soon"),
        ("list", "-o", "yaml"),
    ],
)
def test_what_cannot_be_meant_is_64(yard: Yard, arguments: tuple[str, ...]) -> None:
    yard.ctl(*arguments, expect=64)


def test_add_rm_and_pin_carry_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, yard: Yard, tmp_path: Path
) -> None:
    from controlplane.ctl import adapteracts

    sent: list[Any] = []

    async def noted(_: Place, *asked: Any, **more: Any) -> None:
        sent.append((*asked, more))

    for name in ("add", "remove", "pin"):
        monkeypatch.setattr(adapteracts, name, noted)
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    yard.ctl(
        "add", "sql", "--base", "qwen", "--source", "./sql", "--pin", "--alias", "a", "--alias",
        "b", "--trust-base", "--no-wait",
    )  # fmt: skip
    yard.ctl("add", "sql", "--base", "qwen", "--source", "a/b")
    yard.ctl("rm", "sql")
    yard.ctl("pin", "sql")
    yard.ctl("unpin", "sql")
    body, _, wait_s, output, _ = sent[0]
    assert (body.source, body.pinned, body.aliases, body.trust_base) == (
        str(tmp_path / "sql"),
        True,
        ["a", "b"],
        True,
    )
    assert (wait_s, output) == (None, "table")
    assert (sent[1][0].source, sent[1][2]) == ("a/b", 900.0)
    assert [asked[0] for asked in sent[2:]] == ["sql"] * 3
    assert [asked[-1].get("pinned") for asked in sent[2:]] == [None, True, False]


def test_asks_of_many_agents_run_at_once(yard: Yard) -> None:
    """Each of them waits until all have been asked."""
    nodes = [f"n{n}" for n in range(20)]
    yard.resources["/v1/replicas"] = [{**REPLICAS[0], "id": f"r-{n}", "node": n} for n in nodes]
    asked = asyncio.Barrier(len(nodes))

    def agent(*_: Any) -> Any:
        async def serve(request: SlotsRequest) -> SlotsAnswer:
            await asked.wait()
            return SlotsAnswer(status="done")

        return serve

    yard._agent = agent  # type: ignore[method-assign]
    yard.agents = {node: holding([]) for node in nodes}
    assert len(yard.ctl("load", "sql")[0]) == 20
