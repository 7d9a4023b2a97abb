"""What an agent knows of the catalog is what the log says, however it was cut into batches, passes and outages."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from events.log import Broken
from nodeagent.domain.catalog import Shelf
from schemas.adapter import Adapter
from tests.support.adapter_files import a_batch, an_adapter, told

NAMES = ("a", "b", "c")
BLANK = {name: an_adapter(name) for name in NAMES}

writes = st.tuples(st.just("write"), st.sampled_from(NAMES), st.integers(0, 3))
others = st.tuples(st.sampled_from(["end", "junk", "newer"]), st.sampled_from(NAMES), st.just(0))
steps = st.one_of(writes, others, st.tuples(st.sampled_from(["cut", "down", "anew"])))


def written(step) -> Adapter:
    """What a write says."""
    _, name, number = step
    return replace(BLANK[name], order=number)


def event_of(step):
    """The event of a step."""
    kind, name, _ = step
    match kind:
        case "write":
            return told("adapter", name, written(step))
        case "end":
            return told("adapter", name, None)
        case "junk":
            return Broken(seq=1, subject=f"yard.evt.adapter.{name}", why="junk")
        case _:
            return told("adapter", name, None, problem="of a newer version", event=None)


@given(st.lists(steps, max_size=30))
def test_what_is_known_is_what_the_log_says_and_every_difference_is_told(story):
    shelf: Shelf[Adapter] = Shelf(Adapter)
    truth: dict[str, Adapter] = {}
    heard: dict[str, Adapter] = {}
    """What whoever listens to the changes alone believes."""
    waiting: list[object] = []

    def take(batch) -> None:
        before = dict(shelf.states)
        changed = shelf.take(batch)
        assert changed == {
            n for n in {*before, *shelf.states} if before.get(n) != shelf.states.get(n)
        }
        for name in changed:
            if name in shelf.states:
                heard[name] = shelf.states[name]
            else:
                heard.pop(name, None)

    take(a_batch())
    for step in story:
        match step[0]:
            case "cut":
                take(a_batch(*waiting))
                waiting.clear()
                assert dict(shelf.states) == truth
            case "down":
                before = dict(shelf.states)
                take(a_batch(synced=False, connected=False))
                assert dict(shelf.states) == before
            case "anew":
                # Another pass, in two batches: until the second nothing looks removed.
                before = dict(shelf.states)
                waiting.clear()
                events = [told("adapter", name, state) for name, state in truth.items()]
                half = len(events) // 2
                take(a_batch(*events[:half], synced=False, reset=True))
                assert dict(shelf.states) == before
                take(a_batch(*events[half:]))
                assert dict(shelf.states) == truth
            case _:
                waiting.append(event_of(step))
                if step[0] == "write":
                    truth[step[1]] = written(step)
                elif step[0] == "end":
                    truth.pop(step[1], None)
    take(a_batch(*waiting))
    assert dict(shelf.states) == truth == heard
