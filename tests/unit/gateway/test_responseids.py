"""Where a response is: learned from the beginning of an answer, bounded, and told to its owner alone."""

import pytest

from gateway.domain.admission import Route, Standing, Wait, admit
from gateway.domain.answers import Answer
from gateway.domain.places import RESPONSE
from gateway.domain.request_fields import RequestFields
from gateway.domain.responseids import Kept, ResponseIds, id_in
from gateway.intake import Intake, where_response_is
from tests.support.gateway_world import NOW, Story, folded


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (b'{"id":"resp_abc-1","object":"response","output":[{"id":"rs_2"}]}', "resp_abc-1"),
        (b'{"created_at":1,"id": "resp_abc","model":"m"}', "resp_abc"),
        (
            b'1c\r\nevent: response.created\ndata: {"response":{"id":"resp_9"},"type":"x"}\n\n\r\n',
            "resp_9",
        ),
        (b'{"output":[{"id":"msg_1"}]}', None),
        (b'{"id":"resp_a/../b"}', None),
        (b'{"id":"resp_' + b"a" * 200 + b'"}', None),
        (b" " * 20000 + b'{"id":"resp_1"}', None),
        (b"", None),
    ],
)
def test_an_answer_tells_its_id_at_its_beginning(block: bytes, found: str | None) -> None:
    assert id_in(block) == found


def test_the_least_lately_used_is_forgotten_first() -> None:
    ids = ResponseIds(most=2)
    ids.keep("a", Kept("m", "r-1"))
    ids.keep("b", Kept("m", "r-2"))
    assert ids.find("a") == Kept("m", "r-1")
    ids.keep("c", Kept("m", "r-3"))
    assert ids.find("b") is None
    assert ids.find("a") is not None
    assert len(ids) == 2
    ids.keep("a", Kept("m", "r-4"))
    assert ids.find("a") == Kept("m", "r-4")
    assert len(ids) == 2


def test_to_another_key_the_id_is_unknown() -> None:
    ids = ResponseIds()
    ids.keep("a", Kept("m", "r-1", "key1"))
    assert ids.find("a") is None
    assert ids.find("a", "key2") is None
    assert ids.find("a", "key1") == Kept("m", "r-1", "key1")


@pytest.mark.parametrize(
    ("replica", "silent", "phases", "goes"),
    [
        ("r-1", (), ("ready", "ready"), "r-1"),
        (None, ("r-1",), ("ready", "ready"), "r-2"),
        # Not answering just now is not being gone.
        ("r-1", ("r-1",), ("ready", "ready"), "yard_unavailable"),
        ("r-1", ("r-1", "r-2"), ("ready", "ready"), "yard_unavailable"),
        (None, ("r-1",), ("ready", "stopped"), "yard_unavailable"),
        ("r-1", (), ("stopped", "ready"), "response_not_found"),
        ("r-1", ("r-2",), ("stopped", "ready"), "response_not_found"),
        (None, (), ("stopped", "starting"), "response_not_found"),
    ],
)
def test_a_response_is_asked_for_where_it_was_given_and_nowhere_else(
    replica: str | None, silent: tuple[str, ...], phases: tuple[str, str], goes: str
) -> None:
    story = Story()
    table = folded(
        story.model(),
        *(
            story.replica(f"r-{n}", phase, paths=(RESPONSE,))  # type: ignore[arg-type]
            for n, phase in enumerate(phases, 1)
        ),
    )
    standing = Standing(synced=True, connected=True, ejected=frozenset(silent))
    decision = admit(table, "m", RESPONSE, standing, NOW)
    assert isinstance(decision, Route | Wait)
    intake = Intake(fields=RequestFields(model="m"), by_id=True, replica=replica)
    found = where_response_is(decision, intake, table, "any")
    if isinstance(found, Answer):
        assert found.code == goes
    else:
        assert [r.id for r in found.candidates] == [goes]
