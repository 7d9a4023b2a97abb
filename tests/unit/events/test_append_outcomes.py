"""Every row of the retry table: what the server answers, what the caller learns, and what is stored."""

import asyncio
from collections.abc import Callable

import pytest

from events.appender import RetryBudget
from events.log import (
    Appended,
    Conflict,
    Fence,
    LogFull,
    Misconfigured,
    OutcomeUnknown,
    Recorded,
    Unavailable,
)
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from events.retry import Action, ServerError, classify, pause_s
from schemas.commands import Command, ModelRemove
from tests.support import drafts
from tests.support.aio import run, until

QUICK = RetryBudget(ack_timeout_s=0.05, budget_s=0.5)


def error(err_code: int | None, code: int = 400) -> ServerError:
    return ServerError(code=code, err_code=err_code, description=f"error {err_code}")


class Bench:
    """A broker, a log on it, and the model every test appends."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.log = MemoryLog(self.broker, source="/cp/1", budget=QUICK)
        self.other = MemoryLog(self.broker, source="/cp/2", budget=QUICK)

    async def append(self) -> Appended:
        return await self.log.append(drafts.model("m", 0), epoch=1)

    async def batch(self, fence: Fence | None = None) -> Appended:
        return await self.log.append_batch(
            [drafts.model("m", 0), drafts.model("n", 0), drafts.model("o", 0)],
            epoch=1,
            fence=fence,
        )

    def other_writes(self, subject: str) -> None:
        """Another writer's event on the model's subject, stored right now."""
        self.broker.put(subject, b'{"id":"somebody-else"}')


def stored(bench: Bench) -> int:
    return len(bench.broker.events.messages)


TRANSIENT = [
    error(10158),
    error(10008, 503),
    error(10163, 503),
    error(10210, 429),
    error(None, 503),
]
FULL = [error(10077, 503), error(10023, 503), error(10047, 500), error(10028), error(10002)]
FAULTS = [error(code) for code in (10054, 10060, 10174, 10175, 10177, 10199, 10201, 10039, 99999)]


@pytest.mark.parametrize("refusal", TRANSIENT, ids=str)
def test_a_transient_refusal_is_tried_again(refusal: ServerError) -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.refusals.extend([refusal, refusal])
        assert (await bench.append()).seqs == (1,)
        assert stored(bench) == 1

    run(main())


@pytest.mark.parametrize("refusal", FULL, ids=str)
def test_log_15_a_full_server_is_told_at_once_with_its_code(refusal: ServerError) -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.refusals.append(refusal)
        with pytest.raises(LogFull) as full:
            await bench.append()
        assert full.value.err_code == refusal.err_code
        assert bench.broker.published == 1
        assert stored(bench) == 0

    run(main())


@pytest.mark.parametrize("refusal", FAULTS, ids=str)
def test_a_fault_is_told_at_once(refusal: ServerError) -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.refusals.append(refusal)
        with pytest.raises(Misconfigured, match=str(refusal.err_code)):
            await bench.append()
        assert bench.broker.published == 1

    run(main())


def test_nobody_there_for_a_while() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.no_responders = 3
        assert (await bench.append()).seqs == (1,)

    run(main())


def test_nobody_there_for_longer_than_the_budget() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.no_responders = 10_000
        with pytest.raises(Unavailable):
            await bench.append()
        with pytest.raises(Unavailable):
            await bench.batch()

    run(main())


def test_a_message_lost_on_the_way_is_sent_again() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.lose_messages = 2
        assert (await bench.append()).seqs == (1,)
        assert stored(bench) == 1

    run(main())


def test_a_message_never_answered_is_unavailable_after_three_tries() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.lose_messages = 10_000
        with pytest.raises(Unavailable):
            await bench.append()
        assert bench.broker.published == QUICK.tries

    run(main())


def test_wrong_last_sequence_because_of_our_own_message_is_success() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.lose_acks = 1
        done = await bench.append()
        last = await bench.log.last(drafts.model_subject("m"))
        assert isinstance(last, Recorded)
        assert (done.seqs, done.ids) == ((1,), (last.id,))
        assert bench.broker.published == 2

    run(main())


def test_our_own_message_is_found_behind_a_later_one() -> None:
    """The ack is lost and somebody wrote on: ours is no longer the last, but it is stored."""

    async def main() -> None:
        bench = Bench()
        bench.broker.lose_acks = 1
        append = asyncio.create_task(bench.append())
        await until(lambda: stored(bench) == 1, "our event to be stored")
        bench.other_writes(drafts.model_subject("m"))
        assert (await append).seqs == (1,)

    run(main())


def test_wrong_last_sequence_because_of_another_is_a_conflict() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.before_publish = bench.other_writes
        with pytest.raises(Conflict):
            await bench.append()
        assert bench.broker.published == 1

    run(main())


def test_a_write_still_in_flight_is_waited_for() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.refusals.extend([error(10164), error(10164)])
        assert (await bench.append()).seqs == (1,)

    run(main())


def test_a_write_in_flight_that_came_first_is_a_conflict() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.refusals.append(error(10164))
        bench.broker.before_publish = bench.other_writes
        with pytest.raises(Conflict):
            await bench.append()

    run(main())


def test_a_duplicate_is_success_with_the_first_sequence() -> None:
    """How a replicated stream answers a repetition; commands have no expectation, so here too."""

    async def main() -> None:
        bench = Bench()
        command = Command(id="c", body=ModelRemove(model="m"))
        bench.broker.lose_acks = 1
        assert await bench.log.send("a", command) == 1
        assert await bench.other.send("a", command) == 1

    run(main())


def test_log_06_disconnected_from_the_start_nothing_is_sent() -> None:
    async def main() -> None:
        bench = Bench()
        bench.log.connection.disconnect()
        for attempt in (bench.append, bench.batch):
            with pytest.raises(Unavailable):
                await attempt()
        bench.log.connection.reconnect()
        assert bench.broker.published == 0

    run(main())


@pytest.mark.parametrize("arrived", [True, False])
def test_a_connection_lost_before_the_answer_is_waited_for(arrived: bool) -> None:
    async def main() -> None:
        bench = Bench()

        def lose(_: str) -> None:
            bench.log.connection.disconnect()
            asyncio.get_running_loop().call_later(0.05, bench.log.connection.reconnect)

        bench.broker.before_publish = lose
        if arrived:
            bench.broker.lose_acks = 1
        else:
            bench.broker.lose_messages = 1
        assert (await bench.append()).seqs == (1,)
        assert stored(bench) == 1

    run(main())


def test_a_connection_lost_for_longer_than_the_budget() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.lose_acks = 1
        bench.broker.before_publish = lambda _: bench.log.connection.disconnect()
        with pytest.raises(Unavailable):
            await bench.append()

    run(main())


# --- batches ---


def lose_when_committed(bench: Bench, then: Callable[[], None]) -> None:
    """Runs `then` when the third and last message of a batch arrives."""
    left = 3

    def count(_: str) -> None:
        nonlocal left
        left -= 1
        if left:
            bench.broker.before_publish = count
        else:
            then()

    bench.broker.before_publish = count


def test_log_31_a_batch_the_server_forgot_is_sent_anew() -> None:
    async def main() -> None:
        bench = Bench()
        lose_when_committed(bench, bench.broker.drop_batches)
        done = await bench.batch()
        assert done.seqs == (1, 2, 3)
        assert stored(bench) == 3

    run(main())


def test_a_batch_forgotten_every_time_is_a_fault() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.refusals.extend([error(10176)] * 50)
        with pytest.raises(Misconfigured, match="10176"):
            await bench.batch()

    run(main())


def test_a_batch_whose_commit_was_never_answered_is_unknown() -> None:
    async def main() -> None:
        bench = Bench()

        def lose() -> None:
            bench.broker.lose_messages = 1
            lose_when_committed(bench, lose)

        lose_when_committed(bench, lose)
        with pytest.raises(OutcomeUnknown):
            await bench.batch()
        assert stored(bench) == 0

    run(main())


def test_a_batch_never_answered_is_unknown() -> None:
    """It leaves in one go, so its commit may be with the server as well as its beginning."""

    async def main() -> None:
        bench = Bench()
        bench.broker.lose_messages = 10_000
        with pytest.raises(OutcomeUnknown):
            await bench.batch()
        assert stored(bench) == 0

    run(main())


@pytest.mark.parametrize("commit_lost", [False, True])
def test_what_the_first_message_was_told_explains_the_refused_commit(commit_lost: bool) -> None:
    """The commit alone would say 10176, a batch forgotten, and a lost one nothing at all."""

    async def main() -> None:
        bench = Bench()

        def lose() -> None:
            bench.broker.lose_messages = 1

        if commit_lost:
            lose_when_committed(bench, lose)
        bench.broker.refusals.append(error(10210, 429))
        done = await bench.batch()
        assert done.seqs == (1, 2, 3)
        assert stored(bench) == 3
        bench.broker.refusals.append(error(10174))
        with pytest.raises(Misconfigured, match="10174"):
            await bench.batch()

    run(main())


def test_log_31_a_connection_lost_within_a_batch_stores_nothing() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.before_publish = lambda _: bench.log.connection.disconnect()
        with pytest.raises(OutcomeUnknown):
            await bench.batch()
        assert stored(bench) == 0
        bench.log.connection.reconnect()
        assert (await bench.batch()).seqs == (1, 2, 3)

    run(main())


def test_log_31_a_connection_lost_within_a_batch_is_settled_after_the_reconnect() -> None:
    async def main() -> None:
        bench = Bench()

        def lose(_: str) -> None:
            bench.log.connection.disconnect()
            asyncio.get_running_loop().call_later(0.05, bench.log.connection.reconnect)

        bench.broker.before_publish = lose
        assert (await bench.batch()).seqs == (1, 2, 3)
        assert stored(bench) == 3

    run(main())


def test_a_connection_lost_after_the_commit_is_settled_after_the_reconnect() -> None:
    async def main() -> None:
        bench = Bench()

        def lose() -> None:
            bench.broker.lose_acks = 1
            bench.log.connection.disconnect()
            asyncio.get_running_loop().call_later(0.05, bench.log.connection.reconnect)

        lose_when_committed(bench, lose)
        assert (await bench.batch()).seqs == (1, 2, 3)
        assert stored(bench) == 3

    run(main())


def test_log_15_a_full_stream_refuses_a_batch_whole() -> None:
    async def main() -> None:
        bench = Bench()
        bench.broker.events.full = True
        with pytest.raises(LogFull):
            await bench.batch()
        assert stored(bench) == 0
        bench.broker.events.full = False
        assert (await bench.batch()).seqs == (1, 2, 3)

    run(main())


@pytest.mark.parametrize("alone", [True, False])
def test_refused_for_our_own_message_is_no_conflict_while_it_cannot_be_read(alone: bool) -> None:
    async def main() -> None:
        bench = Bench()
        won = await bench.log.append(drafts.elected("a", 0), epoch=0)
        fence = Fence(subject=drafts.LEADER, seq=won.seqs[0])
        bench.broker.lose_acks = 1
        bench.broker.lose_reads = 4
        if alone:
            assert (await bench.append()).seqs == (2,)
        else:
            batch = [drafts.model("m", 0), drafts.line(fence.seq, 0)]
            done = await bench.log.append_batch(batch, epoch=fence.seq, fence=fence)
            assert done.seqs == (2, 3)

    run(main())


# --- the table by itself ---


@pytest.mark.parametrize(
    ("refusal", "action"),
    [
        *((e, Action.AGAIN) for e in TRANSIENT),
        *((e, Action.FULL) for e in FULL),
        *((e, Action.FAULT) for e in FAULTS),
        (error(10071), Action.READ_BACK),
        (error(10164), Action.READ_BACK),
        (error(10176), Action.ABANDONED),
        (error(12345, 503), Action.AGAIN),
        (error(12345, 429), Action.AGAIN),
    ],
    ids=str,
)
def test_the_code_decides_not_the_class(refusal: ServerError, action: Action) -> None:
    assert classify(refusal) is action


def test_pauses_grow_to_a_second_and_differ() -> None:
    assert [pause_s(n, 0.0) for n in (1, 2, 3, 9, 99)] == [0.05, 0.1, 0.2, 1.0, 1.0]
    assert pause_s(9, 1.0) == 0.5
