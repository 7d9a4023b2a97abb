"""Opens the real log of a running yard as one of its users."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from events.connection import connect
from events.jetstream import JetStreamLog
from events.roles import inbox_prefix
from events.secrets import nats_password_path, read_secret
from schemas.settings import NatsSettings


@asynccontextmanager
async def open_admin_log(data: Path) -> AsyncIterator[JetStreamLog]:
    """The log of the yard in `data`, as the user admin."""
    port = json.loads((data / "yard.json").read_text(encoding="utf-8"))["nats_port"]
    connection = await connect(
        NatsSettings(url=f"nats://127.0.0.1:{port}"),
        name="test",
        user="admin",
        password=read_secret(nats_password_path(data, "admin")),
        inbox_prefix=inbox_prefix("admin"),
    )
    try:
        yield JetStreamLog(connection, source="/ctl/test")
    finally:
        await connection.close()
