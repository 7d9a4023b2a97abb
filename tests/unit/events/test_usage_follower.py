"""How often a usage stream that is not there is looked for."""

from typing import Any

from events.log import StreamIdentity
from events.lookup import NoStream
from events.usage import LONGEST_REST_S, JetStreamUsageFollower
from tests.support.aio import run

IDENTITY = StreamIdentity(stream_id="s", created="c", last_seq=0, schema=1)


class Reads:
    """A server that has no such stream the first `without` times."""

    def __init__(self, without: int) -> None:
        self.without = without

    async def identity(self) -> StreamIdentity:
        if self.without:
            self.without -= 1
            raise NoStream("YARD_USAGE: stream not found")
        return IDENTITY


class Pull:
    def __init__(self) -> None:
        self.rests: list[float] = []

    async def wait_connected(self) -> None: ...

    async def rest(self, longest_s: float) -> None:
        self.rests.append(longest_s)

    async def open(self, start_seq: int) -> int:
        assert start_seq == 1
        return 0


def test_a_stream_that_is_not_there_is_asked_for_ever_more_seldom() -> None:
    async def story() -> None:
        pull: Any = Pull()
        reads: Any = Reads(20)
        page = await JetStreamUsageFollower(pull, reads, after=0, identity=None).next()
        assert page.synced
        rests = pull.rests
        assert len(rests) == 20
        # A process that makes the stream beside this reader has it read at once; later a minute is enough.
        assert sum(rests[:4]) < 1.0
        assert rests == sorted(rests)
        assert rests[-1] == LONGEST_REST_S

    run(story())
