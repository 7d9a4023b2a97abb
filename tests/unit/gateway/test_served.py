"""What a request is charged with when it is over."""

import pytest

from gateway.domain.places import BY_ID, RESPONSES
from gateway.domain.tokens import Tail
from gateway.served import Served


@pytest.mark.parametrize(("path", "total"), [(RESPONSES, 12), *((path, 0) for path in BY_ID)])
def test_a_response_that_is_asked_for_again_is_not_used_again(path: str, total: int) -> None:
    served = Served(path=path, tail=Tail(), status=200, sent_bytes=50)
    assert served.tail is not None
    served.tail.last.append(b'{"id":"resp_1","usage":{"input_tokens":5,"output_tokens":7}}')
    served.end()
    assert served.used is not None
    assert served.used.total == total
