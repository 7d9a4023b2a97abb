"""`yardctl replica logs`: one look, following to the end, an agent that is away for a moment or for good."""

from collections.abc import Sequence
from typing import Any

import pytest

from controlplane.ctl.failures import CtlError
from controlplane.ctl.replicalogs import PATIENCE, print_logs
from events.log import Unavailable
from schemas.beacons import LogsReply, LogsRequest
from tests.support.aio import run


class Agent:
    """Stands for the wire to a node: answers in turn; None is silence."""

    def __init__(self, answers: Sequence[LogsReply | None]) -> None:
        self.answers = list(answers)
        self.asked: list[LogsRequest] = []

    async def request(
        self, what: str, node: str, body: Any, reply_type: Any, *, timeout_s: float
    ) -> Any:
        assert (what, node, reply_type) == ("replica_logs", "n", LogsReply)
        assert timeout_s > body.wait_s
        self.asked.append(body)
        answer = self.answers.pop(0)
        if answer is None:
            raise Unavailable("silence")
        return answer


def printed(
    agent: Agent, capsys: pytest.CaptureFixture[str], *, follow: bool, tail_bytes: int = 10
) -> str:
    run(print_logs(agent, "r-1", "n", tail_bytes, follow))  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_one_look_prints_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent([LogsReply(text="end\n", next_offset=4)])
    assert printed(agent, capsys, follow=False) == "end\n"
    assert agent.asked == [LogsRequest(replica="r-1", tail_bytes=10)]


def test_following_asks_from_where_it_stands_until_the_engine_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    agent = Agent(
        [
            LogsReply(text="a", next_offset=1),
            LogsReply(text="bc", next_offset=3),
            None,
            LogsReply(text="d", next_offset=4, ended=True),
        ]
    )
    assert printed(agent, capsys, follow=True) == "abcd"
    assert [ask.offset for ask in agent.asked] == [None, 1, 3, 3]


def test_a_log_that_is_not_there_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent([LogsReply(problem="its folder is gone")])
    with pytest.raises(CtlError, match="r-1: its folder is gone"):
        printed(agent, capsys, follow=False)


def test_an_agent_that_stays_away_ends_the_following(capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent([LogsReply(text="a", next_offset=1), *[None] * PATIENCE])
    with pytest.raises(CtlError, match="the agent of node n does not answer"):
        printed(agent, capsys, follow=True)
    assert agent.answers == []
