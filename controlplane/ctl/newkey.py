"""Makes the text of a new API key: its id, its secret, and the hash that is told instead of the secret.

It sends and prints nothing. The text leaves this process once, on stdout (keyacts.py).
"""

import base64
import hashlib
import secrets
from typing import Final

from schemas.key import KEY_PREFIX

ID_BYTES: Final = 8
ID_LENGTH: Final = 12
"""60 random bits: two of a million keys have the same with a probability of one in two million."""
SECRET_BYTES: Final = 32


class NewKey:
    """A key somebody is about to get. What prints it by accident, as a traceback may, shows its id alone."""

    __slots__ = ("_secret", "id")

    def __init__(self, id: str, secret: str) -> None:
        self.id = id
        self._secret = secret

    def __repr__(self) -> str:
        return f"NewKey({self.id})"

    __str__ = __repr__

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a key is neither copied nor written down")

    def hash(self) -> str:
        """The SHA-256 of the secret's ASCII bytes, in hex."""
        return hashlib.sha256(self._secret.encode("ascii")).hexdigest()

    def text(self) -> str:
        """What its holder sends: `yk_<id>_<secret>`."""
        return f"{KEY_PREFIX}_{self.id}_{self._secret}"


def make_key() -> NewKey:
    """A key that nobody else has, from the system's source of randomness."""
    id = base64.b32encode(secrets.token_bytes(ID_BYTES)).decode("ascii")[:ID_LENGTH].lower()
    secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).decode("ascii")
    return NewKey(id, secret.rstrip("="))
