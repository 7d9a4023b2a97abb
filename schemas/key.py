"""An API key: what its holder may ask a gateway for and how much, as the catalog of keys holds it, and its events.

The key itself is `yk_<id>_<secret>`. It is made where it is asked for, shown there once, and never sent: the log has
only the SHA-256 of the secret, which is 256 random bits, so that nothing is gained by trying.
"""

from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

KEY_PREFIX: Final = "yk"

Priority = Literal["high", "normal", "low"]
"""In which order requests that wait for their turn at a model go on; a request may lower its own."""


class Key(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.key.<id>`.

    `hash` is the SHA-256 of the secret's ASCII bytes in lower-case hex. `models` are names or patterns with `*` of
    models, aliases and adapters (`base:*`: every adapter of that base); empty: all. `may_activate`: whether its
    requests may start a model that is not running. `rpm` and `tpm` are requests and tokens in any 60 seconds,
    `parallel` requests running or waiting at once; 0 = no limit. `name` is of one key that is not over at a time.
    """

    id: str
    name: str
    hash: str
    created_at: datetime
    by: str = ""
    models: tuple[str, ...] = ()
    may_activate: bool = False
    rpm: int = 0
    tpm: int = 0
    parallel: int = 0
    priority: Priority = "normal"
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class KeyCreated(Struct, frozen=True, kw_only=True, tag_field="type", tag="key.created"):
    by: str


class KeyChanged(Struct, frozen=True, kw_only=True, tag_field="type", tag="key.changed"):
    by: str
    fields: tuple[str, ...]


class KeyRevoked(Struct, frozen=True, kw_only=True, tag_field="type", tag="key.revoked"):
    by: str


class KeyDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="key.deleted"):
    """A tombstone."""


KeyEvent = KeyCreated | KeyChanged | KeyRevoked | KeyDeleted
