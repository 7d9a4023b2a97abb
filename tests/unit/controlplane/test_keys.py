"""Commands about API keys: what is accepted, what is refused with which sentence, and when a key ends."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain import keys
from schemas import codes
from schemas.api import KeyView
from schemas.commands import Outcome
from schemas.key import Key, KeyChanged
from schemas.model import Model
from tests.support.key_yard import DAY_S, KeyYard, a_key, key_id
from tests.support.worlds import T0, model


@pytest.fixture
def yard() -> KeyYard:
    return KeyYard()


def refused(outcome: Outcome, code: str, *told: str) -> None:
    assert outcome.status == "rejected"
    assert outcome.code == code, outcome
    for text in told:
        assert text in outcome.sentence, outcome.sentence


def test_a_key_is_what_was_asked_for(yard: KeyYard) -> None:
    made = yard.have(
        "ci",
        models=["llama*", "sql"],
        may_activate=True,
        rpm=60,
        tpm=10_000,
        parallel=4,
        priority="low",
        expires_s=30 * DAY_S,
    )
    assert made == Key(
        id=key_id("ci"),
        name="ci",
        hash=a_key("ci").hash,
        created_at=T0,
        by="admin",
        models=("llama*", "sql"),
        may_activate=True,
        rpm=60,
        tpm=10_000,
        parallel=4,
        priority="low",
        expires_at=T0 + timedelta(days=30),
    )
    assert yard.events("key") == ["key.created"]


def test_a_key_that_is_told_nothing_may_use_all_and_start_nothing(yard: KeyYard) -> None:
    made = yard.have()
    assert (made.models, made.may_activate, made.expires_at) == ((), False, None)
    assert (made.rpm, made.tpm, made.parallel, made.priority) == (0, 0, 0, "normal")


def test_its_life_is_counted_from_when_the_command_was_stored(yard: KeyYard) -> None:
    id_ = yard.send(a_key(expires_s=100.0))
    yard.now += timedelta(seconds=40)
    yard.settle()
    assert yard.world.outcomes[id_].status == "accepted"
    made = yard.world.keys[key_id("ci")]
    assert made.created_at == T0
    assert made.expires_at == T0 + timedelta(seconds=100)


@pytest.mark.parametrize(
    ("fields", "path", "told"),
    [
        ({"id": ""}, "id", "12 characters"),
        ({"id": "a" * 11}, "id", "12 characters"),
        ({"id": "a" * 13}, "id", "12 characters"),
        ({"id": "A" * 12}, "id", "a-z and 2-7"),
        ({"id": "a1" * 6}, "id", "a-z and 2-7"),
        ({"id": "a" * 11 + "\n"}, "id", "a-z and 2-7"),
        ({"name": ""}, "name", "1 to 200"),
        ({"name": "x" * 201}, "name", "1 to 200"),
        ({"name": "a\nb"}, "name", "line breaks"),
        ({"name": " a"}, "name", "spaces at its ends"),
        ({"name": "yk_abc"}, "name", "begins like a key"),
        ({"hash": ""}, "hash", "64 digits"),
        ({"hash": "a" * 63}, "hash", "64 digits"),
        ({"hash": "A" * 64}, "hash", "0-9a-f"),
        ({"hash": "g" * 64}, "hash", "0-9a-f"),
        ({"models": [""]}, "models[0]", "1 to 200"),
        ({"models": ["a", "b "]}, "models[1]", "spaces at its ends"),
        ({"models": ["a", "a"]}, "models[1]", "given twice"),
        ({"models": ["a**"]}, "models[0]", "single *"),
        ({"models": ["*a" * 9]}, "models[0]", "at most 8"),
        ({"models": [f"m{n}" for n in range(101)]}, "models", "at most 100"),
        ({"rpm": -1}, "rpm", "0 (no limit)"),
        ({"tpm": 1_000_000_001}, "tpm", "1,000,000,000"),
        ({"parallel": -5}, "parallel", "got -5"),
        ({"expires_s": 0.0}, "expires_s", "leave it out"),
        ({"expires_s": 0.5}, "expires_s", "1 s to 100 years"),
        ({"expires_s": 1e12}, "expires_s", "100 years"),
        ({"expires_s": float("nan")}, "expires_s", "1 s to 100 years"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    yard: KeyYard, fields: dict[str, Any], path: str, told: str
) -> None:
    outcome = yard.create(**fields)
    refused(outcome, codes.INVALID, path, told)
    assert [p.path for p in outcome.problems] == [path]
    assert not yard.world.keys


def test_everything_that_is_wrong_is_told_at_once(yard: KeyYard) -> None:
    outcome = yard.create(id="", name="", hash="", models=["a", "a"], rpm=-1, expires_s=-1.0)
    paths = [p.path for p in outcome.problems]
    assert paths == ["id", "name", "hash", "models[1]", "rpm", "expires_s"]


def test_limits_up_to_the_largest_are_fine(yard: KeyYard) -> None:
    most = 1_000_000_000
    made = yard.have(rpm=most, tpm=most, parallel=most)
    assert made.tpm == most


def test_a_hash_that_is_none_is_not_repeated(yard: KeyYard) -> None:
    secret = "the-secret-itself"
    outcome = yard.create(hash=secret)
    refused(outcome, codes.INVALID)
    assert secret not in str(outcome)


def test_patterns_too_long_together_do_not_fit_an_event(yard: KeyYard) -> None:
    outcome = yard.create(models=[f"{n:03}" + "x" * 190 for n in range(60)])
    refused(outcome, codes.INVALID, "8 KiB")


def test_one_sent_twice_is_created_once(yard: KeyYard) -> None:
    """Two commands, as of somebody who did not see the first one's outcome."""
    made = yard.have(models=["a"], expires_s=100.0)
    yard.now += timedelta(seconds=3)
    again = yard.create(models=["a"], expires_s=100.0)
    assert again.status == "accepted"
    assert "there already" in again.sentence
    assert again.refs == (f"yard.evt.key.{made.id}",)
    assert yard.world.keys[made.id] == made
    assert yard.events("key") == ["key.created"]


