"""Who sends a request, by what it presents as its key."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.domain.answers import Answer
from gateway.domain.keytable import ANYBODY, Caller, KeyTable, identify
from gateway.domain.snapshot import decode, encode, restore, take
from schemas.key import KeyChanged, KeyCreated, KeyDeleted, KeyRevoked
from tests.support.gateway_keys import ID, SECRET, a_key, text_of
from tests.support.gateway_world import NOW, Story, folded


def who(presented: str | None, *, synced: bool = True, **fields: Any) -> Caller | Answer:
    table = KeyTable(keys={ID: a_key(**fields)})
    given = None if presented is None else presented.encode("latin-1")
    return identify(table, given, NOW, needed=True, synced=synced)


def test_the_holder_of_a_key_is_known_by_it() -> None:
    caller = who(text_of(), rpm=5)
    assert isinstance(caller, Caller)
    assert caller.key == a_key(rpm=5)
    assert caller.id == ID


@pytest.mark.parametrize(
    ("presented", "fields", "sentence"),
    [
        (None, {}, "No API key was given"),
        ("", {}, "No API key was given"),
        ("sk-something", {}, "none of this yard's"),
        ("yk_short_secret", {}, "none of this yard's"),
        (f"yk_{ID}_", {}, "none of this yard's"),
        (text_of() + "\n", {}, "none of this yard's"),
        (text_of() + "é", {}, "none of this yard's"),
        (text_of("zzzzzzzzzzzz"), {}, "There is no API key zzzzzzzzzzzz"),
        (text_of(secret="t" * 43), {}, f"not the secret of the API key {ID}"),
        (text_of(), {"revoked_at": NOW - timedelta(hours=1)}, "was revoked at 2026-03-01 11:00:00"),
        # A clock behind the control plane's does not make a revoked key valid.
        (text_of(), {"revoked_at": NOW + timedelta(hours=1)}, "was revoked at"),
        (text_of(), {"expires_at": NOW}, "expired at 2026-03-01 12:00:00 UTC"),
    ],
)
def test_each_way_to_be_nobody_has_its_sentence(
    presented: str | None, fields: dict[str, Any], sentence: str
) -> None:
    refused = who(presented, **fields)
    assert isinstance(refused, Answer)
    assert (refused.status, refused.code) == (401, "invalid_api_key")
    assert sentence in refused.message
    assert SECRET not in refused.message
    assert (b"www-authenticate", b"Bearer") in refused.headers()
    assert refused.should_retry is False


def test_what_became_of_a_key_is_told_to_its_holder_alone() -> None:
    refused = who(text_of(secret="guess"), revoked_at=NOW)
    assert isinstance(refused, Answer)
    assert "revoked" not in refused.message


def test_a_key_that_expires_later_is_valid() -> None:
    assert isinstance(who(text_of(), expires_at=NOW + timedelta(seconds=1)), Caller)


def test_only_a_synced_table_says_that_there_is_no_such_key() -> None:
    refused = who(text_of("zzzzzzzzzzzz"), synced=False)
    assert isinstance(refused, Answer)
    assert (refused.status, refused.code) == (503, "yard_unavailable")
    assert isinstance(who(text_of(), synced=False), Caller)


def test_where_no_key_is_needed_anything_may_be_presented() -> None:
    for presented in (None, b"anything", text_of(secret="wrong").encode()):
        assert identify(None, presented, NOW, needed=False, synced=True) is ANYBODY


# The table ---------------------------------------------------------------------------------------------


def test_keys_are_folded_changed_and_ended() -> None:
    story = Story()
    created = story.event("key", (ID,), KeyCreated(by="admin"), a_key())
    table = folded(created)
    assert table.keys.keys == {ID: a_key()}
    changed = story.event("key", (ID,), KeyChanged(by="admin", fields=("rpm",)), a_key(rpm=3))
    folded(changed, table=table)
    assert table.keys.keys[ID].rpm == 3
    revoked = a_key(rpm=3, revoked_at=NOW)
    folded(story.event("key", (ID,), KeyRevoked(by="admin"), revoked), table=table)
    assert table.keys.keys[ID].revoked_at == NOW
    folded(story.event("key", (ID,), KeyDeleted(), None), table=table)
    assert not table.keys.any


def test_a_key_that_cannot_be_read_is_a_key_all_the_same() -> None:
    """Else a yard whose only key is of a newer version would be open to everybody."""
    story = Story()
    newer = story.event("key", (ID,), KeyCreated(by="admin"), None, problem="a newer version")
    broken = story.broken("key", "zzzzzzzzzzzz")
    for item in (newer, broken):
        table = folded(item)
        assert table.keys.any
        assert not table.keys.keys
        assert restore(take(table, stream_id="s", stream_created="c")).keys == table.keys


def test_a_broken_event_leaves_the_key_as_it_was() -> None:
    story = Story()
    created = story.event("key", (ID,), KeyCreated(by="admin"), a_key())
    table = folded(created, story.broken("key", ID))
    assert table.keys.keys == {ID: a_key()}
    # A reader that comes later is given the last event that could be read.
    late = folded(story.broken("key", ID, previous=created))
    assert late.keys.keys == {ID: a_key()}


def test_keys_come_back_from_a_snapshot() -> None:
    story = Story()
    table = folded(story.event("key", (ID,), KeyCreated(by="admin"), a_key(models=("m",))))
    raw = encode(take(table, stream_id="s", stream_created="c"))
    assert restore(decode(raw)).keys == table.keys
    assert SECRET.encode() not in raw
