"""The hub as one object: its repositories, its two listeners, what goes wrong and what was counted.

    with Hub() as hub:
        hub.repo("owner/name").commit({"model-Q4_K_M.gguf": MadeUp(2**30)})
        … HF_ENDPOINT=hub.url …
        assert hub.counters.bytes_of("owner/name/model-Q4_K_M.gguf") <= 2**30

It runs on threads of its own, so a test may use it with or without an event loop.
"""

import hashlib
import hmac
import secrets
import threading
from types import TracebackType
from urllib.parse import quote

from tests.hub.answers import HubExchange
from tests.hub.cdn import CdnExchange
from tests.hub.counters import Counters
from tests.hub.faults import Fault, FaultBook
from tests.hub.repos import Gate, Reader, Repository, Shelf
from tests.hub.wire import Listener, Pace


class Hub:
    """Listens from its making on; `close` (or the end of its `with`) ends every thread and connection."""

    def __init__(self, *, port: int = 0, cdn_port: int = 0, bytes_per_s: float = 0.0) -> None:
        self.shelf = Shelf()
        self.faults = FaultBook()
        self.counters = Counters()
        self.pace = Pace(bytes_per_s)
        self._secret = secrets.token_bytes(16)
        self._generation = 0
        self._listeners: list[Listener] = []
        try:
            for number, handler in ((port, HubExchange), (cdn_port, CdnExchange)):
                self._listeners.append(
                    Listener(
                        number,
                        handler,
                        self,
                        counters=self.counters,
                        faults=self.faults,
                        pace=self.pace,
                    )
                )
        except OSError:
            for listener in self._listeners:
                listener.server_close()
            raise
        self._threads = [
            threading.Thread(target=listener.serve_forever, args=(0.05,), name="hub")
            for listener in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return self._listeners[0].url

    @property
    def cdn_url(self) -> str:
        return self._listeners[1].url

    def close(self) -> None:
        self.faults.clear()
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join()

    def repo(self, repo_id: str, *, gated: Gate | None = None, private: bool = False) -> Repository:
        """Adds an empty repository; commit() fills it."""
        return self.shelf.add(Repository(repo_id, gated=gated, private=private))

    def reader(self, token: str, *granted: str, pending: tuple[str, ...] = ()) -> str:
        """Makes a token known that may read the `granted` repositories. Returns it."""
        self.shelf.admit(token, Reader(granted=frozenset(granted), pending=frozenset(pending)))
        return token

    def fault(self, fault: Fault) -> Fault:
        """Sets a fault; see faults.py. Returns it."""
        self.faults.add(fault)
        return fault

    def cut(self) -> None:
        """Ends every connection that is open now."""
        for listener in self._listeners:
            listener.cut_all()

    def expire(self) -> None:
        """The addresses that were given out so far are refused from now on."""
        self._generation += 1

    def signature(self, repo_id: str, commit: str, path: str) -> str:
        said = f"{self._generation}\n{repo_id}\n{commit}\n{path}".encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()[:32]

    def cdn_address(self, repo_id: str, commit: str, path: str) -> str:
        signature = self.signature(repo_id, commit, path)
        return f"{self.cdn_url}/{quote(f'{repo_id}/{commit}/{path}')}?signature={signature}"
