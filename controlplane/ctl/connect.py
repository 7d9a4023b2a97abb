"""Finds a yard and opens its doors for yardctl: the log and the wire as admin, the API with its token.

Addresses come from flags, else the environment, else DATA/yard.json, else the defaults. It reads secrets
from files of the data folder only and never prints one.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from controlplane.ctl.failures import CtlError, RejectedByYard, Unreachable, UsageMistake
from events.roles import inbox_prefix
from events.secrets import SecretMissing, api_token_path, nats_password_path, read_secret
from events.service import default_data
from events.subjects import PREFIX
from schemas.settings import NatsSettings

if TYPE_CHECKING:
    # Imported where a door is opened: no command needs both clients, and each costs a tenth of a second.
    import httpx

    from events.connection import Connection
    from events.jetstream import JetStreamLog, JetStreamWire

USER: Final = "admin"
HOST: Final = "127.0.0.1"
NATS_PORT: Final = 4222
API_PORT: Final = 8081
CONNECT_S: Final = 5.0
API_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a yard is. `monitoring_url` and `gateway_url` are known of a yard on this machine only."""

    data: Path
    nats_url: str
    api_url: str
    prefix: str = PREFIX
    monitoring_url: str | None = None
    gateway_url: str | None = None


def find_place(
    *,
    data: Path | None = None,
    nats: str | None = None,
    api: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Place:
    """The yard meant. A flag wins over YARD_DATA, YARD_NATS, YARD_API, these over DATA/yard.json."""
    env = os.environ if environment is None else environment
    named = data or (Path(env["YARD_DATA"]) if env.get("YARD_DATA") else default_data())
    folder = named.expanduser().absolute()
    ports = _ports(folder)

    def local(kind: str, scheme: str) -> str | None:
        port = ports.get(f"{kind}_port")
        return f"{scheme}://{HOST}:{port}" if isinstance(port, int) else None

    return Place(
        data=folder,
        nats_url=nats
        or env.get("YARD_NATS")
        or local("nats", "nats")
        or f"nats://{HOST}:{NATS_PORT}",
        api_url=(
            api or env.get("YARD_API") or local("api", "http") or f"http://{HOST}:{API_PORT}"
        ).rstrip("/"),
        prefix=env.get("YARD_YARD_PREFIX") or PREFIX,
        monitoring_url=local("monitoring", "http"),
        gateway_url=local("gateway", "http"),
    )


def _ports(folder: Path) -> dict[str, Any]:
    """What `yardctl up` wrote down; nothing when it did not run here."""
    try:
        document = json.loads((folder / "yard.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def secret(path: Path) -> str:
    """The secret in `path`. Raises Unreachable: without it there is no yard to talk to."""
    try:
        return read_secret(path)
    except SecretMissing as error:
        raise Unreachable(
            f"no yard in {path.parent.parent}: {path.name} is missing or cannot be read; start one "
            "with `yardctl up --data DIR`, or name its folder with --data or YARD_DATA"
        ) from error


@asynccontextmanager
async def open_connection(place: Place) -> "AsyncIterator[Connection]":
    """A connection to NATS as admin. Raises Unreachable when there is none within five seconds."""
    from events.connection import connect as connect_nats

    connection = await connect_nats(
        NatsSettings(url=place.nats_url),
        name="yardctl",
        user=USER,
        password=secret(nats_password_path(place.data, USER)),
        inbox_prefix=inbox_prefix(USER),
        prefix=place.prefix,
    )
    try:
        if not await connection.wait_connected(CONNECT_S):
            raise Unreachable(
                f"no NATS answers at {place.nats_url} (or it refuses the admin password); "
                "is the yard up, and are YARD_DATA and YARD_NATS right?"
            )
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def open_log(where: Path | Place) -> "AsyncIterator[JetStreamLog]":
    """The log of the yard at a data folder or place. Raises Unreachable."""
    from events.jetstream import JetStreamLog

    place = where if isinstance(where, Place) else find_place(data=where)
    async with open_connection(place) as connection:
        yield JetStreamLog(connection, source="/ctl")


@asynccontextmanager
async def open_wire(place: Place) -> "AsyncIterator[JetStreamWire]":
    """Request/reply with the yard's agents. Raises Unreachable."""
    from events.jetstream import JetStreamWire

    async with open_connection(place) as connection:
        yield JetStreamWire(connection)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A list of the API: the states, and what is there besides but written by a newer version (`name`, `event`)."""

    rows: list[dict[str, Any]]
    unread: list[dict[str, Any]] = field(default_factory=list)


class Api:
    """The read API. Every method raises Unreachable when nothing answers, CtlError when it refuses:
    RejectedByYard when what was asked is wrong itself."""

    def __init__(self, client: "httpx.AsyncClient", url: str) -> None:
        self._client = client
        self._url = url

    async def get(self, path: str, *, wait_s: float = API_TIMEOUT_S, **query: str) -> Any:
        """The decoded body of a 200 answer, which may take `wait_s`."""
        return _good(await self._send("GET", path, wait_s, params=query), path)

    async def post(self, path: str, body: Any, *, wait_s: float = API_TIMEOUT_S) -> Any:
        """The decoded body of a 200 answer to a question too large for a path."""
        return _good(await self._send("POST", path, wait_s, json=body), path)

    async def data(self, path: str) -> Any:
        """The states below a resource, without their position."""
        return (await self.get(path))["data"]

    async def listed(self, path: str) -> Listed:
        """All of a list, also what the control plane cannot read."""
        body = await self.get(path)
        return Listed(rows=body["data"], unread=body.get("unread", []))

    async def ask(self, path: str, **query: str) -> "httpx.Response":
        """The answer, whatever its status."""
        return await self._send("GET", path, API_TIMEOUT_S, params=query)

    async def _send(self, method: str, path: str, wait_s: float, **over: Any) -> "httpx.Response":
        import httpx

        try:
            return await self._client.request(method, path, timeout=wait_s, **over)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"the API at {self._url} does not answer ({type(error).__name__}); is the yard up?"
            ) from error


def _good(answer: "httpx.Response", path: str) -> dict[str, Any]:
    body = _body(answer)
    if answer.status_code == 200:
        return body
    error = body.get("error", {})
    sentence = str(error.get("sentence") or f"the API answered {answer.status_code} to {path}")
    if answer.status_code == 400:
        # What the control plane would reject as a command it rejects as a question, too.
        raise RejectedByYard(f"{sentence} [{error.get('code', 'bad_request')}]")
    raise CtlError(sentence)


def _body(answer: "httpx.Response") -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CtlError(f"what answers at {answer.url} is not a yard's API")
    return body


@asynccontextmanager
async def open_api(place: Place) -> AsyncIterator[Api]:
    """The API with the token of the data folder."""
    import httpx

    headers = {"Authorization": f"Bearer {secret(api_token_path(place.data))}"}
    # No proxy from the environment: the token must not leave for one on the way to this machine.
    try:
        client = httpx.AsyncClient(
            base_url=place.api_url, headers=headers, timeout=API_TIMEOUT_S, trust_env=False
        )
    except httpx.InvalidURL as error:
        raise UsageMistake(f"{place.api_url!r} is no address of an API: {error}") from error
    async with client:
        yield Api(client, place.api_url)
