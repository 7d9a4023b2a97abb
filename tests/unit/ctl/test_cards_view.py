"""How cards, leases and places are shown: every fact of a card is on its page, and its order is the line's."""

import io
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest

from controlplane.ctl import cardreads, cardview, leaseview
from controlplane.ctl.cardasking import CardName, named, parse_card, parse_cards
from controlplane.ctl.cardline import InLine
from controlplane.ctl.cardview import Yard, page, status_of
from controlplane.ctl.connect import Api
from controlplane.ctl.failures import UsageMistake
from controlplane.ctl.show import console
from schemas.card import Card, Claim, Lease, ProcessRef, Stowaway, Vm, Waiter
from schemas.cardasks import CardAnswer
from tests.support.aio import run

GIB = 1024**3
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
PROCESS = ProcessRef(pid=77, started=5, boot="b")


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def card(id_: str = "gpu0", **more: Any) -> Card:
    return Card(
        **{"node": "n1", "id": id_, "kind": "gpu", "memory_bytes": 24 * GIB, "rev": 3, **more}
    )


def row(state: Card) -> dict[str, Any]:
    event = {
        "type": "dev.modelyard.card.leased",
        "time": ago(5).isoformat(),
        "reason": "asked for",
        "change": {"type": "card.leased", "holder": "l-anna", "memory_bytes": 2 * GIB, "name": ""},
        "actor": "agent-n1",
        "seq": 9,
    }
    return {**json.loads(msgspec.json.encode(state)), "event": event}


def lease(holder: str, gib: float = 8, **more: Any) -> Lease:
    return Lease(holder=holder, memory_bytes=int(gib * GIB), fence=2, since=ago(120), **more)


FULL = card(
    device="GPU-abc",
    used_bytes=20 * GIB,
    other_bytes=GIB,
    measured_at=ago(4),
    leases=(
        lease("r-smol"),
        lease("r-parked", 0.5, kind="parked"),
        lease(
            "l-anna",
            2,
            kind="named",
            name="render",
            pinned=True,
            priority="hold",
            by="anna",
            process=PROCESS,
            expires_at=NOW + timedelta(hours=1),
        ),
        lease("l-gone", 1, kind="named", name="old", returning=True, stuck="pid 12 holds 1 GiB"),
        lease("l-slow", 1, kind="named", name="slow", leaving="l-train"),
    ),
    waiters=(
        Waiter(id="l-batch", name="night", since=ago(90), memory_bytes=GIB, priority="batch"),
        Waiter(
            id="l-train",
            name="train",
            since=ago(3),
            memory_bytes=24 * GIB,
            exclusive=True,
            cards=("gpu0", "gpu1"),
            waiting_for=("r-smol", "l-slow"),
            expires_at=NOW + timedelta(seconds=57),
            by="bob",
        ),
    ),
    claims=(Claim(id="c-1", name="paint", kind="app", since=ago(60), process=PROCESS, by="eve"),),
    stowaways=(Stowaway(pid=31, name="blender", memory_bytes=GIB, since=ago(3600)),),
)
REPLICAS = [
    {"id": "r-smol", "model": "smol", "phase": "ready", "measured_memory_bytes": 9 * GIB},
    {"id": "r-parked", "model": "big", "phase": "parked", "ram_bytes": 12 * GIB,
     "park_way": "sleep"},
]  # fmt: skip
ACTIVATIONS = [
    {"model": "other", "scope": "any", "phase": "waiting", "waiting_for": ["r-smol"], "reason": ""},
    {"model": "far", "scope": "any", "phase": "waiting", "waiting_for": ["r-else"], "reason": "x"},
    {"model": "done", "scope": "any", "phase": "ready", "waiting_for": []},
    {"model": "here", "scope": "n1~gpu0", "phase": "loading", "waiting_for": [], "reason": ""},
    {"model": "there", "scope": "n1~gpu1", "phase": "waiting", "waiting_for": ["r-smol"]},
    {"model": "ranked", "scope": "any", "phase": "waiting", "waiting_for": [],
     "reason": "all cards are kept",
     "report": {"misses": [{"rank": 5, "node": "n1", "cards": ["gpu0"]}]}},
]  # fmt: skip
NODES = [{"id": "n1", "cards": [{"id": "gpu0", "name": "Fast 9000", "mig": False}]}]
YARD = Yard(cards=[row(FULL)], replicas=REPLICAS, activations=ACTIVATIONS, nodes=NODES)


