"""API keys for tests of gateways: the text a holder sends, and the state the log has of it."""

import hashlib
from typing import Any

from gateway.domain.keytable import Caller
from schemas.key import Key
from tests.support.gateway_world import NOW

ID = "abcdefgh2345"
SECRET = "s" * 43


def a_key(id: str = ID, secret: str = SECRET, **fields: Any) -> Key:
    """What the log holds of the key whose secret this is."""
    defaults: dict[str, Any] = {
        "name": "ci",
        "hash": hashlib.sha256(secret.encode()).hexdigest(),
        "created_at": NOW,
    }
    return Key(id=id, **(defaults | fields))


def text_of(id: str = ID, secret: str = SECRET) -> str:
    """What its holder sends."""
    return f"yk_{id}_{secret}"


def a_caller(**fields: Any) -> Caller:
    """The holder of a key with these rights."""
    return Caller(key=a_key(**fields))