@pytest.mark.parametrize(
    "fields", [{"hash": "0" * 64}, {"name": "other"}, {"models": ["b"]}, {"rpm": 7}]
)
def test_an_id_is_of_one_key(yard: KeyYard, fields: dict[str, Any]) -> None:
    made = yard.have(models=["a"])
    refused(yard.create(**({"models": ["a"], "id": made.id} | fields)), codes.EXISTS, made.id)
    assert yard.world.keys == {made.id: made}


def test_a_name_is_of_one_key_that_is_not_over(yard: KeyYard) -> None:
    made = yard.have("ci")
    refused(yard.create("ci", id=key_id("two")), codes.EXISTS, "'ci'", made.id)
    yard.revoke("ci")
    second = yard.have("ci", id=key_id("two"))
    assert second.name == "ci"
    yard.have("short", expires_s=10.0)
    yard.later(10)
    assert yard.have("short", id=key_id("three")).name == "short"


def test_no_name_is_anothers_id(yard: KeyYard) -> None:
    made = yard.have("ci")
    refused(yard.create(name=made.id, id=key_id("two")), codes.EXISTS, "the id of a key")
    yard.have(key_id("four"), id=key_id("three"))
    refused(yard.create("four"), codes.EXISTS, "the name of a key")


def test_what_a_key_may_use_need_not_be_there_but_is_told(yard: KeyYard) -> None:
    entry: Model = model("llama", aliases=("big",))
    yard.add(entry)
    outcome = yard.create(models=["llama", "big", "lama", "x*"])
    assert outcome.status == "accepted"
    assert outcome.lines == ("no model, alias or adapter is called 'lama' so far",)


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"models": ["b", "c*"]}, {"models": ("b", "c*")}),
        ({"models": []}, {"models": ()}),
        ({"may_activate": False}, {"may_activate": False}),
        ({"rpm": 0}, {"rpm": 0}),
        ({"tpm": 5}, {"tpm": 5}),
        ({"parallel": 1}, {"parallel": 1}),
        ({"priority": "high"}, {"priority": "high"}),
        ({"expires_s": 0.0}, {"expires_at": None}),
        ({"expires_s": 60.0}, {"expires_at": T0 + timedelta(seconds=65)}),
        ({"rpm": 3, "tpm": 4}, {"rpm": 3, "tpm": 4}),
    ],
)
def test_what_is_given_is_changed_and_nothing_else(
    yard: KeyYard, fields: dict[str, Any], changed: dict[str, Any]
) -> None:
    made = yard.have(models=["a"], may_activate=True, rpm=1, tpm=2, parallel=3, expires_s=1000.0)
    yard.now += timedelta(seconds=5)
    outcome = yard.change("ci", **fields)
    assert outcome.status == "accepted"
    after = yard.world.keys[made.id]
    differing = {
        f: getattr(after, f) for f in Key.__struct_fields__ if getattr(after, f) != getattr(made, f)
    }
    assert differing == changed
    [event] = [item.event for item in yard.log if item.type == "key.changed"]
    assert set(event.fields) == set(changed)  # type: ignore[union-attr]


