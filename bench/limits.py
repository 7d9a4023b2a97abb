"""Prints what a key costs a request: who it is, what it may, what its limits leave, and the headers that tell of it.

CPU time of this thread, the best of many short runs, so that a busy machine changes little. Run from the repository's
root: `python bench/limits.py`.
"""

import hashlib
import sys
import time
import timeit
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gateway.callers import Callers
from gateway.clock import LoopClock
from gateway.domain.http_rules import Headers
from gateway.domain.keytable import Caller
from gateway.domain.request_fields import RequestFields
from gateway.domain.table import ModelEntry, Table
from gateway.gateway import Gateway
from gateway.limits import Grant, Limits
from schemas.key import Key
from schemas.model import Model
from schemas.settings import GatewaySettings

RUNS, REQUESTS = 2000, 50
ID, SECRET = "abcdefgh2345", "s" * 43
SENT = (
    (b"host", b"127.0.0.1:8080"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"user-agent", b"OpenAI/Python 2.0.0"),
    (b"x-stainless-lang", b"python"),
    (b"x-stainless-os", b"Linux"),
    (b"content-length", b"400"),
    (b"authorization", f"Bearer yk_{ID}_{SECRET}".encode()),
)
"""About what an OpenAI client sends; the key comes last, where it is found latest."""


def main() -> None:
    """Prints one line for each part, and for all of it with one gateway and with three."""
    now = datetime.now(UTC)
    table = Table()
    model = Model(name="m", incarnation="1", context_length=8192)
    table.put_model(ModelEntry(model=model, created=now, seq=1))
    table.keys.put(
        Key(
            id=ID,
            name="bench",
            hash=hashlib.sha256(SECRET.encode()).hexdigest(),
            created_at=now,
            models=("m*", "other"),
            rpm=10**8,
            tpm=10**9,
            parallel=10**6,
        )
    )
    gateway = Gateway("bench", GatewaySettings(), LoopClock())
    gateway.install(table, synced=True)
    callers = Callers(gateway, "auto", beyond_loopback=False)
    limits = Limits(gateway, "1")
    fields = RequestFields(model="m", max_tokens=100)

    headers = Headers(list(SENT))

    def who() -> Caller:
        caller = callers.identify("inference", headers, "127.0.0.1")
        assert isinstance(caller, Caller), caller
        return caller

    known = who()

    def let_in() -> None:
        grant = limits.enter(known, fields, 400)
        assert isinstance(grant, Grant), grant
        grant.end(50)

    def told() -> None:
        limits.headers(known)

    def everything() -> None:
        caller = who()
        grant = limits.enter(caller, fields, 400)
        limits.headers(caller)
        assert isinstance(grant, Grant), grant
        grant.end(50)

    show("who it is", who)
    show("rights and limits, begun and ended", let_in)
    show("headers", told)
    show("all of it, one gateway", everything)
    limits.ledger.gateways = 3
    show("all of it, three gateways", everything)


def show(what: str, done: Callable[[], object]) -> None:
    """One line: the best run's CPU time for one request."""
    best = min(timeit.repeat(done, number=REQUESTS, repeat=RUNS, timer=time.thread_time))
    print(f"{what:36} {best / REQUESTS * 1e6:6.2f} us")


if __name__ == "__main__":
    main()
