"""What patterns of a key allow, against the plainest way to say it."""

import re

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.doors import KeysNeeded, is_loopback, needs_key, why_not_listen
from gateway.domain.rights import allowed

SETTINGS: tuple[KeysNeeded, ...] = ("auto", "required", "off")

letters = st.text(alphabet="ab:", max_size=8)
patterns = st.text(alphabet="ab:*", max_size=8)


@given(st.lists(patterns, max_size=4), letters)
def test_a_name_is_allowed_when_a_pattern_is_that_name_with_any_text_for_each_star(
    given_patterns: list[str], name: str
) -> None:
    expected = any(
        re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name)
        for pattern in given_patterns
    )
    assert (name in allowed(tuple(given_patterns))) is expected


@given(
    st.sampled_from(SETTINGS),
    st.booleans(),
    st.sampled_from(("127.0.0.1", "::1", "localhost", "0.0.0.0", "", "10.1.2.3", "a.example")),
)
def test_where_others_reach_a_gateway_nobody_is_served_unasked_unless_that_was_said(
    setting: KeysNeeded, any_key: bool, host: str
) -> None:
    """Whatever is known of keys: it does not listen, or it asks for one, or it was told not to."""
    beyond = not is_loopback(host)
    if beyond and setting != "off":
        listens = why_not_listen([host], setting, any_key=any_key) is None
        assert listens is any_key
        assert needs_key(setting, any_key=any_key, beyond_loopback=beyond)
