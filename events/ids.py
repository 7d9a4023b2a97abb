"""Mints ids and reads the clock for the shells: the only place of this package that does either."""

import os
from datetime import UTC, datetime

from events.envelope import uuid7


def utc_now() -> datetime:
    """The wall clock, aware."""
    return datetime.now(UTC)


def new_id() -> str:
    """A fresh UUIDv7."""
    return uuid7(utc_now(), os.urandom(10))
