"""Decides how much of a key's limit this gateway may use before the others know, and keeps one key's books for that.

Nobody is asked on the way of a request. What all gateways know to be used is taken off the limit; of what is left each
of G may use a G-th part that others have not heard of yet, one request at least. So all together admit at most
the limit, and one request more for each other gateway: docs/keys.md derives it. It must not do I/O or ask a clock.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from gateway.domain.ratelimits import NOT_YET_S, SPAN_S, Reading, Refused, What, Window
from schemas.beacons import KeyUse
from schemas.key import Key

LISTED_S: Final = 62
"""A key is told of for so long after its last use: longer than anything of it can stay in a window."""

_MOST_TOLD: Final = 64
"""So many things told and not heard yet are kept apart; older ones are taken for the least of them."""


def fits(cost: int, limit: int, used: int, unheard: int, gateways: int, known: bool) -> bool:
    """Whether `cost` more may be used of a limit that is shared. `unheard` is what of `used` others may not know yet, `known`
    whether all others count this gateway among those who share.

    1. it is used up
    2. others know all that was used here: one request at least may go on
    3. others do not reckon with this gateway: nothing before they do
    4. it is within this gateway's part of what was left
    """
    if used + cost > limit:  # 1
        return False
    if unheard <= 0:  # 2
        return True
    if not known:  # 3
        return False
    return (unheard + cost) * gateways <= limit - (used - unheard)  # 4


class _Told:
    """What beacon `n`, and those after it that told the same, said of a key."""

    __slots__ = ("n", "requests", "running", "tokens")

    def __init__(self, n: int, requests: int, tokens: int, running: int) -> None:
        self.n = n
        self.requests = requests
        self.tokens = tokens
        self.running = running


class KeyBook:
    """What one key used, here and elsewhere.

    `requests` and `tokens` only grow; `running` and `held` are of now. Tokens that are held are told and counted like
    used ones. `low_…`: the least of ours that some other gateway may still believe.
    """

    __slots__ = (
        "_all_requests",
        "_all_tokens",
        "_low_requests",
        "_low_running",
        "_low_tokens",
        "_new_requests",
        "_new_tokens",
        "_own_requests",
        "_own_tokens",
        "_second",
        "_told",
        "held",
        "others_held",
        "others_running",
        "requests",
        "running",
        "tokens",
        "used_second",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.running = 0
        self.held = 0
        self.others_running = 0
        self.others_held = 0
        self.used_second = 0
        self._second = 0
        # Of the second that runs; they come into the windows when it is over, or somebody looks closer.
        self._new_requests = 0
        self._new_tokens = 0
        self._own_requests = Window()
        self._own_tokens = Window()
        self._all_requests = Window()
        self._all_tokens = Window()
        self._told: deque[_Told] = deque((_Told(0, 0, 0, 0),))
        self._low_requests = 0
        self._low_tokens = 0
        self._low_running = 0

    # -- this gateway's requests -----------------------------------------------------------------

    def admit(
        self, key: Key, tokens: int, second: int, *, gateways: int, known: bool
    ) -> Refused | bool:
        """Counts a request that may take so many tokens, or says which limit has no room.

        True: much of this gateway's share is used, others should hear of it soon.
        """
        if second != self._second:
            self._move(second)
        requests = self._all_requests.total + self._new_requests
        used_tokens = self._all_tokens.total + self._new_tokens + self.held + self.others_held
        running = self.running + self.others_running
        pressed = False
        if gateways == 1:
            if key.rpm and requests >= key.rpm:
                return self._refused("requests", key.rpm, 1, requests)
            if key.tpm and used_tokens + tokens > key.tpm:
                return self._refused("tokens", key.tpm, tokens, used_tokens)
            if key.parallel and running >= key.parallel:
                return self._refused("parallel", key.parallel, 1, running)
        else:
            self._count_new()
            if key.rpm:
                unheard = min(self.requests - self._low_requests, self._own_requests.total)
                if not fits(1, key.rpm, requests, unheard, gateways, known):
                    return self._refused("requests", key.rpm, 1, requests)
                pressed = (unheard + 1) * 2 * gateways > key.rpm - (requests - unheard)
            if key.tpm:
                mine = self._own_tokens.total + self.held
                unheard = min(self.tokens + self.held - self._low_tokens, mine)
                if not fits(tokens, key.tpm, used_tokens, unheard, gateways, known):
                    return self._refused("tokens", key.tpm, tokens, used_tokens)
                left = key.tpm - (used_tokens - unheard)
                pressed = pressed or (unheard + tokens) * 2 * gateways > left
            if key.parallel:
                unheard = self.running - self._low_running
                if not fits(1, key.parallel, running, unheard, gateways, known):
                    return self._refused("parallel", key.parallel, 1, running)
                left = key.parallel - (running - unheard)
                pressed = pressed or (unheard + 1) * 2 * gateways > left
        self.requests += 1
        self.running += 1
        self.held += tokens
        self.used_second = second
        self._new_requests += 1
        return pressed

    def end(self, held: int, used: int, second: int) -> None:
        """A request that held so many tokens has ended and used so many."""
        self.running -= 1
        self.held -= held
        self.tokens += used
        self.used_second = second
        if second != self._second:
            self._move(second)
        if used > 0:
            self._new_tokens += used

    def _refused(self, what: What, limit: int, cost: int, used: int) -> Refused:
        """When there is room: as what is over 60 seconds old leaves. What runs holds its place, and its tokens, until
        it ends, which nobody knows; what is only left to others, until they tell."""
        self._count_new()
        too_much = used + cost - limit
        frees_s: int | None = 1
        if too_much > 0:
            match what:
                case "requests":
                    frees_s = self._all_requests.frees_s(too_much)
                case "tokens":
                    frees_s = self._all_tokens.frees_s(min(too_much, self._all_tokens.total))
                case "parallel":
                    frees_s = None
        asks = too_much <= 0 or (what == "parallel" and self.others_running > 0)
        return Refused(what=what, limit=limit, wanted=cost, frees_s=frees_s, asks=asks)

    # -- between gateways ------------------------------------------------------------------------

    def tell(self, n: int, second: int, gone: tuple[int, int]) -> KeyUse | None:
        """What beacon `n` says of this key; `gone` are requests and tokens of gateways that have ended. None: nothing,
        it was not used for long."""
        if second - self.used_second > LISTED_S and not self.running and gone == (0, 0):
            return None
        self._move(second)
        told, last = self._told, self._told[-1]
        tokens = self.tokens + self.held
        if (last.requests, last.tokens, last.running) != (self.requests, tokens, self.running):
            told.append(_Told(n, self.requests, tokens, self.running))
            if len(told) > _MOST_TOLD:
                oldest, second_oldest = told.popleft(), told[0]
                second_oldest.requests = min(oldest.requests, second_oldest.requests)
                second_oldest.tokens = min(oldest.tokens, second_oldest.tokens)
                second_oldest.running = min(oldest.running, second_oldest.running)
            self._set_low()
        return KeyUse(
            requests=self.requests,
            tokens=self.tokens,
            running=self.running,
            held=self.held,
            recent_requests=self._own_requests.total,
            recent_tokens=self._own_tokens.total,
            gone_requests=gone[0],
            gone_tokens=gone[1],
        )

    @property
    def is_unheard(self) -> bool:
        """Whether something that was told may not have been heard by everybody."""
        return len(self._told) > 1

    def tells_anew_s(self) -> int | None:
        """In how many seconds, from the last `tell`, it would tell something else though nothing is used: what was used
        leaves the last minute, or it is not listed any more. None: not by time alone."""
        found = [w.frees_s(1) for w in (self._own_requests, self._own_tokens) if w.total]
        if not self.running:
            found.append(self.used_second + LISTED_S + 1 - self._second)
        # What is used from now on leaves in so many seconds at the soonest: no use makes the answer too late.
        return max(1, min(*found, SPAN_S + 1)) if found else None

    def heard_by_all(self, n: int) -> bool:
        """Everybody has heard beacon `n`, or a later one; True: nothing that was told is unheard any more."""
        told = self._told
        if len(told) > 1:
            while len(told) > 1 and told[1].n <= n:
                told.popleft()
            self._set_low()
        return len(told) == 1

    def hear(self, requests: int, tokens: int, second: int) -> None:
        """Another gateway tells that so much more was used there. It counts from now on: later than it was used."""
        self._move(second)
        if requests > 0:
            self._all_requests.add(requests)
        if tokens > 0:
            self._all_tokens.add(tokens)

    def read(self, second: int) -> Reading:
        """What is used of the limits."""
        if second != self._second:
            self._move(second)
        held = self.held + self.others_held
        requests, tokens = self._new_requests, self._new_tokens
        return Reading(
            requests=self._all_requests.total + requests,
            requests_reset_s=NOT_YET_S if requests else self._all_requests.empties_s,
            tokens=self._all_tokens.total + tokens + held,
            tokens_reset_s=60 if held else NOT_YET_S if tokens else self._all_tokens.empties_s,
        )

    @property
    def is_used(self) -> bool:
        """Whether anything of it counts anywhere, as of the last look."""
        return bool(
            self.running
            or self.others_running
            or self._all_requests.total
            or self._all_tokens.total
            or self._new_requests
            or self._new_tokens
        )

    def _count_new(self) -> None:
        """Into the windows, which stand at the second in which it was used."""
        requests, tokens = self._new_requests, self._new_tokens
        if requests:
            self._new_requests = 0
            self._own_requests.add(requests)
            self._all_requests.add(requests)
        if tokens:
            self._new_tokens = 0
            self._own_tokens.add(tokens)
            self._all_tokens.add(tokens)

    def _move(self, second: int) -> None:
        self._count_new()
        self._second = second
        self._own_requests.move(second)
        self._own_tokens.move(second)
        self._all_requests.move(second)
        self._all_tokens.move(second)

    def _set_low(self) -> None:
        told = self._told
        self._low_requests = told[0].requests
        self._low_tokens = _least(t.tokens for t in told)
        self._low_running = _least(t.running for t in told)


def _least(values: Iterable[int]) -> int:
    return min(values)
