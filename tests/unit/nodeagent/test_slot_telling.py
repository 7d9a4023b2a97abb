"""What swaps of adapters bring about is told at a pace; what a person did, a failure and a drift at once and whole."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from nodeagent.domain.pace import AT_ONCE
from nodeagent.domain.slots import Place, State
from nodeagent.slottelling import Telling
from schemas.slots import Slots, SlotsDrifted, SlotsEvent, SlotsEvicted, SlotsFailed, SlotsLoaded
from tests.support.aio import run, until

NOW = datetime(2026, 11, 1, tzinfo=UTC)
VERSION = "0123456789ab"


@dataclass
class SomeBooks:
    """Remembers what was said."""

    node: str = "n1"
    slots: dict[str, Slots] = field(default_factory=dict)
    said: list[tuple[SlotsEvent, Slots, str]] = field(default_factory=list)

    def say_slots(
        self, slots: Slots, event: SlotsEvent, *, reason: str = "", cause: str = ""
    ) -> None:
        self.slots[slots.replica] = slots
        self.said.append((event, slots, reason))


@dataclass
class SomeTools:
    books: Any = field(default_factory=SomeBooks)
    clock: float = 100.0

    def epoch(self) -> int:
        return 1

    def now(self) -> datetime:
        return NOW

    def monotonic(self) -> float:
        return self.clock


def state_of(*adapters: str) -> State:
    places = {
        f"{name}@{VERSION[:8]}": Place(
            adapter=name,
            version=VERSION,
            engine_name=f"{name}@{VERSION[:8]}",
            phase="loaded",
            since=NOW,
            how="loaded",
            used_at=0.0,
            changed_at=0.0,
        )
        for name in adapters
    }
    return State(limit=2, places=places)


def loaded(name: str) -> SlotsLoaded:
    return SlotsLoaded(adapter=name, version=VERSION)


def test_inv_11_a_flood_of_swaps_is_told_by_its_newest_with_the_state_of_that_moment() -> None:
    async def story() -> None:
        tools = SomeTools()
        books: SomeBooks = tools.books
        now_loaded = ["a"]
        telling = Telling(tools, "r-1", lambda: state_of(*now_loaded), lambda: "m")
        for number in range(AT_ONCE):
            telling.say(loaded(f"a{number}"))
        assert len(books.said) == AT_ONCE, "whoever watches a quiet yard misses nothing"
        for number in range(50):
            telling.say(loaded(f"b{number}"))
            telling.say(SlotsEvicted(adapter=f"b{number}", version=VERSION, why="room"))
        assert len(books.said) == AT_ONCE
        now_loaded[:] = ["x", "y"]
        tools.clock += 1.5
        await until(lambda: len(books.said) > AT_ONCE, "the next event")
        event, told, reason = books.said[-1]
        assert event == SlotsEvicted(adapter="b49", version=VERSION, why="room")
        assert [slot.adapter for slot in told.loaded] == ["x", "y"]
        assert reason == "99 more loads and evictions since the last event"
        telling.close()

    run(story())


def test_what_is_no_clients_doing_is_told_at_once_with_all_that_waited() -> None:
    async def story() -> None:
        tools = SomeTools()
        books: SomeBooks = tools.books
        telling = Telling(tools, "r-1", lambda: state_of("x"), lambda: "m")
        for number in range(AT_ONCE + 3):
            telling.say(loaded(f"a{number}"))
        for event in (
            SlotsLoaded(adapter="p", version=VERSION, how="person"),
            SlotsEvicted(adapter="p", version=VERSION, why="person"),
            SlotsFailed(adapter="f", version=VERSION, code="load_failed"),
            SlotsDrifted(lost=("x@01234567",)),
        ):
            before = len(books.said)
            telling.say(event, reason="so it is")
            assert len(books.said) == before + 1
            assert books.said[-1][0] == event
        reasons = [reason for _, _, reason in books.said[AT_ONCE:]]
        more = "so it is; 3 more loads and evictions since the last event"
        assert reasons == [more, "so it is", "so it is", "so it is"]
        tools.clock += 5
        telling.say(loaded("z"))
        assert books.said[AT_ONCE + 4 :] == [(loaded("z"), books.slots["r-1"], "")]
        telling.close()

    run(story())


def test_nothing_is_told_of_a_launch_that_is_over() -> None:
    async def story() -> None:
        tools = SomeTools()
        books: SomeBooks = tools.books
        telling = Telling(tools, "r-1", lambda: state_of("x"), lambda: None)
        telling.say(loaded("x"))
        telling.say(SlotsDrifted())
        assert books.said == []
        telling.close()

    run(story())
