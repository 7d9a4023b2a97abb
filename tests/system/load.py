"""A client that asks at a steady rate and remembers every answer, for tests that kill things meanwhile."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import httpx

from tests.system.yard import chat, client


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request: when it was sent (monotonic), its status or the error class, its code, its frames."""

    at: float
    took_s: float
    status: int | None
    error: str = ""
    code: str = ""
    finished: bool = True
    error_frame: bool = False


@dataclass
class Loop:
    """Sends `rate` requests a second (every second one streamed) until stopped."""

    base: str
    model: str
    rate: float = 20.0
    answers: list[Answer] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "Loop":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        async with client(self.base) as http, asyncio.TaskGroup() as group:
            n = 0
            loop = asyncio.get_running_loop()
            next_at = loop.time()
            while not self._stop.is_set():
                group.create_task(self._ask(http, stream=n % 2 == 1))
                n += 1
                next_at += 1 / self.rate
                try:
                    await asyncio.wait_for(self._stop.wait(), max(next_at - loop.time(), 0))
                except TimeoutError:
                    continue

    async def _ask(self, http: httpx.AsyncClient, *, stream: bool) -> None:
        begun = time.monotonic()
        status: int | None = None
        error = code = ""
        finished, error_frame = True, False
        try:
            async with http.stream(
                "POST", "/v1/chat/completions", json=chat(self.model, stream=stream, max_tokens=8)
            ) as answer:
                status = answer.status_code
                text = (await answer.aread()).decode()
            if status != 200:
                code = json.loads(text)["error"]["code"]
            elif stream:
                finished = "data: [DONE]" in text
                error_frame = '"error"' in text
        except httpx.HTTPError as problem:
            error = problem.__class__.__name__
            finished = False
        self.answers.append(
            Answer(
                at=begun,
                took_s=time.monotonic() - begun,
                status=status,
                error=error,
                code=code,
                finished=finished,
                error_frame=error_frame,
            )
        )
        self._arrived.set()

    async def more_answers(self, n: int, timeout_s: float = 30.0) -> None:
        """Waits until `n` further requests have been answered 200."""
        goal = len([a for a in self.answers if a.status == 200 and a.finished]) + n
        deadline = time.monotonic() + timeout_s
        while len([a for a in self.answers if a.status == 200 and a.finished]) < goal:
            self._arrived.clear()
            try:
                await asyncio.wait_for(
                    self._arrived.wait(), max(deadline - time.monotonic(), 0.001)
                )
            except TimeoutError:
                raise AssertionError(
                    f"waited {timeout_s} s for {n} good answers; last: {self.answers[-5:]}"
                ) from None

    def bad(self) -> list[Answer]:
        """Answers that were not a whole 200."""
        return [a for a in self.answers if a.status != 200 or not a.finished or a.error_frame]
