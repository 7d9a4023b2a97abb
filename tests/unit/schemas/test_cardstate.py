"""What the state of a card means: free, kept, how much may be given; one definition each for both sides."""

import ast
from datetime import UTC, datetime
from pathlib import Path

import pytest

from schemas.card import Card, Claim, Lease, Stowaway, Vm, Waiter
from schemas.cardstate import free_bytes, held_bytes, is_free, is_kept, kept_by

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[3]


def card(**fields) -> Card:
    return Card(node="n1", id="gpu0", kind="gpu", memory_bytes=100, rev=1, **fields)


def lease(holder: str = "l-1", **fields) -> Lease:
    given = {"memory_bytes": 10, "fence": 1, "since": NOW, "kind": "named", **fields}
    return Lease(holder=holder, **given)


WAITER = Waiter(id="l-2", since=NOW, memory_bytes=1)
STOWAWAY = Stowaway(pid=7, name="blender", memory_bytes=1, since=NOW)
CLAIM = Claim(id="c-1", name="doom", kind="game", since=NOW)
VM = Vm(name="win", since=NOW)


def test_req_d6_a_card_is_free_without_lease_waiter_stowaway_claim_and_vm():
    assert is_free(card())
    assert not is_free(card(leases=(lease(),)))
    assert not is_free(card(leases=(lease(kind="replica"),)))
    assert not is_free(card(waiters=(WAITER,)))
    assert not is_free(card(stowaways=(STOWAWAY,)))
    assert not is_free(card(claims=(CLAIM,)))
    assert not is_free(card(vm=VM))


def test_a_parked_copy_takes_memory_of_a_card_that_is_free_all_the_same():
    parked = card(leases=(lease("r-1", kind="parked", memory_bytes=30),))
    assert is_free(parked)
    assert free_bytes(parked) == 70


def test_req_d7_a_card_is_kept_by_a_vm_a_claim_and_a_pinned_lease_of_all_of_it():
    assert kept_by(card()) == ""
    assert kept_by(card(vm=VM, claims=(CLAIM,))) == "vm win"
    assert kept_by(card(claims=(CLAIM,))) == "claim doom"
    whole = lease(name="train", exclusive=True, pinned=True)
    assert kept_by(card(leases=(whole,))) == "lease train"
    assert kept_by(card(leases=(lease(exclusive=True, pinned=False),))) == ""
    # A part of it that is pinned keeps that part alone.
    assert kept_by(card(leases=(lease(pinned=True),))) == ""
    # Nobody pins an engine.
    assert kept_by(card(leases=(lease(kind="replica", exclusive=True),))) == ""


@pytest.mark.parametrize(
    ("theirs", "mine", "stays"),
    [
        ("foreground", "interactive", True),
        ("interactive", "interactive", False),
        ("batch", "interactive", False),
        ("batch", "hold", False),
        ("interactive", "batch", True),
        ("hold", "hold", False),
    ],
)
def test_a_lease_of_a_higher_priority_stays(theirs, mine, stays):
    one = lease(priority=theirs, exclusive=True, name="x")
    assert is_kept(one, mine) == stays
    assert bool(kept_by(card(leases=(one,)), mine)) == stays


def test_what_is_held_is_the_larger_of_reserved_and_measured_and_what_nobody_explains():
    one = card(leases=(lease("r-1", kind="replica"), lease("r-2", kind="parked")), other_bytes=5)
    assert held_bytes(one) == 25
    assert held_bytes(one, {"r-1": 40, "r-2": 40}) == 55
    assert free_bytes(one, {"r-1": 400}) == 0


def test_nothing_may_be_given_of_a_card_somebody_has_to_himself():
    assert free_bytes(card(vm=VM)) == 0
    assert free_bytes(card(claims=(CLAIM,))) == 0
    assert free_bytes(card(leases=(lease(exclusive=True),))) == 0


def test_req_d11_there_is_one_definition_of_each():
    """No other file of the program defines such a function about a card or a lease."""
    names = {"is_free", "kept_by", "is_kept", "held_bytes", "free_bytes"}
    found: dict[str, list[str]] = {name: [] for name in names}
    for package in ("schemas", "controlplane", "nodeagent", "gateway"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name.strip("_") in names:
                    about = {ast.unparse(arg.annotation or arg) for arg in node.args.args}
                    if about & {"Card", "Lease"}:
                        found[node.name.strip("_")].append(f"{package}/{path.name}")
    assert found == {name: ["schemas/cardstate.py"] for name in names}