def test_req_d15_the_page_of_a_card_has_every_fact_about_it() -> None:
    assert page(YARD, row(FULL), NOW) == [
        "n1/gpu0: claimed (Fast 9000, GPU-abc)",
        "memory   24 GiB: 13.5 GiB given, 0 free, 1 GiB used by what has no lease; 20 GiB used, "
        "read 4s ago",
        "last     card.leased 5s ago: holder l-anna, memory 2 GiB; asked for (agent-n1)",
        "",
        "claims",
        "  c-1  paint  app, 1m ago, pid 77, by eve",
        "",
        "holders",
        "  smol  replica r-smol  8 GiB, ready, 2m ago",
        "  render  lease l-anna  2 GiB, hold, pinned, ends in 1h, 2m ago, pid 77, by anna",
        "  old  lease l-gone  1 GiB, interactive, stuck: pid 12 holds 1 GiB, 2m ago",
        "  slow  lease l-slow  1 GiB, interactive, leaves for l-train, 2m ago",
        "",
        "in line",
        "  1. train  l-train  the whole card, with gpu1, interactive: waits for r-smol (smol), "
        "l-slow (slow), 3s ago, gives up in 57s, by bob",
        "  2. night  l-batch  1 GiB, batch: waits for room, 1m ago",
        "",
        "models waiting",
        "  other: waits for r-smol (smol)",
        "  here: loading",
        "  ranked: all cards are kept",
        "",
        "parked",
        "  big  replica r-parked  keeps 512 MiB here, 12 GiB of RAM by sleep",
        "",
        "stowaways (no lease; never stopped)",
        "  pid 31 blender  1 GiB, 1h ago",
    ]


def test_an_empty_card_is_three_lines() -> None:
    lines = page(Yard(cards=[]), row(card()), NOW)
    assert lines == [
        "n1/gpu0: free (gpu)",
        "memory   24 GiB: 0 given, 24 GiB free; 0 used",
        "last     card.leased 5s ago: holder l-anna, memory 2 GiB; asked for (agent-n1)",
    ]


def test_a_vm_and_a_divided_card_say_so() -> None:
    nodes = [{"id": "n1", "cards": [{"id": "gpu0", "name": "Fast", "mig": True}]}]
    lines = page(
        Yard(cards=[], nodes=nodes), row(card(vm=Vm(name="win", since=ago(9), by="eve"))), NOW
    )
    assert lines[0] == "n1/gpu0: vm attaching (Fast, divided by MIG, left alone)"
    assert lines[-1] == "  win  waits for the card to be empty, 9s ago, by eve"


def test_parked_copies_on_the_cpu_card_are_told_by_their_ram() -> None:
    cpu = card("cpu", kind="cpu", leases=(lease("r-parked", 12, kind="parked"),))
    lines = page(Yard(cards=[], replicas=REPLICAS), row(cpu), NOW)
    assert lines[-1] == "  big  replica r-parked  12 GiB of RAM by sleep"
    assert lines[0].startswith("n1/cpu: free")


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (card(), "free"),
        (card(leases=(lease("r", kind="parked"),)), "free"),
        (card(leases=(lease("r"),)), "held"),
        (card(leases=(lease("l", kind="named", exclusive=True),)), "held"),
        (card(leases=(lease("l", kind="named", exclusive=True, pinned=True),)), "kept"),
        (card(leases=(lease("l", kind="named", pinned=True),)), "held"),
        (card(leases=(lease("l", kind="named", stuck="pid 1"),)), "stuck"),
        (card(waiters=(Waiter(id="l", since=NOW, memory_bytes=1),)), "waited for"),
        (card(stowaways=(Stowaway(pid=1, name="x", memory_bytes=1, since=NOW),)), "stowaway"),
        (card(claims=(Claim(id="c", name="x", kind="game", since=NOW),)), "claimed"),
        (card(vm=Vm(name="w", since=NOW)), "vm attaching"),
        (card(vm=Vm(name="w", since=NOW, attached=True)), "vm"),
    ],
)
def test_req_d06_one_word_says_what_keeps_others_from_a_card(state: Card, word: str) -> None:
    assert status_of(state) == word