def test_a_key_is_meant_by_id_by_name_or_by_itself(yard: KeyYard) -> None:
    made = yard.have("ci")
    for rpm, said in enumerate((made.id, "ci", f"yk_{made.id}_secret_with_a_line"), start=1):
        assert yard.change(said, rpm=rpm).status == "accepted"
        assert yard.world.keys[made.id].rpm == rpm


def test_a_whole_key_is_not_repeated(yard: KeyYard) -> None:
    for outcome in (yard.revoke("yk_nobody_thesecret"), yard.change("yk_nobody_thesecret", rpm=1)):
        refused(outcome, codes.NOT_FOUND, "'nobody'")
        assert "thesecret" not in str(outcome)


def test_a_change_to_what_it_is_writes_nothing(yard: KeyYard) -> None:
    made = yard.have("ci", rpm=4)
    outcome = yard.change("ci", rpm=4)
    assert (outcome.status, "already" in outcome.sentence) == ("accepted", True)
    assert outcome.refs == (f"yard.evt.key.{made.id}",)
    assert yard.events("key") == ["key.created"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"models": ["a", "a"]}, "models[1]"),
        ({"rpm": -1}, "rpm"),
        ({"expires_s": -1.0}, "expires_s"),
    ],
)
def test_a_wrong_change_changes_nothing(yard: KeyYard, fields: dict[str, Any], path: str) -> None:
    made = yard.have("ci")
    refused(yard.change("ci", parallel=9, **fields), codes.INVALID, path)
    assert yard.world.keys[made.id] == made


def test_a_key_nobody_knows_is_told_with_one_like_it(yard: KeyYard) -> None:
    yard.have("production")
    refused(yard.revoke("prodution"), codes.NOT_FOUND, "'prodution'", "did you mean 'production'?")
    refused(yard.change("zzz", rpm=1), codes.NOT_FOUND, "'zzz'")


def test_a_revoked_key_never_comes_back(yard: KeyYard) -> None:
    made = yard.have("ci")
    yard.now += timedelta(seconds=7)
    outcome = yard.revoke("ci")
    assert "is revoked" in outcome.sentence
    assert outcome.refs == (f"yard.evt.key.{made.id}",)
    assert yard.world.keys[made.id].revoked_at == T0 + timedelta(seconds=7)
    again = yard.revoke("ci")
    assert (again.status, "already" in again.sentence) == ("accepted", True)
    assert again.refs == outcome.refs
    refused(yard.change(made.id, expires_s=0.0), codes.CONFLICT, "never comes back")
    refused(yard.create("ci"), codes.EXISTS)
    assert yard.events("key") == ["key.created", "key.revoked"]


def test_one_that_expired_may_get_more_time_unless_its_name_is_taken(yard: KeyYard) -> None:
    first = yard.have("ci", expires_s=10.0)
    yard.later(20)
    assert yard.change("ci", expires_s=60.0).status == "accepted"
    assert yard.world.keys[first.id].expires_at == yard.now + timedelta(seconds=60)
    yard.later(60)
    second = yard.have("ci", id=key_id("two"))
    refused(yard.change(first.id, expires_s=60.0), codes.EXISTS, second.id)
    assert yard.change(first.id, rpm=3).status == "accepted", (
        "it stays over, so nothing is in the way"
    )
    assert yard.change("ci", rpm=5).status == "accepted"
    assert yard.world.keys[second.id].rpm == 5, "the name is of the one that is not over"


