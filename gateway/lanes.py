"""Keeps what all requests with one head have in common, and says which heads a request by the express way may have.

Nothing of it outlives the connection whose head it is, and whether its key still lets it in is asked each time.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.callers import Callers
from gateway.domain.affinity import HEADERS, PATHS, Affinity, by_beginning, by_session
from gateway.domain.answers import Answer
from gateway.domain.cors import answer_headers
from gateway.domain.http_rules import HeaderList
from gateway.domain.keytable import Caller
from gateway.domain.model_rewrite import Renaming
from gateway.domain.names import Place, place_of
from gateway.domain.places import RESPONSES
from gateway.endings import Plain
from gateway.http.outgoing import Front, rendered
from gateway.http.request_head import RequestHead
from gateway.intake import json_onward, may_be_json
from gateway.loadingstream import HEADER as LOADING
from schemas.replica import Replica

_APART: Final = (b"x-request-id", b"traceparent", LOADING)
"""Headers that make a request another than all others of its head; the handler reads them."""

_MOST_RENAMINGS: Final = 64
"""So many names are kept with a head; a client that asks for more makes them anew."""

_MOST_FRONTS: Final = 64
"""So many replicas' beginnings of a request; a client that asks many models makes them anew."""

_MOST_PLAIN: Final = 256
"""The same of what is told of answers: by replica and adapter."""

NO_LANE: Final = "no lane"
"""In the memo of a head that is the handler's, whoever sends it."""


class Lane:
    """What all requests with one head have in common."""

    __slots__ = (
        "caller",
        "cors",
        "cors_headers",
        "fronts",
        "head",
        "is_used",
        "onward",
        "path",
        "place",
        "plain",
        "priority",
        "renamings",
        "session",
        "tied",
    )

    def __init__(self, head: RequestHead, place: Place, caller: Caller, cors: HeaderList) -> None:
        headers = head.headers
        self.head = head
        self.place = place
        self.caller = caller
        self.path = place.path
        self.cors_headers = cors
        self.cors = rendered(cors)
        self.onward = json_onward(headers)
        self.priority = headers.get(b"x-yard-priority")
        given = next((v for v in map(headers.get, HEADERS) if v is not None), None)
        self.session = None if given is None else by_session(given)
        self.tied = self.session is not None or (given is None and place.path in PATHS)
        self.is_used = False
        self.fronts: dict[str, Front] = {}
        self.plain: dict[tuple[str, str], Plain] = {}
        self.renamings: dict[str, Renaming] = {}

    def renames(self, asked: str, own: str) -> Renaming:
        """What clients ask for as `asked` is its engine's `own`, until it is another's."""
        if len(self.renamings) >= _MOST_RENAMINGS:
            self.renamings.clear()
        renaming = self.renamings[asked] = Renaming(asked, own)
        return renaming

    def new_front(self, replica: Replica, host: bytes, key: str | None) -> Front:
        """How requests to this replica at `host` begin from now on; `key` is what its engine asks for."""
        if len(self.fronts) >= _MOST_FRONTS:
            self.fronts.clear()
        secret = None if key is None else key.encode("ascii")
        front = Front(replica, "POST", self.path, host, secret, self.onward)
        self.fronts[replica.id] = front
        return front

    def add_plain(self, kind: tuple[str, str], plain: Plain) -> None:
        """Where answers of this kind are added up from now on."""
        if len(self.plain) >= _MOST_PLAIN:
            self.plain.clear()
        self.plain[kind] = plain

    def tie(self, beginning: msgspec.Raw | None) -> Affinity | None:
        """What ties a request whose conversation begins so to a replica, where there is a choice."""
        if beginning is None or self.session is not None:
            return self.session
        return by_beginning(beginning)

    def told_id(self, request_id: bytes) -> bytes:
        """The lines that tell it; at Anthropic's paths by their name too, as `Envelope.headers`."""
        if self.place.envelope == "openai":
            return b"x-request-id: %b\r\n" % request_id
        return b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id, request_id)


def lane_of(head: RequestHead, peer: str, callers: Callers, origins: Sequence[str]) -> Lane | None:
    """What requests with this head have in common; None: they are the handler's, or their key lets them in no more."""
    headers = head.headers
    memo = headers.memo
    memo["lane"] = None
    place = place_of(head.method, head.path)
    if (
        place.kind != "inference"
        or place.on is not None
        or place.model
        or place.response
        or place.form
        # What is answered there is kept account of.
        or place.path == RESPONSES
        or head.query
        # Its answers have to say that their connection stays.
        or head.version == "1.0"
        or not may_be_json(headers)
        or any(headers.get(name) is not None for name in _APART)
    ):
        memo[NO_LANE] = True
        return None
    caller = callers.identify("inference", headers, peer)
    if isinstance(caller, Answer):
        return None
    lane = memo["lane"] = Lane(head, place, caller, answer_headers(headers.get(b"origin"), origins))
    return lane
