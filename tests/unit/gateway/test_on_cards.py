"""A request that names a card: which replicas are its own, what it waits for, and what it is told."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from events.log import Recorded
from gateway.domain.admission import (
    Keep,
    Refuse,
    Release,
    Route,
    Standing,
    Wait,
    admit,
    ends_the_wait,
    failed_start,
    refusal,
    settle,
    timed_out,
)
from gateway.domain.answers import CODES, Answer
from gateway.domain.cards import CardRef, listed
from gateway.domain.demand import message_id
from gateway.domain.snapshot import decode, encode, restore, take
from gateway.domain.status import model_card, model_list
from gateway.domain.table import NodeTouched, Table
from schemas.cardnames import scope_of, suits
from schemas.model import Profile, Scaling
from tests.support.gateway_world import (
    CHAT,
    NOW,
    Story,
    a_node,
    a_profile,
    a_replica,
    an_activation,
    changes,
    folded,
)

UP = Standing(synced=True, connected=True)


def ref(card: str, node: str = "n1") -> CardRef:
    return CardRef(node=node, card=card)


def two_cards(story: Story, *more: Recorded, **model: Any) -> Table:
    """A model for any card, on a node with gpu0 and gpu1; `more` happened after that."""
    model.setdefault("profiles", (a_profile("gpu"),))
    model.setdefault("scaling", Scaling(max=2))
    table = folded(story.cards("n1", "gpu0", "gpu1"), story.model(**model))
    for item in more:
        story.seq += 1
        table.apply(replace(item, seq=story.seq))
    return table


def ask(table: Table, on: CardRef | None = None, name: str = "m", **standing: Any) -> Any:
    fields: dict[str, Any] = {"synced": True, "connected": True}
    return admit(table, name, CHAT, Standing(**(fields | standing)), NOW, on=on)


def code_of(found: object) -> str:
    assert isinstance(found, Answer), found
    return found.code


def ids(found: object) -> list[str]:
    assert isinstance(found, Route), found
    return [r.id for r in found.candidates]


# -- which replicas -------------------------------------------------------------------------------


def test_req_d2_a_request_on_a_card_picks_the_engine_on_that_card() -> None:
    story = Story()
    table = two_cards(
        story,
        story.replica("r-0", cards=("gpu0",)),
        story.replica("r-1", cards=("gpu1",)),
        story.replica("r-9", cards=("gpu0",), node="n2"),
    )
    assert ids(ask(table, ref("gpu0"))) == ["r-0"]
    assert ids(ask(table, ref("gpu1"))) == ["r-1"]
    assert ids(ask(table)) == ["r-0", "r-1", "r-9"]


def test_req_d4_an_engine_that_is_up_answers_first_whatever_else_is_under_way() -> None:
    story = Story()
    table = two_cards(
        story,
        story.replica("r-1", cards=("gpu1",)),
        story.activation("loading"),
        story.activation("refused", scope="n1~gpu1", code="no_capacity", retry_at=NOW),
    )
    assert ids(ask(table)) == ["r-1"]
    assert ids(ask(table, ref("gpu1"))) == ["r-1"]


def test_req_d2_a_card_without_an_engine_waits_although_another_has_one() -> None:
    story = Story()
    table = two_cards(story, story.replica("r-1", cards=("gpu1",)), story.activation("ready"))
    assert ask(table, ref("gpu0")) == Wait(model=table.models["m"].model, scope="n1~gpu0")
    assert settle(table, "m", UP, NOW, scope="n1~gpu0") == Keep()
    assert settle(table, "m", UP, NOW, scope="n1~gpu1") == Release()
    assert settle(table, "m", UP, NOW) == Release()


def test_req_d9_one_entry_on_one_card_is_answered_as_before_with_or_without_its_name() -> None:
    story = Story()
    table = folded(story.cards("n1"), story.model(profiles=(a_profile("cpu"),)), story.replica())
    assert ids(ask(table)) == ids(ask(table, ref("cpu"))) == ["r-1"]
    table.apply(story.replica("r-1", "stopped"))
    assert ask(table) == Wait(model=table.models["m"].model, scope="any")


def test_a_replica_over_several_cards_is_on_each_of_them() -> None:
    story = Story()
    table = two_cards(story, story.replica("r-1", cards=("gpu0", "gpu1")))
    assert ids(ask(table, ref("gpu0"))) == ids(ask(table, ref("gpu1"))) == ["r-1"]


def test_what_is_remembered_of_a_card_follows_every_event() -> None:
    story = Story()
    table = two_cards(story)

    def here() -> list[str]:
        return [r.id for r in table.routable("m", "n1~gpu0")]

    assert here() == []
    table.apply(story.replica("r-1", cards=("gpu0",)))
    assert here() == ["r-1"]
    table.apply(story.replica("r-2", cards=("gpu1",)))
    table.apply(story.replica("r-1", "parked", cards=("gpu0",)))
    assert here() == []
    table.apply(story.replica("r-1", cards=("gpu0",)))
    table.apply(story.node(reach="lost"))
    assert here() == []
    table.apply(story.node())
    assert here() == ["r-1"]
    table.apply(story.model(incarnation="inc-new"))
    assert here() == []


def test_two_cards_that_spell_one_scope_do_not_answer_for_each_other() -> None:
    """`a~b` on `c` and `b~c`... on `a`: only the first of the two has a base URL."""
    story = Story()
    table = folded(
        story.cards("a", "b~c"),
        story.cards("a~b", "c"),
        story.model(profiles=(a_profile(),)),
        story.replica("r-1", node="a", cards=("b~c",)),
        story.replica("r-2", node="a~b", cards=("c",)),
    )
    assert scope_of("a", "b~c") == scope_of("a~b", "c")
    assert ids(ask(table, CardRef(node="a", card="b~c"))) == ["r-1"]
    assert code_of(ask(table, CardRef(node="a~b", card="c"))) == "card_not_found"


def test_a_parked_replica_is_no_candidate_on_its_card_nor_without_one() -> None:
    story = Story()
    table = two_cards(story, story.replica("r-1", "parked", cards=("gpu0",)))
    for on in (None, ref("gpu0")):
        assert isinstance(ask(table, on), Wait)
    # It comes back under its id and its endpoint.
    table.apply(story.replica("r-1", "starting", cards=("gpu0",)))
    assert isinstance(ask(table, ref("gpu0")), Wait)
    table.apply(story.replica("r-1", cards=("gpu0",)))
    assert ids(ask(table, ref("gpu0"))) == ids(ask(table)) == ["r-1"]


# -- which cards there are ------------------------------------------------------------------------


def test_a_card_that_is_not_there_is_404_with_what_there_is() -> None:
    story = Story()
    table = two_cards(story)
    missing = ask(table, ref("gpu7"))
    assert code_of(missing) == "card_not_found"
    assert (missing.status, missing.should_retry, missing.retry_after_s) == (404, False, None)
    assert missing.message == "The node 'n1' has no card 'gpu7'; it has cpu, gpu0, gpu1."
    other = ask(table, ref("gpu0", "elsewhere"))
    assert code_of(other) == "card_not_found"
    assert "no node 'elsewhere'" in other.message
    # Whatever the model is called, and however it stands.
    assert code_of(ask(table, ref("gpu7"), "nothing")) == "card_not_found"
    assert code_of(ask(table, ref("gpu0"), "nothing")) == "model_not_found"
    assert CODES["card_not_found"].status == 404


def test_only_a_table_that_holds_the_whole_log_knows_that_there_is_no_such_card() -> None:
    story = Story()
    assert code_of(ask(two_cards(story), ref("gpu7"), synced=False)) == "yard_unavailable"


def test_before_any_node_told_its_cards_no_card_is_missing() -> None:
    story = Story()
    table = folded(story.model(profiles=(a_profile("gpu"),)))
    assert isinstance(ask(table, ref("gpu0")), Wait)
    assert settle(table, "m", UP, NOW, scope="n1~gpu0") == Keep()
    # Nobody is asked for it: a client may type what it likes.
    assert not table.may_ask_for("n1~gpu0")
    table.apply(story.cards("n1", "gpu0"))
    assert table.may_ask_for("n1~gpu0")
    found = settle(table, "m", UP, NOW, scope="n1~gpu7")
    assert isinstance(found, Refuse)
    assert (found.answer.code, found.decided_at) == ("card_not_found", None)


def test_inv_5_a_card_that_goes_answers_those_who_wait_for_it() -> None:
    story = Story()
    table = two_cards(story, story.cards("n2", "gpu0"))
    assert settle(table, "m", UP, NOW, scope="n1~gpu0") == Keep()
    # Told again and nothing new in it: nobody has to look.
    assert changes(table, story.cards("n1", "gpu0", "gpu1", version="2", running=False)) == []
    assert changes(table, story.cards("n1")) == [NodeTouched(seq=story.seq, node="n1")]
    assert isinstance(settle(table, "m", UP, NOW, scope="n1~gpu0"), Refuse)
    # A node that was removed has no cards, also before its own events are ended.
    table.apply(story.node("n2", admin="removed"))
    assert isinstance(settle(table, "m", UP, NOW, scope="n2~gpu0"), Refuse)
    table.apply(story.node("n2"))
    assert settle(table, "m", UP, NOW, scope="n2~gpu0") == Keep()
    table.apply(story.cards_gone("n2"))
    assert isinstance(settle(table, "m", UP, NOW, scope="n2~gpu0"), Refuse)


def test_cards_come_back_with_the_snapshot() -> None:
    story = Story()
    table = two_cards(story, story.replica("r-0", cards=("gpu0",)))
    again = restore(decode(encode(take(table, stream_id="s", stream_created="c"))))
    assert again.nodes == table.nodes
    assert list(again.cards()) == ["n1~cpu", "n1~gpu0", "n1~gpu1"]
    assert ids(ask(again, ref("gpu0"))) == ["r-0"]


def test_a_snapshot_of_before_there_were_cards_in_it_is_read() -> None:
    table = folded(Story().model())
    raw = encode(take(table, stream_id="s", stream_created="c"))
    assert restore(decode(raw.replace(b',"nodes":[]', b""))).nodes == {}


# -- which models ---------------------------------------------------------------------------------


def test_a_card_lists_the_models_that_have_a_profile_for_it_by_kind_or_pattern() -> None:
    story = Story()
    table = folded(
        story.cards("n1", "gpu0", "gpu1"),
        story.cards("n2", "gpu0"),
        story.model("kind", profiles=(a_profile("gpu"),)),
        story.model("pattern", profiles=(a_profile("n1/gpu0"),)),
        story.model("wild", profiles=(a_profile("*/gpu0"),)),
        story.model("both", profiles=(a_profile("cpu", name="c"), a_profile("n1/gpu1", name="g"))),
        story.model("none"),
    )

    def names(card: str, node: str = "n1") -> list[str]:
        found = model_list(table, NOW, waiting={}, scope=scope_of(node, card))
        return [c.id for c in found.data]

    assert names("gpu0") == ["kind", "pattern", "wild"]
    assert names("gpu1") == ["both", "kind"]
    assert names("cpu") == ["both"]
    assert names("gpu0", "n2") == ["kind", "wild"]
    assert len(model_list(table, NOW, waiting={}).data) == 5


def test_a_card_divided_by_mig_has_no_models() -> None:
    story = Story()
    node = a_node("n1", "gpu0")
    cards = tuple(
        type(c)(id=c.id, kind=c.kind, memory_bytes=c.memory_bytes, mig=c.kind == "gpu")
        for c in node.cards
    )
    table = folded(story.cards("n1", cards=cards), story.model(profiles=(a_profile("gpu"),)))
    assert model_list(table, NOW, waiting={}, scope="n1~gpu0").data == ()


@pytest.mark.parametrize(
    ("wishes", "fits"),
    [
        (("gpu",), True),
        (("cpu",), False),
        (("n1/gpu0",), True),
        (("n1/gpu1",), False),
        (("n2/gpu0",), False),
        (("*/gpu?",), True),
        (("n1/*",), True),
        (("gpu0",), False),
        (("cpu", "n1/gpu0"), True),
        ((), False),
    ],
)
def test_a_profile_names_a_card_by_kind_or_by_node_and_card(
    wishes: tuple[str, ...], fits: bool
) -> None:
    profile = Profile(name="p", engine="command", memory_bytes=1, card=wishes)
    assert suits(profile, "n1", "gpu0", "gpu") == fits


def test_inv_2_a_model_without_a_profile_for_the_card_is_never_asked_for_there() -> None:
    story = Story()
    table = two_cards(story, profiles=(a_profile("n1/gpu1"),))
    found = ask(table, ref("gpu0"))
    assert code_of(found) == "model_not_found"
    assert "no profile for the card n1/gpu0" in found.message
    assert isinstance(ask(table, ref("gpu1")), Wait)
    # What runs there all the same is answered by it, until it is gone.
    table.apply(story.replica("r-1", cards=("gpu0",)))
    assert ids(ask(table, ref("gpu0"))) == ["r-1"]


def test_a_model_stands_on_each_card_as_it_stands_there() -> None:
    story = Story()
    table = two_cards(
        story,
        story.replica("r-1", cards=("gpu1",)),
        story.activation("loading", scope="n1~gpu0"),
    )
    entry = table.models["m"]
    at = {c: model_card(table, entry, NOW, scope=f"n1~{c}") for c in ("gpu0", "gpu1")}
    assert (at["gpu0"].status, at["gpu0"].replicas_ready) == ("loading", 0)
    assert (at["gpu1"].status, at["gpu1"].replicas_ready) == ("ready", 1)
    assert model_card(table, entry, NOW).status == "ready"


def test_a_parked_copy_is_told_as_one() -> None:
    story = Story()
    table = two_cards(story, story.replica("r-1", "parked", cards=("gpu1",)))
    entry = table.models["m"]
    assert model_card(table, entry, NOW).status == "parked"
    assert model_card(table, entry, NOW, scope="n1~gpu0").status == "idle"


def test_a_replica_whose_agent_makes_room_is_on_its_way() -> None:
    story = Story()
    table = two_cards(story, story.replica("r-1", "waiting", cards=("gpu1",)))
    assert model_card(table, table.models["m"], NOW).status == "loading"
    failed = a_replica("r-0", "failed", cards=("gpu0",), was_ready=False)
    assert not ends_the_wait(table, failed)


# -- what is told ---------------------------------------------------------------------------------


def test_a_start_that_failed_on_one_card_ends_no_wait_for_another() -> None:
    story = Story()
    table = two_cards(
        story,
        story.replica("r-1", "starting", cards=("gpu1",)),
        story.activation(
            "loading", scope="n1~gpu0", retry_at=NOW + timedelta(seconds=30), replica="r-0"
        ),
    )
    failed = a_replica("r-0", "failed", cards=("gpu0",), was_ready=False, last_line="no memory")
    assert ends_the_wait(table, failed, scope="n1~gpu0")
    assert not ends_the_wait(table, failed, scope="n1~gpu1")
    # For a plain request the other start counts.
    assert not ends_the_wait(table, failed)
    told = failed_start(table, failed, NOW, scope="n1~gpu0")
    assert (told.code, told.retry_after_s) == ("start_failed", 30)


def test_a_resume_that_failed_is_followed_by_a_cold_start_and_ends_no_wait() -> None:
    table = two_cards(Story())
    for was_ready, code in ((True, ""), (False, "resume_failed"), (False, "parked_lost")):
        failed = a_replica("r-0", "failed", code=code, was_ready=was_ready)
        assert not ends_the_wait(table, failed)


@pytest.mark.parametrize("scope", ["any", "n1~gpu0"])
@pytest.mark.parametrize("behind", [("claim doom",), ("vm windows",), ("lease anna", "vm windows")])
def test_req_d7_a_wait_behind_a_kept_card_ends_in_card_kept_with_who_keeps_it(
    scope: str, behind: tuple[str, ...]
) -> None:
    story = Story()
    table = two_cards(
        story, story.activation("waiting", scope=scope, waiting_for=behind, kept=True)
    )
    found = timed_out(table, "m", 45.0, NOW, scope=scope)
    assert (found.status, found.code) == (503, "card_kept")
    assert (found.retry_after_s, found.should_retry) == (60, True)
    assert f"kept (by {', '.join(behind)})" in found.message
    assert "45 s" in found.message


def test_req_d18_a_wait_in_the_queue_for_room_ends_in_no_capacity() -> None:
    story = Story()
    table = two_cards(story, story.activation("waiting", scope="n1~gpu0", waiting_for=("r-8",)))
    found = timed_out(table, "m", 45.0, NOW + timedelta(seconds=40), scope="n1~gpu0")
    assert (found.code, found.should_retry, found.retry_after_s) == ("no_capacity", True, 10)
    # The plain wait has an activation of its own.
    assert timed_out(table, "m", 45.0, NOW).code == "model_loading"


def test_a_refusal_for_a_kept_card_says_who_keeps_it() -> None:
    story = Story()
    later = NOW + timedelta(seconds=30)
    table = two_cards(
        story,
        story.activation(
            "refused",
            scope="n1~gpu0",
            code="card_kept",
            reason="gpu0 is in a VM",
            waiting_for=("vm windows",),
            retry_at=later,
        ),
    )
    found = ask(table, ref("gpu0"))
    assert (code_of(found), found.retry_after_s, found.should_retry) == ("card_kept", 60, True)
    assert "gpu0 is in a VM (kept by vm windows)" in found.message
    # That card's refusal is nobody else's.
    assert isinstance(ask(table), Wait)
    assert isinstance(ask(table, ref("gpu1")), Wait)
    bare = refusal(table, an_activation("refused", code="card_kept", reason="kept"), NOW)
    assert bare.message.endswith("kept")


def test_scn_b7_a_wish_for_an_oddly_named_card_has_an_id_a_header_can_carry() -> None:
    plain = message_id("m", "any", 1, NOW)
    assert plain.startswith("activate-m-any-1-")
    odd = message_id("m", scope_of("n 1", "gpu\r\nX: 模"), 1, NOW)
    assert odd.isascii()
    assert odd.isprintable()
    assert " " not in odd
    assert odd != message_id("m", scope_of("n 1", "gpuX: 模"), 1, NOW)


def test_a_long_list_of_cards_is_cut() -> None:
    names = [f"gpu{n}" for n in range(12)]
    assert listed(names) == "gpu0, gpu1, gpu2, gpu3, gpu4, gpu5, gpu6, gpu7 and 4 more"
    assert listed(names[:2]) == "gpu0, gpu1"
