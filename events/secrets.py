"""Makes, stores and derives the yard's secrets: passwords, tokens and engine keys, in files of mode 0600.

Nothing here is ever logged, put in an event or passed in argv. Derivations: node secret =
HKDF-SHA256(yard secret, info "node:<id>"); engine key = base64url(HMAC-SHA256(node secret, launch id)).
A node holds its own secret only; the yard secret lives with the control plane and the gateways.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import uuid
from pathlib import Path

from events.subjects import NotASubject, decode_token, encode_token

SECRET_BYTES = 32


class SecretMissing(Exception):
    """A secret file that must exist does not, or cannot be read."""


def _write_new(path: Path, text: str) -> None:
    """Creates `path` with mode 0600 whole or not at all; an existing file is left as it is."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text + "\n")
        # link() refuses to replace: of two processes that make one secret, one wins and both read it.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)


def read_secret(path: Path) -> str:
    """The secret in `path`. Raises SecretMissing with what to do."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretMissing(
            f"cannot read the secret file {path} ({error.__class__.__name__}); "
            "`yardctl init` makes it, or point --data at the yard's data folder"
        ) from error
    if not text:
        raise SecretMissing(f"the secret file {path} is empty; remove it and run `yardctl init`")
    return text


def ensure_secret(path: Path) -> str:
    """Reads the secret, making a random one (256 bits, URL-safe text) first when there is none."""
    if not path.exists():
        _write_new(path, secrets.token_urlsafe(SECRET_BYTES))
    return read_secret(path)


def secrets_folder(data: Path) -> Path:
    return data / "secrets"


def nats_password_path(data: Path, user: str) -> Path:
    return secrets_folder(data) / f"nats-{encode_token(user)}.password"


def api_token_path(data: Path) -> Path:
    return secrets_folder(data) / "api.token"


def yard_secret_path(data: Path) -> Path:
    return secrets_folder(data) / "yard.key"


def node_secret_path(data: Path, node: str) -> Path:
    return secrets_folder(data) / f"node-{encode_token(node)}.key"


def ensure_node_secret(data: Path, node: str) -> str:
    """Derives the node's secret from the yard's and stores it where the node's agent reads it."""
    path = node_secret_path(data, node)
    if not path.exists():
        _write_new(path, node_secret(ensure_secret(yard_secret_path(data)), node))
    return read_secret(path)


def node_secret(yard_secret: str, node: str) -> str:
    """HKDF-SHA256 (RFC 5869, empty salt, one block) of the yard secret for this node, base64url."""
    extracted = hmac.new(bytes(32), yard_secret.encode(), hashlib.sha256).digest()
    expanded = hmac.new(extracted, b"node:" + node.encode() + b"\x01", hashlib.sha256).digest()
    return base64.urlsafe_b64encode(expanded).decode().rstrip("=")


def yard_id(data: Path) -> str:
    """The id of the data folder's yard, which its streams name. Raises SecretMissing.

    yard.json's, which `up` writes; without it, it follows from the yard's secret, so that a folder
    that kept its log and its secrets alone (a restored backup) is still the same yard.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((data / "yard.json").read_text(encoding="utf-8"))["yard_id"]
        if known and isinstance(known, str):
            return known
    secret = read_secret(yard_secret_path(data))
    digest = hmac.new(secret.encode(), b"yard id", hashlib.sha256).digest()
    return str(uuid.UUID(bytes=digest[:16], version=5))


def engine_key(node_secret_text: str, launch: str) -> str:
    """The key an engine of this launch asks for; a 401 with it means "not this launch"."""
    digest = hmac.new(node_secret_text.encode(), launch.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def mirror_token(node_secret_text: str, name: str) -> str:
    """What `name` (a node) shows a mirror to read its files: `<name>.<mac>`, checked without a list of nodes."""
    digest = hmac.new(node_secret_text.encode(), b"mirror", hashlib.sha256).digest()
    return f"{encode_token(name)}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def mirror_reader(yard_secret: str, token: str) -> str | None:
    """Whose token it is, None when it is nobody's. Compared in constant time."""
    name, _, _ = token.partition(".")
    try:
        reader = decode_token(name)
    except NotASubject:
        return None
    expected = mirror_token(node_secret(yard_secret, reader), reader)
    return reader if hmac.compare_digest(expected.encode(), token.encode()) else None
