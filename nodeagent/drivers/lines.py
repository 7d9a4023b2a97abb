"""Keeps connections to engines for a moment after an answer: an adapter is loaded while a client waits for it.

A connection belongs to one launch, by its address and key, so none leads to whoever has that port later. It is
kept for less long than engines keep theirs. It decides nothing about what is asked, and asks a second time only
what a kept connection took and gave no byte back for: whoever asks can bear that the first was carried out.
"""

import asyncio
from typing import Final

from nodeagent.drivers import line
from nodeagent.drivers.asking import ANSWER_LIMIT_BYTES, ASK_S
from nodeagent.drivers.line import Answer, Line, Method, NoAnswer

KEPT_S: Final = 4.0
"""vLLM's server closes what is idle after 5 s."""

MOST_IDLE: Final = 2
"""Of one engine. Loads of several adapters may go on side by side."""

_Launch = tuple[str, str]
"""Endpoint and key."""


class Lines:
    """The kept connections of a node. One event loop owns it; `close` ends them all."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._idle: dict[_Launch, list[tuple[Line, asyncio.TimerHandle]]] = {}

    async def ask(
        self,
        endpoint: str,
        method: Method,
        path: str,
        key: str = "",
        *,
        content: bytes | None = None,
        timeout_s: float = ASK_S,
        limit_bytes: int = ANSWER_LIMIT_BYTES,
        cut: bool = False,
    ) -> Answer | NoAnswer:
        """As `asking.ask`, on a kept connection where there is one.

        An engine may close one in the very moment in which it is used. Then nothing came back, and it is asked once
        more on a new one; where nobody takes that, the engine died of the first question as far as anybody can tell.
        """
        launch = (endpoint, key)
        asked = line.question(endpoint, method, path, key, content, keep=True)
        try:
            async with asyncio.timeout(timeout_s):
                kept = self._take(launch)
                if kept is not None:
                    answer = await kept.ask(asked, limit_bytes=limit_bytes, cut=cut)
                    if isinstance(answer, Answer) or answer.why != "broken" or kept.heard:
                        self._put(launch, kept)
                        return answer
                made = await line.connect(endpoint)
                if made is None:
                    return NoAnswer(why="unreachable" if kept is None else "broken")
                answer = await made.ask(asked, limit_bytes=limit_bytes, cut=cut)
                self._put(launch, made)
                return answer
        except TimeoutError:
            return NoAnswer(why="late")

    @property
    def kept(self) -> int:
        """How many could be used again now."""
        return sum(one.is_open for kept in self._idle.values() for one, _ in kept)

    def close(self) -> None:
        """Ends every kept connection."""
        for kept in self._idle.values():
            for one, timer in kept:
                timer.cancel()
                one.abort()
        self._idle.clear()

    def _take(self, launch: _Launch) -> Line | None:
        kept = self._idle.get(launch, [])
        while kept:
            one, timer = kept.pop()
            timer.cancel()
            if not kept:
                del self._idle[launch]
            if one.is_open:
                return one
        return None

    def _put(self, launch: _Launch, one: Line) -> None:
        if not one.is_open:
            return
        kept = self._idle.setdefault(launch, [])
        timer = asyncio.get_running_loop().call_later(self._kept_s, self._end, launch, one)
        kept.append((one, timer))
        if len(kept) > MOST_IDLE:
            oldest, its_timer = kept.pop(0)
            its_timer.cancel()
            oldest.abort()

    def _end(self, launch: _Launch, one: Line) -> None:
        one.abort()
        kept = [(other, timer) for other, timer in self._idle.get(launch, []) if other is not one]
        if kept:
            self._idle[launch] = kept
        else:
            self._idle.pop(launch, None)
