"""Where a response is: learned from the beginning of an answer, bounded, and told to its owner alone."""

import pytest

from gateway.domain.responseids import Kept, ResponseIds, id_in


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
