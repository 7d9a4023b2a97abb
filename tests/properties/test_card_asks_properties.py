"""Whatever JSON comes to the door is an ask with nothing wrong in it, or is refused with a sentence."""

import unicodedata
from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.domain.asks import NAME_LENGTH, wrong_with
from nodeagent.door import ask_of
from schemas.cardasks import CardAsk, ClaimStart, LeaseAcquire, VmAttach

NAMES = st.one_of(
    st.text(max_size=80), st.sampled_from(["gpu0", "l-abcdefgh23", "c-abcdefgh23", "", " "])
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    NAMES,
    st.lists(NAMES, max_size=3),
    st.just({}),
)
FIELDS = st.sampled_from(
    ["id", "name", "card", "cards", "memory_bytes", "pinned", "priority", "ttl_s", "wait_s",
     "process", "kind", "what", "more"]
)  # fmt: skip
ASKS = st.sampled_from(["acquire", "release", "claim", "unclaim", "vm.attach", "vm.detach", "no"])
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def read(line: bytes) -> CardAsk | str:
    """The ask, or the sentence against it; any other exception is a failure."""
    try:
        return ask_of(line)
    except ValueError as error:
        return str(error)


@given(
    ask=ASKS,
    plain=st.fixed_dictionaries(
        {},
        optional={
            "id": st.sampled_from(["l-abcdefgh23", "c-abcdefgh23"]),
            "name": st.just("render"),
            "card": st.just("gpu0"),
            "cards": st.just(["gpu0"]),
            "what": st.just("x"),
        },
    ),
    fields=st.dictionaries(FIELDS, VALUES, max_size=4),
)
def test_any_json_is_an_ask_or_a_sentence(
    ask: str, plain: dict[str, object], fields: dict[str, object]
) -> None:
    try:
        line = msgspec.json.encode({"ask": ask, **plain, **fields})
    except UnicodeEncodeError:
        return
    found = read(line)
    if isinstance(found, str):
        assert found
        return
    assert wrong_with(found) == ""
    if isinstance(found, LeaseAcquire | ClaimStart | VmAttach):
        assert 0 < len(found.name) <= NAME_LENGTH
        assert not any(unicodedata.category(c) == "Cc" for c in found.name)
    if isinstance(found, LeaseAcquire):
        # What is allowed can be added to any clock.
        assert NOW + timedelta(seconds=found.wait_s + (found.ttl_s or 0)) >= NOW
        assert found.memory_bytes is None or found.memory_bytes > 0
        assert len(set(found.cards)) == len(found.cards) > 0


@given(content=st.binary(max_size=400))
def test_any_bytes_are_a_sentence(content: bytes) -> None:
    found = read(content)
    assert found if isinstance(found, str) else wrong_with(found) == ""
