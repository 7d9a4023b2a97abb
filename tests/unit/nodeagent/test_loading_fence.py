"""Nothing is started on a lease that ended while its files were fetched, or that is another one by now."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.drivers.driver import EngineStart
from nodeagent.launching import Running
from nodeagent.loading import Loading, NotStarted
from tests.support.agent_yard import a_held, a_launch
from tests.support.aio import run

STARTED = Running(replica="r-1", pid=1, pgid=1, start_time=1, launcher_pid=1)


class Around:
    """What a loading works with: a lease whose fence a test may move, and a launcher that notes what it starts."""

    def __init__(self) -> None:
        self.fences_now = {"gpu0": 7}
        self.started: list[EngineStart] = []
        self.held = a_held(phase="starting", launch=a_launch(source="mirror:x"), cards=("gpu0",))

    def tools(self) -> Any:
        return SimpleNamespace(
            books=self,
            files=SimpleNamespace(obtain=self.obtain, local=lambda source: source),
            drivers={"command": SimpleNamespace(prepare=self.prepare)},
            meter=SimpleNamespace(environment=lambda cards: {"CUDA_VISIBLE_DEVICES": str(cards)}),
            processes=SimpleNamespace(start=self.start),
            engine_key=str,
            secrets=None,
            grace_s=1.0,
            log_bytes=1,
        )

    def fences(self, holder: str) -> dict[str, int]:
        assert holder == "r-1"
        return dict(self.fences_now)

    def still_leased(self, holder: str, fences: dict[str, int]) -> bool:
        return bool(fences) and all(self.fences_now.get(c) == f for c, f in fences.items())

    async def obtain(self, source: str, replica: str, model: str) -> None:
        """A fetch, during which a test may do what it likes."""
        self.meanwhile()

    def meanwhile(self) -> None:
        pass

    def prepare(self, *_: object, **__: object) -> EngineStart:
        return EngineStart(
            argv=("x",),
            environment={"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1,2"},
            endpoint="http://127.0.0.1:1",
            port=1,
            ready="probe",
            paths=(),
            has_key=False,
        )

    async def start(self, replica: str, start: EngineStart, **_: object) -> Running:
        self.started.append(start)
        return STARTED

    async def story(self) -> object:
        loading = Loading(
            self.tools(),
            "r-1",
            held=lambda: self.held,
            wake=asyncio.Event(),
            over=lambda: False,
            running=None,
        )
        assert await loading.fetch() is None
        return await loading.begin(None)


def test_an_engine_is_started_on_the_lease_it_was_granted_and_sees_its_cards_alone() -> None:
    around = Around()
    assert run(around.story()) == STARTED
    (start,) = around.started
    # Whatever its profile or this process's environment say.
    assert start.environment == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "('gpu0',)"}


@pytest.mark.parametrize("now", [{}, {"gpu0": 8}], ids=["gone", "another"])
def test_an_engine_is_not_started_on_a_lease_that_is_not_the_one_it_was_granted(
    now: dict[str, int],
) -> None:
    around = Around()

    def taken() -> None:
        around.fences_now = now

    around.meanwhile = taken  # type: ignore[method-assign]
    answer = run(around.story())
    assert isinstance(answer, NotStarted)
    assert answer.code == "lost"
    assert around.started == []
