"""`yardctl doctor`: asks every part of a yard whether it is well and says what to do where it is not.

Gathering is here, judging is in judge.py. It changes nothing and goes on when a part does not answer.
"""

import asyncio
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from controlplane.ctl.connect import Place, open_api, open_connection
from controlplane.ctl.failures import CtlError
from controlplane.ctl.judge import Facts, NatsFacts, Stream
from events.jetstream import JetStreamLog
from events.log import LogError

TIMEOUT_S: Final = 5.0


async def gather(place: Place) -> Facts:
    """Everything that can be learnt, each part at most a few seconds."""
    nats, nats_error = await _nats(place)
    doctor, api_error = await _doctor(place)
    monitoring, skew_s = await _monitoring(place)
    gateway, gateway_error = await _gateway(place)
    return Facts(
        nats_version=nats,
        nats_error=nats_error,
        doctor=doctor,
        api_error=api_error,
        monitoring=monitoring,
        skew_s=skew_s,
        gateway_ready=gateway,
        gateway_error=gateway_error,
        loose_secrets=_loose_secrets(place.data),
    )


async def _nats(place: Place) -> tuple[str | None, str | None]:
    """The server's version, logged in as admin and with a log that answers; else why not."""
    try:
        async with open_connection(place) as connection:
            log = JetStreamLog(connection, source="/ctl")
            async with asyncio.timeout(TIMEOUT_S):
                await log.identity()
            return connection.server_version, None
    except CtlError as error:
        return None, str(error)
    except (LogError, TimeoutError) as error:
        return None, f"the log does not answer: {str(error) or 'no answer in time'}"


async def _doctor(place: Place) -> tuple[dict[str, Any] | None, str | None]:
    try:
        async with open_api(place) as api:
            return await api.get("/v1/doctor"), None
    except CtlError as error:
        return None, str(error)


async def _monitoring(place: Place) -> tuple[NatsFacts | None, float | None]:
    """What the server's monitoring port tells, and how far its clock is from ours, seconds."""
    if place.monitoring_url is None:
        return None, None
    try:
        async with httpx.AsyncClient(
            base_url=place.monitoring_url, timeout=TIMEOUT_S, trust_env=False
        ) as client:
            before = datetime.now(UTC)
            varz = (await client.get("/varz")).json()
            after = datetime.now(UTC)
            jsz = (await client.get("/jsz", params={"streams": "true", "config": "true"})).json()
    except (httpx.HTTPError, ValueError):
        return None, None
    try:
        told = datetime.fromisoformat(str(varz.get("now")))
        skew_s = (told - (before + (after - before) / 2)).total_seconds()
    except (ValueError, TypeError):
        skew_s = None
    return read_monitoring(varz, jsz, free_of), skew_s


def free_of(folder: str) -> int | None:
    """Free bytes of the volume below `folder`; None when it is not on this machine."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def read_monitoring(varz: Any, jsz: Any, free: Any = free_of) -> NatsFacts:
    """The few fields of /varz and /jsz that matter, whatever else is in them."""
    jetstream = varz.get("jetstream") or {}
    config = jetstream.get("config") or {}
    stats = jetstream.get("stats") or {}
    store = str(config.get("store_dir") or "")
    streams = tuple(
        Stream(
            name=str(stream.get("name")),
            replicas=int((stream.get("config") or {}).get("num_replicas") or 1),
            used_bytes=int((stream.get("state") or {}).get("bytes") or 0),
            limit_bytes=int((stream.get("config") or {}).get("max_bytes") or -1),
        )
        for account in jsz.get("account_details") or []
        for stream in account.get("stream_detail") or []
    )
    return NatsFacts(
        version=str(varz.get("version") or ""),
        jetstream=bool(config),
        sync_always=bool(config.get("sync_always")),
        store_dir=store,
        max_store_bytes=int(config.get("max_storage") or 0),
        used_store_bytes=int(stats.get("storage") or 0),
        free_bytes=free(store) if store else None,
        streams=streams,
    )


async def _gateway(place: Place) -> tuple[bool | None, str | None]:
    if place.gateway_url is None:
        return None, None
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = await client.get(f"{place.gateway_url}/readyz")
    except httpx.HTTPError as error:
        return False, f"{place.gateway_url} does not answer ({type(error).__name__})"
    return answer.status_code == 200, _why_not_ready(answer)


def _why_not_ready(answer: httpx.Response) -> str | None:
    """What stopped its table, when it says so."""
    try:
        stopped = answer.json().get("stopped")
    except (ValueError, AttributeError):
        return None
    if not isinstance(stopped, str):
        return None
    return (
        f"its table does not follow the log any more, {stopped}; it serves what it knew: a fault of the program, "
        "see the gateway's log"
    )


def _loose_secrets(data: Path) -> tuple[str, ...]:
    """Secret files that others on this machine may read."""
    folder = data / "secrets"
    found: list[str] = []
    for path in (folder, *sorted(folder.glob("*"))):
        try:
            if path.stat().st_mode & 0o077:
                found.append(str(path))
        except OSError:
            continue
    return tuple(found)