def test_a_row_of_the_list_names_who_has_the_card() -> None:
    cells = dict(zip(cardview.CARD_COLUMNS, cardview.card_row(YARD, row(FULL)), strict=True))
    assert cells == {
        "card": "n1/gpu0",
        "state": "claimed",
        "holders": "claim paint, smol, render, old, slow",
        "in line": "2",
        "used": "20 GiB",
        "given": "13.5 GiB",
        "free": "0",
        "total": "24 GiB",
        "parked": "big",
    }


def test_leases_are_told_once_over_all_their_cards_and_the_line_with_them() -> None:
    both = {"kind": "named", "name": "train", "by": "bob"}
    found = leaseview.leases(
        [
            row(card("gpu0", leases=(lease("l-1", **both), lease("r-1")))),
            row(card("gpu1", leases=(lease("l-1", **both, leaving="l-2"),), waiters=FULL.waiters)),
            row(card("gpu0", node="n2", leases=(lease("r-2", 0.5, kind="parked"),))),
            row(card("cpu", node="n2", kind="cpu", leases=(lease("r-2", 9, kind="parked"),))),
        ]
    )
    told = [(one["node"], one["id"], one["cards"], one["state"]) for one in found]
    assert told == [
        ("n1", "l-1", ["gpu0", "gpu1"], "leaving"),
        ("n1", "l-batch", ["gpu1"], "waiting 2"),
        ("n1", "l-train", ["gpu1"], "waiting 1"),
        ("n1", "r-1", ["gpu0"], "held"),
        ("n2", "r-2", ["cpu"], "held"),
        ("n2", "r-2", ["gpu0"], "held"),
    ]
    assert json.dumps(found), "programs get it, too"


def test_a_lease_of_the_list_has_all_that_ends_it() -> None:
    one = next(x for x in leaseview.leases([row(FULL)]) if x["id"] == "l-anna")
    cells = dict(zip(leaseview.LEASE_COLUMNS, leaseview.lease_row(one, {}, NOW), strict=True))
    assert cells == {
        "id": "l-anna",
        "name": "render",
        "kind": "named",
        "cards": "n1/gpu0",
        "memory": "2 GiB",
        "priority": "hold",
        "pinned": "yes",
        "state": "held",
        "since": "2m",
        "expires": "in 1h",
        "process": "77",
        "by": "anna",
        "why": "",
    }
    stuck = next(x for x in leaseview.leases([row(FULL)]) if x["id"] == "l-gone")
    assert (stuck["state"], stuck["why"]) == ("stuck", "stuck: pid 12 holds 1 GiB")


# What is read -----------------------------------------------------------------------------------------

ANSWERS = {
    "/v1/cards": [row(FULL)],
    "/v1/cards/n1%2Fgpu0": row(FULL),
    "/v1/replicas": REPLICAS,
    "/v1/activations": ACTIVATIONS,
    "/v1/nodes": NODES,
}


def said(work: Callable[[Api], Awaitable[None]], capsys: pytest.CaptureFixture[str]) -> str:
    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        if path == "/v1/place":
            asked = json.loads(request.content)
            return httpx.Response(200, json={"data": {**PLACES, "asked": asked}})
        return httpx.Response(200, json={"data": ANSWERS[path]})

    async def story() -> None:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            await work(Api(client, "http://yard"))

    run(story())
    return capsys.readouterr().out