def test_one_that_expired_and_is_revoked_gets_no_more_time(yard: KeyYard) -> None:
    made = yard.have("ci", expires_s=10.0)
    yard.later(20)
    assert yard.revoke("ci").status == "accepted"
    refused(yard.change(made.id, expires_s=60.0), codes.CONFLICT)


def test_a_clock_that_went_back_does_not_revoke_before_the_key_was_made(yard: KeyYard) -> None:
    made = yard.have("ci")
    yard.now -= timedelta(hours=1)
    yard.revoke("ci")
    assert yard.world.keys[made.id].revoked_at == made.created_at


def test_one_that_is_over_ends_after_a_day(yard: KeyYard) -> None:
    yard.have("stays")
    revoked, short = yard.have("ci"), yard.have("short", expires_s=3600.0)
    yard.revoke("ci")
    yard.later(DAY_S - 1)
    assert yard.ended == []
    assert yard.step().wake_at == yard.now + timedelta(seconds=1)
    yard.later(1)
    assert yard.ended == [revoked.id]
    yard.later(3600)
    assert yard.ended == [revoked.id, short.id]
    assert [key.name for key in yard.world.keys.values()] == ["stays"]


def test_the_last_one_stays_however_long_it_is_over(yard: KeyYard) -> None:
    first, second = yard.have("first"), yard.have("second")
    yard.revoke("second")
    yard.now += timedelta(seconds=5)
    yard.revoke("first")
    yard.later(2 * DAY_S)
    assert yard.ended == [second.id], "the one that was over longer"
    yard.later(400 * DAY_S)
    assert list(yard.world.keys) == [first.id]
    third = yard.have("third")
    assert yard.ended == [second.id, first.id], "with another one there it goes"
    assert list(yard.world.keys) == [third.id]


def test_nothing_ends_while_the_audit_is_behind(yard: KeyYard) -> None:
    yard.have("stays")
    made = yard.have("ci")
    yard.revoke("ci")
    yard.audit_behind = True
    yard.later(2 * DAY_S)
    assert yard.ended == []
    yard.audit_behind = False
    yard.settle()
    assert yard.ended == [made.id]


def test_an_id_that_ended_is_never_used_again(yard: KeyYard) -> None:
    yard.have("stays")
    made = yard.have("ci")
    yard.revoke("ci")
    yard.later(2 * DAY_S)
    assert yard.ended == [made.id]
    refused(yard.create("ci"), codes.EXISTS, "over")
    assert yard.create("ci", id=key_id("two")).status == "accepted"


def test_of_several_with_a_name_the_one_that_counts_is_meant() -> None:
    at = [T0 + timedelta(seconds=n) for n in range(4)]
    old = Key(id="a", name="x", hash="", created_at=at[0], revoked_at=at[1])
    newer = Key(id="b", name="x", hash="", created_at=at[1], revoked_at=at[2])
    live = Key(id="c", name="x", hash="", created_at=at[0])
    both = {"a": old, "b": newer}
    assert keys.find(both, "x", at[3]) == newer
    assert keys.find(both, "a", at[3]) == old
    assert keys.find({**both, "c": live}, "x", at[3]) == live
    assert keys.find(both, "y", at[3]) is None


def test_nothing_is_written_over_a_key_that_cannot_be_read(yard: KeyYard) -> None:
    made = yard.have("ci", expires_s=10.0)
    yard.have("stays")
    stored = yard.append("key", (made.id,), KeyChanged(by="x", fields=()), made)
    newer = replace(stored, seq=stored.seq + 1, problem="written by a newer version")
    yard.world.apply(newer)
    yard._seq += 1
    for outcome in (yard.revoke("ci"), yard.change(made.id, rpm=1)):
        refused(outcome, codes.UPGRADE_REQUIRED, "newer version")
    yard.later(2 * DAY_S)
    assert yard.ended == []
    assert yard.world.keys[made.id] == made


def test_what_is_shown_of_a_key_is_all_but_its_hash() -> None:
    assert set(KeyView.__struct_fields__) == set(Key.__struct_fields__) - {"hash"} | {"event"}
