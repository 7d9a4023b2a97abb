"""Decides in which order requests go on that wait for a turn at a model whose replicas all run as many as they may.

By priority, then the keys in turn, then arrival. Whoever is first and can use what became free goes; nobody else is
woken. It must not know replicas, nor do I/O or ask a clock: what can be used now is told by whoever asks for the next.
"""

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from gateway.domain.keytable import Caller
from gateway.domain.waitingroom import Full
from schemas.key import Priority

Want = Hashable
"""What a request asks for, as far as it decides which replicas can serve it: two with the same want can go to the same."""

CLASSES: Final[tuple[Priority, ...]] = ("high", "normal", "low")


class Busy(Struct, frozen=True, kw_only=True):
    """Every replica that could serve the request runs as many as it may: it has to wait for its turn. `full`: so does
    every other one of its model."""

    full: bool = False


BUSY: Final = Busy()
FULL: Final = Busy(full=True)


class Turn(Struct, frozen=True, kw_only=True):
    """A place in the line of a model. `who` is the key's id, empty for everybody who has none."""

    ticket: int
    model: str
    want: Want
    priority: Priority
    who: str
    size_bytes: int
    joined_s: float


def priority_of(caller: Caller, asked: bytes | None) -> Priority:
    """The priority of a request: its key's, which the request may lower and not raise. What is no priority lowers
    nothing; without keys everybody is normal."""
    own: Priority = "normal" if caller.key is None else caller.key.priority
    if asked is not None:
        text = asked.strip().lower()
        for lower in CLASSES[CLASSES.index(own) + 1 :]:
            if text == lower.encode("ascii"):
                return lower
    return own


PACE_OF: Final = 32
"""The pace of a line is that of the last so many who went on."""


@dataclass(slots=True)
class _OfKey:
    """The requests of one key by what they want, each in order of arrival."""

    turns: dict[Want, dict[int, Turn]] = field(default_factory=dict)
    count: int = 0


@dataclass(slots=True)
class _Line:
    """The keys of each class that have somebody here, the one whose turn is next first. `went_s`: when somebody went
    on last, and before that the line began."""

    went_s: deque[float]
    classes: tuple[dict[str, _OfKey], ...] = field(default_factory=lambda: ({}, {}, {}))
    count: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Turns:
    """The lines of one gateway, one per model, each bounded by requests and bytes."""

    max_requests: int
    max_bytes: int
    _lines: dict[str, _Line] = field(default_factory=dict)
    _next_ticket: int = 1

    def join(
        self,
        model: str,
        want: Want,
        *,
        priority: Priority,
        who: str,
        size_bytes: int,
        now_s: float,
        accepted: bool = False,
    ) -> Turn | Full:
        """Puts a request in line, or says which bound it met.

        `accepted`: it waited before, or lost the replica it had; it is not turned away for those who came since. One
        body larger than the bound may wait alone.
        """
        line = self._lines.get(model)
        if line is not None and not accepted:
            if line.count >= self.max_requests:
                return Full(what="requests", limit=self.max_requests)
            if line.size_bytes + size_bytes > self.max_bytes:
                return Full(what="bytes", limit=self.max_bytes)
        if line is None:
            if self.max_requests < 1 and not accepted:
                return Full(what="requests", limit=self.max_requests)
            line = self._lines[model] = _Line(deque((now_s,), maxlen=PACE_OF + 1))
        turn = Turn(
            ticket=self._next_ticket,
            model=model,
            want=want,
            priority=priority,
            who=who,
            size_bytes=size_bytes,
            joined_s=now_s,
        )
        self._next_ticket += 1
        of_class = line.classes[CLASSES.index(priority)]
        of_key = of_class.get(who)
        if of_key is None:
            of_key = of_class[who] = _OfKey()
        of_key.turns.setdefault(want, {})[turn.ticket] = turn
        of_key.count += 1
        line.count += 1
        line.size_bytes += size_bytes
        return turn

    def first(self, model: str, besides: Container[Want] = ()) -> Turn | None:
        """Whose turn it is among those who want none of `besides`; None: nobody's.

        1. the highest class that has such a request
        2. in it the key that waits longest for its turn
        3. of that key the request that came first
        """
        line = self._lines.get(model)
        if line is None:
            return None
        for of_class in line.classes:  # 1
            for of_key in of_class.values():  # 2
                found: Turn | None = None
                for want, turns in of_key.turns.items():
                    if want in besides:
                        continue
                    turn = next(iter(turns.values()))
                    if found is None or turn.ticket < found.ticket:
                        found = turn
                if found is not None:  # 3
                    return found
        return None

    def take(self, turn: Turn, now_s: float) -> None:
        """It goes on: its key is the last of its class to have another turn."""
        line = self._lines[turn.model]
        line.went_s.append(now_s)
        of_class = line.classes[CLASSES.index(turn.priority)]
        assert self._remove(turn), "who takes a turn has one"
        of_key = of_class.pop(turn.who, None)
        if of_key is not None:
            of_class[turn.who] = of_key

    def leave(self, turn: Turn) -> bool:
        """The request waits no more. False: it was taken out before."""
        return self._remove(turn)

    def _remove(self, turn: Turn) -> bool:
        line = self._lines.get(turn.model)
        if line is None:
            return False
        of_class = line.classes[CLASSES.index(turn.priority)]
        of_key = of_class.get(turn.who)
        turns = None if of_key is None else of_key.turns.get(turn.want)
        if of_key is None or turns is None or turns.pop(turn.ticket, None) is None:
            return False
        of_key.count -= 1
        if not turns:
            del of_key.turns[turn.want]
            if not of_key.turns:
                del of_class[turn.who]
        line.count -= 1
        line.size_bytes -= turn.size_bytes
        if not line.count:
            del self._lines[turn.model]
        return True

    # -- looking ---------------------------------------------------------------------------------

    def has(self, model: str) -> bool:
        """Whether anybody waits for a turn at this model."""
        return model in self._lines

    def models(self) -> tuple[str, ...]:
        """Every model with a line."""
        return tuple(self._lines)

    def by_model(self) -> dict[str, int]:
        """How many wait for a turn at each."""
        return {model: line.count for model, line in self._lines.items()}

    def wait_s(
        self, model: str, *, priority: Priority, who: str, now_s: float, besides: Turn | None = None
    ) -> float:
        """How long a request that came now would wait for its turn, as far as that can be told; 0 without a line.

        So many have theirs before it: all of higher classes; of its class its key's own, and of every other key as many
        as its key has turns until then. They go on at the pace of late, which a standstill makes slower by itself, and
        so does a line in which nobody has gone on yet. Those who leave, and those of higher classes who come, are not
        foreseen. `besides` is about to leave.
        """
        line = self._lines.get(model)
        if line is None:
            return 0.0
        own_class = CLASSES.index(priority)
        before = sum(k.count for c in line.classes[:own_class] for k in c.values())
        of_class = line.classes[own_class]
        own = of_class[who].count if who in of_class else 0
        leaving = besides is not None and (besides.priority, besides.who) == (priority, who)
        own -= leaving
        before += own + sum(min(k.count, own + 1) for w, k in of_class.items() if w != who)
        went = len(line.went_s) - 1
        each_s = max(0.0, now_s - line.went_s[0]) / max(1, went)
        return (before + 1) * each_s

    def __len__(self) -> int:
        return sum(line.count for line in self._lines.values())