def test_lists_and_pages_are_printed_for_people_and_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = CardName("n1", "gpu0")
    listed = said(lambda api: cardreads.list_cards(api, "table"), capsys).splitlines()
    assert listed[0].split()[:2] == ["CARD", "STATE"]
    assert listed[1].startswith("n1/gpu0  claimed")
    (one,) = json.loads(said(lambda api: cardreads.list_cards(api, "json"), capsys))
    assert (one["status"], one["kept_by"], one["free_bytes"]) == ("claimed", "claim paint", 0)
    assert one["line"] == ["l-train", "l-batch"]
    assert [m["model"] for m in one["waiting_models"]] == ["other", "here", "ranked"]
    shown = said(lambda api: cardreads.show_card(api, name, "table", NOW), capsys)
    assert shown.splitlines() == page(YARD, row(FULL), NOW)
    assert json.loads(said(lambda api: cardreads.show_card(api, name, "json", NOW), capsys)) == one
    leases = said(lambda api: cardreads.list_leases(api, "table", NOW), capsys).splitlines()
    assert len(leases) == 1 + 7
    assert any("smol" in line and "r-smol" in line for line in leases)
    assert len(json.loads(said(lambda api: cardreads.list_leases(api, "json", NOW), capsys))) == 7


PLACES: dict[str, Any] = {
    "model": "m",
    "scope": "any",
    "sentence": "m would go to n1/gpu1 (rank 4, p): room for it",
    "candidates": [
        {"node": "n1", "cards": ["gpu1", "gpu2"], "profile": "p", "rank": 4, "reason": "drains",
         "victims": ["r-1"], "waiting_for": []},
        {"node": "n1", "cards": ["gpu0"], "profile": "p", "rank": 1, "reason": "", "resumes": "r-2",
         "victims": []},
        {"node": "n1", "cards": ["cpu"], "profile": "p", "rank": None, "reason": "is a cpu"},
    ],
}  # fmt: skip


def test_places_are_told_with_rank_or_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(lambda api: cardreads.show_places(api, "m", None, "table"), capsys).splitlines()
    assert lines[0] == PLACES["sentence"]
    assert [line.split() for line in lines[3:]] == [
        ["4", "n1/gpu1+gpu2", "p", "drains", "r-1"],
        ["1", "n1/gpu0", "p", "resumes", "r-2", "-"],
        ["no", "n1/cpu", "p", "is", "a", "cpu", "-"],
    ]
    name = CardName("n1", "gpu0")
    asked = json.loads(said(lambda api: cardreads.show_places(api, "m", name, "json"), capsys))
    assert asked["asked"] == {"model": "m", "card": "n1/gpu0"}


# What is typed ----------------------------------------------------------------------------------------


def test_a_card_is_named_with_its_node() -> None:
    assert parse_card("n1/gpu0") == CardName("n1", "gpu0")
    assert str(parse_card("a/b/gpu0")) == "a/b/gpu0"
    assert parse_card("a/b/gpu0").node == "a/b"
    for text in ("", "/", "gpu0", "n1/", "/gpu0"):
        with pytest.raises(UsageMistake, match="expected NODE/CARD"):
            parse_card(text)
    with pytest.raises(UsageMistake, match="of a, b"):
        parse_cards(["a/x", "b/x"])


def test_what_is_named_without_a_node_is_found_on_all() -> None:
    rows = [
        row(FULL),
        row(card("gpu1", leases=(lease("l-anna", kind="named", name="render"),))),
        row(card(node="n2", leases=(lease("l-9", kind="named", name="render"), lease("render")))),
    ]
    assert named(rows, "lease", "render") == (("n1", "l-anna"), ("n2", "l-9"))
    assert named(rows, "lease", "l-9") == (("n2", "l-9"),)
    assert named(rows, "lease", "train") == (("n1", "l-train"),)
    assert named(rows, "lease", "r-smol") == (), "an engine is unloaded, not released"
    assert named(rows, "claim", "paint") == (("n1", "c-1"),)
    assert named(rows, "claim", "c-1") == (("n1", "c-1"),)
    assert named(rows, "claim", "render") == ()


def test_a_terminal_sees_one_line_that_changes_and_nothing_left_behind() -> None:
    out = console(stderr=True)
    terminal = type(out)(file=io.StringIO(), force_terminal=True, width=80)
    with InLine("n1/gpu0", terminal) as line:
        line.tell(CardAnswer(status="waiting", waiting_for=("r-1",)))
        line.tell(CardAnswer(status="waiting"))
    written = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "n1/gpu0: waiting in line" in written
    # Whatever was drawn is taken away again: the line is erased last.
    assert written.rindex("\x1b[2K") > written.rindex("waiting")
