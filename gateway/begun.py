"""What was begun of a request before its handler got it (gateway/errand.py), and what is given back of it if none ever
does. Data only but for that.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.adapterdesk import Seeking
from gateway.domain.names import Place
from gateway.domain.request_fields import RequestFields
from gateway.http.engine_connection import EngineConnection
from gateway.http.engine_response import EngineResponse
from gateway.http.exchange import Exchange
from gateway.inhand import Run
from gateway.served import Served
from gateway.timeline import Timeline


@dataclass(slots=True)
class Begun:
    """A request for `place` that was let in, and asks for `fields`.

    `run`: it counts at a replica by now, and what it met on the way to an adapter is `seeking`. `answer`: it went out
    over `connection` as `exchange`, and this is what comes of that; `name` is its engine's for the adapter, if it is for
    one. `drop` ends it all for a client that left before anybody went on with it.
    """

    place: Place
    timeline: Timeline
    served: Served
    fields: RequestFields
    drop: Callable[[], None]
    seeking: Seeking | None = None
    run: Run | None = None
    exchange: Exchange | None = None
    connection: EngineConnection | None = None
    answer: "asyncio.Future[EngineResponse] | None" = None
    name: str = ""
