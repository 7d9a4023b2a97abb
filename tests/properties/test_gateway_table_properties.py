"""The gateway's table as sentences: a snapshot plus the rest is the whole; what is read twice changes nothing."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from events.log import Recorded
from gateway.domain.snapshot import decode, encode, restore, take
from gateway.domain.table import Table
from schemas.key import KeyCreated, KeyDeleted, KeyRevoked
from tests.support.gateway_keys import a_key
from tests.support.gateway_world import NOW, Story, folded

NAMES = st.sampled_from(["a", "b"])
PLACES: dict[str, dict[str, Any]] = {
    "r-1": {"node": "n1", "cards": ("gpu0",)},
    "r-2": {"node": "n1", "cards": ("gpu0", "gpu1")},
    "r-3": {"node": "n2", "cards": ("gpu0",)},
}
"""A replica stays where it was started."""

SCOPES = [f"{node}~{card}" for node in ("n1", "n2") for card in ("cpu", "gpu0", "gpu1")]
IDS = st.sampled_from(list(PLACES))
NODES = st.sampled_from(["n1", "n2"])
KEYS = st.sampled_from(["abcdefgh2345", "otherkey2345"])
PHASES = st.sampled_from(["starting", "ready", "draining", "parked", "stopped", "failed"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("model"), NAMES, st.sampled_from([(), ("x",), ("x", "y")])),
        st.tuples(st.just("gone"), NAMES, st.none()),
        st.tuples(st.just("replica"), IDS, st.tuples(PHASES, NAMES)),
        st.tuples(st.just("activation"), NAMES, st.sampled_from(["loading", "idle", "ready"])),
        st.tuples(st.just("node"), st.none(), st.sampled_from(["reachable", "lost"])),
        st.tuples(st.just("cards"), NODES, st.sampled_from([(), ("gpu0",), ("gpu0", "gpu1")])),
        st.tuples(st.just("no cards"), NODES, st.none()),
        st.tuples(st.just("key"), KEYS, st.booleans()),
        st.tuples(st.just("no key"), KEYS, st.none()),
    ),
    max_size=30,
)


def events(steps: list[tuple[str, object, object]]) -> list[Recorded]:
    story = Story()
    made: list[Recorded] = []
    of_replica: dict[str, str] = {}
    for kind, key, value in steps:
        match kind:
            case "model":
                made.append(story.model(str(key), aliases=value))
            case "gone":
                made.append(story.model_gone(str(key)))
            case "replica":
                phase, model = value  # type: ignore[misc]
                # A replica serves one model for its whole life.
                owner = of_replica.setdefault(str(key), str(model))
                made.append(story.replica(str(key), phase, model=owner, **PLACES[str(key)]))
            case "activation":
                made.append(story.activation(value, model=str(key)))  # type: ignore[arg-type]
            case "cards":
                made.append(story.cards(str(key), *value))  # type: ignore[misc]
            case "key":
                of = a_key(str(key), revoked_at=NOW if value else None)
                event = KeyRevoked(by="test") if value else KeyCreated(by="test")
                made.append(story.event("key", (str(key),), event, of))
            case "no key":
                made.append(story.event("key", (str(key),), KeyDeleted(), None))
            case "no cards":
                made.append(story.cards_gone(str(key)))
            case _:
                made.append(story.node(reach=value))
    return made


def seen(table: Table) -> object:
    """Everything that decides about requests."""
    return (
        table.position,
        table.models,
        table.aliases,
        table.activations,
        table.replicas,
        table.nodestates,
        table.nodes,
        table.keys,
        dict(table.cards()),
        {(m, s): [r.id for r in table.routable(m, s)] for m in ("a", "b") for s in SCOPES},
        {m: [r.id for r in table.routable(m)] for m in ("a", "b")},
        {m: [r.id for r in table.replicas_of(m)] for m in ("a", "b")},
    )


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, cut=st.integers(0, 30))
def test_a_snapshot_and_the_rest_is_the_whole(
    steps: list[tuple[str, object, object]], cut: int
) -> None:
    made = events(steps)
    first = folded(*made[:cut])
    restored = restore(decode(encode(take(first, stream_id="s", stream_created="c"))))
    assert seen(folded(*made[cut:], table=restored)) == seen(folded(*made))


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, again=st.integers(0, 30))
def test_what_is_read_again_changes_nothing(
    steps: list[tuple[str, object, object]], again: int
) -> None:
    made = events(steps)
    table = folded(*made)
    before = seen(folded(*made))
    for item in made[-again:]:
        assert table.apply(item) is None
    assert seen(table) == before


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_the_last_event_of_each_subject_is_the_whole_state(
    steps: list[tuple[str, object, object]],
) -> None:
    made = events(steps)
    last = {item.subject: item for item in made}
    whole, passed = folded(*made), folded(*sorted(last.values(), key=lambda i: i.seq))
    passed.advance(whole.position)

    def without_history(table: Table) -> object:
        # When a name was added is told by its first event only.
        return (
            {n: e.model for n, e in table.models.items()},
            table.aliases,
            table.replicas,
            {m: [r.id for r in table.routable(m)] for m in ("a", "b")},
        )

    assert without_history(passed) == without_history(whole)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_req_d2_what_a_card_may_answer_is_ready_there_whatever_happened_before(
    steps: list[tuple[str, object, object]],
) -> None:
    """Asked after every event, so that nothing remembered outlives what it was made of."""
    table = Table()
    for item in events(steps):
        table.apply(item)
        for model in ("a", "b"):
            ready = [r for r in table.replicas.values() if r.model == model and table.may_route(r)]
            assert {r.id for r in table.routable(model)} == {r.id for r in ready}
            for scope in SCOPES:
                node, _, card = scope.partition("~")
                assert {r.id for r in table.routable(model, scope)} == {
                    r.id for r in ready if r.node == node and card in r.cards
                }
        known = [f"{n}~{c.id}" for n, node in table.nodes.items() for c in node.cards]
        assert set(table.cards()) == set(known)
