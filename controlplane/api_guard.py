"""Lets a request through to the API or answers it: host, origin, token, body type, in that order.

It wraps the whole application, so no route, not even one that does not exist, is reached around it. It
never logs a token.
"""

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from controlplane.metrics import Metrics
from schemas.api import ErrorBody, ErrorDetail

OPEN_ON_LOOPBACK: Final = frozenset({"/healthz", "/readyz", "/metrics"})
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")

SHORT_BODY_BYTES: Final = 64 * 1024
SHORT_BODY_S: Final = 1.0
"""So much of a refused request is read, and waited for so long, that its client gets the answer."""

ASGI = Callable[..., Any]


class Known:
    """The names under which this API may be called, with or without a port."""

    def __init__(self, listen_host: str, allowed: Iterable[str]) -> None:
        self._names: set[str] = set()
        for name in (*LOOPBACK_NAMES, *allowed):
            self._names.add(name.lower())
        if listen_host not in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            self._names.add(listen_host.lower())

    def knows(self, authority: str) -> bool:
        """Whether `host[:port]` is ours; a name told without a port is known under every port."""
        authority = authority.lower()
        if "@" in authority or "/" in authority:
            return False  # no Host header of an honest client holds these
        try:
            host = urlsplit(f"//{authority}").hostname or ""
        except ValueError:
            return False
        return authority in self._names or host in self._names

    def knows_origin(self, origin: str) -> bool:
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and self.knows(authority)


class Guard:
    """An ASGI application around another. `token` is what a bearer must show."""

    def __init__(self, app: ASGI, *, token: str, known: Known, metrics: Metrics) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()
        self._known = known
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            # Nothing of this API is a websocket; the connection is refused before it is one.
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.api_requests.labels(str(message["status"])).inc()
            await send(message)

        refusal = self._judge(scope)
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            await _answer(counted, *refusal, is_read=await _read(scope, receive))

    def _judge(self, scope: Any) -> tuple[int, str, str] | None:
        """None to let it through, else status, code and sentence.

        1 Host  2 Origin  3 token (three paths need none from loopback)  4 body type
        """
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"authorization") and name in headers:
                return 400, "bad_request", f"the header {name.decode()} is given twice"
            headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._known.knows(host):  # 1
            return (
                403,
                "host_not_allowed",
                f"this API is not known as {host!r}; allow it with controlplane.allowed_hosts",
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._known.knows_origin(origin.decode("latin-1")):  # 2
            return 403, "origin_not_allowed", "pages of that origin may not use this API"
        open_path = scope["path"] in OPEN_ON_LOOPBACK and _from_loopback(scope)
        given = headers.get(b"authorization", b"")
        if not open_path and not hmac.compare_digest(given, self._expected):  # 3
            return (
                401,
                "unauthorized",
                "this API wants `Authorization: Bearer <token>`; the token is in secrets/api.token "
                "of the yard's data folder",
            )
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if has_body and kind != b"application/json":  # 4
            return 415, "unsupported_media_type", "bodies must be application/json"
        return None


def _from_loopback(scope: Any) -> bool:
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _read(scope: Any, receive: Any) -> bool:
    """Reads a short body and throws it away. False: some of it is left, and the connection must end.

    A connection that is closed with bytes unread is reset, and the answer may be lost to its client. A client that
    asks before it sends (Expect) has sent nothing.
    """
    if any(name == b"expect" for name, _ in scope["headers"]):
        return False
    left = SHORT_BODY_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHORT_BODY_S):
            while left >= 0:
                message = await receive()
                if message["type"] != "http.request":
                    return False
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    return False


async def _answer(send: Any, status: int, code: str, sentence: str, *, is_read: bool) -> None:
    body = msgspec.json.encode(ErrorBody(error=ErrorDetail(code=code, sentence=sentence)))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if not is_read:
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
