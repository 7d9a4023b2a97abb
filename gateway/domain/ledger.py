"""Keeps the books of all keys with limits, and knows which gateways share them: what each told, and what it has heard.

One gateway's state, owned by gateway/limits.py. It must not do I/O or ask a clock; times are seconds of the
gateway's own, whether it is connected is an argument.
"""

from collections.abc import Container, Mapping
from typing import Final

from gateway.domain.ratelimits import UNUSED, Reading, Refused, Window
from gateway.domain.seats import Seats
from gateway.domain.shares import KeyBook
from schemas.beacons import KeyUse, LimitsBeacon
from schemas.key import Key

GONE_AFTER_S: Final = 3.0
"""Who was not heard for this long shares no limit any more."""

FORGOTTEN_AFTER_S: Final = 120.0
"""What it told is kept longer, so that it does not count twice when it comes back."""


class _Heard:
    """What was told of one key in the last 60 seconds, counted from when it was heard."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()

    def add(self, requests: int, tokens: int, second: int) -> None:
        if requests > 0:
            self.requests.move(second)
            self.requests.add(requests)
        if tokens > 0:
            self.tokens.move(second)
            self.tokens.add(tokens)

    def totals(self, second: int) -> tuple[int, int]:
        self.requests.move(second)
        self.tokens.move(second)
        return self.requests.total, self.tokens.total


class _Peer:
    """Another gateway, in one of its lives. `acked`: the number of ours it surely has heard; `knows`: it said so itself.

    `used` is what it told to have used, by key: when it has ended others are told of it.
    """

    __slots__ = ("acked", "heard_s", "inflight", "keys", "knows", "live", "n", "used")

    def __init__(self, acked: int) -> None:
        self.acked = acked
        self.knows = False
        self.live = True
        self.n = 0
        self.heard_s = 0.0
        self.keys: dict[str, KeyUse] = {}
        self.inflight: Mapping[str, int] = {}
        self.used: dict[str, _Heard] = {}


class Ledger:
    """`gateways` is how many share each limit, this one among them; `known` whether all others know of it.

    Incarnations are ids in the order of their making. `pressed`: others should hear of what was used here, and say so,
    sooner than within a second.
    """

    def __init__(self, gateway: str, incarnation: str) -> None:
        self.gateways = 1
        self.known = True
        self.pressed = False
        self._gateway = gateway
        self._incarnation = incarnation
        self._n = 0
        self._acked = 0
        self._books: dict[str, KeyBook] = {}
        self._unheard: set[str] = set()
        # What the last beacon said of each key. Of thousands few have changed by the next: those used since, and those of
        # which time alone changes something, each at most once by the second in which it does.
        self._listed: dict[str, KeyUse] = {}
        self._touched: set[str] = set()
        self._due: dict[int, list[str]] = {}
        self._is_due: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._inherited: dict[str, _Heard] = {}
        self._inflight: dict[str, int] = {}
        self._seats = Seats()
        self._listening_since_s: float | None = None
        self._heard_self_s: float | None = None

    # -- requests --------------------------------------------------------------------------------

    def admit(self, key: Key, tokens: int, now_s: float) -> Refused | int:
        """Counts a request of this key that may take so many tokens, until `end`; or says what has no room.

        Returns how many tokens it holds: one that may take more than the whole limit is admitted once nothing of the
        limit is used.
        """
        if key.tpm and tokens > key.tpm:
            tokens = key.tpm
        book = self._books.get(key.id)
        if book is None:
            book = self._books[key.id] = KeyBook()
        self._touched.add(key.id)
        told = book.admit(key, tokens, int(now_s), gateways=self.gateways, known=self.known)
        if isinstance(told, Refused):
            self.pressed = self.pressed or told.asks
            return told
        if told:
            self.pressed = True
        return tokens

    def end(self, key: Key, held: int, used: int, now_s: float) -> None:
        """A request of it ended that held so many tokens and used so many."""
        self._books[key.id].end(held, used, int(now_s))
        self._touched.add(key.id)

    def read(self, key: Key, now_s: float) -> Reading:
        """What is used of its limits."""
        book = self._books.get(key.id)
        return UNUSED if book is None else book.read(int(now_s))

    # -- beacons ---------------------------------------------------------------------------------

    def tell(
        self, now_s: float, inflight: Mapping[str, int], *, leaving: bool = False
    ) -> LimitsBeacon:
        """The next beacon; counts up `n`."""
        self._n += 1
        second = int(now_s)
        for id in self._to_tell(second):
            self._tell(id, second)
        self._seats.tell(self._n, inflight)
        asks, self.pressed = self.pressed, False
        if self.gateways == 1:
            self._heard_until(self._n)
        return LimitsBeacon(
            gateway=self._gateway,
            incarnation=self._incarnation,
            n=self._n,
            keys=dict(self._listed),
            inflight=dict(inflight),
            leaving=leaving,
            heard={of: peer.n for of, peer in self._peers.items() if peer.live},
            asks=asks,
        )

    def _to_tell(self, second: int) -> set[str]:
        """Keys of which this beacon may say something else than the last: used since, or changed by time, or used by a
        gateway that has ended, of which every beacon says what is of the last minute."""
        ids, self._touched = self._touched, set()
        for due in [s for s in self._due if s <= second]:
            changed = self._due.pop(due)
            self._is_due.difference_update(changed)
            ids.update(changed)
        for id, used in list(self._inherited.items()):
            ids.add(id)
            if used.totals(second) == (0, 0):
                del self._inherited[id]
        for peer in self._peers.values():
            if not peer.live:
                ids.update(peer.used)
        return ids

    def _tell(self, id: str, second: int) -> None:
        """Puts into `_listed` what there is to say of a key now."""
        book = self._books.get(id)
        gone = (0, 0) if book is None else self._used_by_gone(id, second)
        use = None if book is None else book.tell(self._n, second, gone)
        if book is None or use is None:
            self._listed.pop(id, None)
            return
        self._listed[id] = use
        if book.is_unheard:
            self._unheard.add(id)
        if id not in self._is_due:
            in_s = book.tells_anew_s()
            if in_s is not None:
                self._is_due.add(id)
                self._due.setdefault(second + in_s, []).append(id)

    def hear(self, beacon: LimitsBeacon, now_s: float) -> bool:
        """Takes in another gateway's beacon; True: it waits for the next of ours.

        1. our own: whatever was told before it has been heard too. One that a later one has overtaken: nothing
        2. the first of a life: what it told by now is not known to be of the last minute but for what it says so.
           It can use a share no sooner than it has heard our next beacon, so all told before counts as heard
           What gateways used that ended before this one could hear them it tells, too
        3. sums only grow: what they grew by is counted now, never more than is recent
        4. it says which of ours it has heard
        """
        if beacon.incarnation == self._incarnation:  # 1
            if self._heard_self_s is not None and now_s - self._heard_self_s > GONE_AFTER_S:
                self._listening_since_s = now_s
            self._heard_self_s = now_s
            return False
        peer = self._peers.get(beacon.incarnation)
        first = peer is None
        if peer is None:  # 2
            peer = self._peers[beacon.incarnation] = _Peer(self._n)
        elif beacon.n <= peer.n:
            return False
        back = not peer.live
        if back:
            peer.live, peer.acked, peer.knows = True, self._n, False
            self._touched.update(peer.used)  # They are not what somebody used who has ended.
        peer.n = beacon.n
        peer.heard_s = now_s
        second = int(now_s)
        for id, use in beacon.keys.items():  # 3
            before = peer.keys.get(id)
            if before == use and not back:
                continue  # It says what it said before.
            book = self._books.get(id)
            if book is None:
                book = self._books[id] = KeyBook()
            requests, tokens = use.recent_requests, use.recent_tokens
            if before is not None:
                requests = min(requests, use.requests - before.requests)
                tokens = min(tokens, use.tokens - before.tokens)
            _of(peer.used, id).add(requests, tokens, second)
            book.hear(requests, tokens, second)
            if first and (use.gone_requests or use.gone_tokens):
                known_requests, known_tokens = self._used_by_gone(id, second)
                requests, tokens = (
                    use.gone_requests - known_requests,
                    use.gone_tokens - known_tokens,
                )
                _of(self._inherited, id).add(requests, tokens, second)
                book.hear(requests, tokens, second)
            was_running, was_held = (before.running, before.held) if before and not back else (0, 0)
            book.others_running += use.running - was_running
            book.others_held += use.held - was_held
        keys = dict(beacon.keys)
        for id, use in peer.keys.items():
            if id not in keys:
                if not back:
                    self._take_back(id, use)
                # Its sums are still the base of what it tells next.
                if use.running or use.held:
                    use = KeyUse(requests=use.requests, tokens=use.tokens, running=0)
                keys[id] = use
        peer.keys = keys
        peer.inflight = beacon.inflight
        acked = beacon.heard.get(self._incarnation)  # 4
        if acked is not None:
            peer.knows = True
            peer.acked = max(peer.acked, acked)
        if beacon.leaving:
            self._gone(peer)
        self._count()
        return (beacon.asks or first or back) and not beacon.leaving

    def look(self, now_s: float, *, connected: bool) -> None:
        """Drops who is silent. Who cannot hear anybody, itself neither, knows of nobody's silence: it goes on sharing
        with those it knew, and after that gives them as long as ever to be heard again."""
        if not connected:
            self._listening_since_s = None
            return
        if self._listening_since_s is None:
            self._listening_since_s = now_s
        until_s = now_s if self._heard_self_s is None else self._heard_self_s
        for of, peer in list(self._peers.items()):
            silent_s = until_s - max(peer.heard_s, self._listening_since_s)
            if peer.live and silent_s > GONE_AFTER_S:
                self._gone(peer)
            if silent_s > FORGOTTEN_AFTER_S:
                del self._peers[of]
                self._touched.update(peer.used)
        self._count()

    def forget(self, known: Container[str], now_s: float) -> None:
        """Drops the books of keys that are not in the log any more, and that nothing is left of."""
        second = int(now_s)
        for id, book in list(self._books.items()):
            if id not in known:
                book.read(second)
                if not book.is_used:
                    del self._books[id]
                    self._listed.pop(id, None)
                    self._is_due.discard(id)
                    self._unheard.discard(id)
                    self._inherited.pop(id, None)

    def inflight(self) -> Mapping[str, int]:
        """Requests at each replica that the other gateways told of."""
        return self._inflight

    def _used_by_gone(self, id: str, second: int) -> tuple[int, int]:
        """Requests and tokens of the last minute of gateways that have ended, as far as is known here."""
        requests = tokens = 0
        for used in (self._inherited, *(p.used for p in self._peers.values() if not p.live)):
            heard = used.get(id)
            if heard is not None:
                more = heard.totals(second)
                requests, tokens = requests + more[0], tokens + more[1]
        return requests, tokens

    def has_seat(self, replica: str, ours: int, limit: int) -> bool:
        """Whether one more of ours may run at a replica that runs at most `limit` at once, of all gateways.

        Where only others' parts are free it asks them to say soon what they use.
        """
        others = self._inflight.get(replica, 0)
        free = self._seats.is_free(
            replica, ours, others, limit, gateways=self.gateways, known=self.known
        )
        if not free and ours + others < limit:
            self.pressed = True
        return free

    def _gone(self, peer: _Peer) -> None:
        """What ran there has ended with it, as far as anybody can know; what was used stays used."""
        peer.live = False
        for id, use in peer.keys.items():
            self._take_back(id, use)
        peer.inflight = {}

    def _take_back(self, id: str, use: KeyUse) -> None:
        book = self._books.get(id)
        if book is not None:
            book.others_running -= use.running
            book.others_held -= use.held

    def _count(self) -> None:
        live = [peer for peer in self._peers.values() if peer.live]
        self.gateways = 1 + len(live)
        # Of two that meet, the younger holds back until the elder reckons with it.
        self.known = all(
            peer.knows or of > self._incarnation for of, peer in self._peers.items() if peer.live
        )
        self._heard_until(min((peer.acked for peer in live), default=self._n))
        inflight: dict[str, int] = {}
        for peer in live:
            for replica, count in peer.inflight.items():
                inflight[replica] = inflight.get(replica, 0) + count
        self._inflight = inflight

    def _heard_until(self, n: int) -> None:
        if n == self._acked and self.gateways > 1:
            return
        self._acked = n
        self._seats.heard_by_all(n)
        for id in list(self._unheard):
            if self._books[id].heard_by_all(n):
                self._unheard.discard(id)


def _of(used: dict[str, _Heard], id: str) -> _Heard:
    found = used.get(id)
    if found is None:
        found = used[id] = _Heard()
    return found
