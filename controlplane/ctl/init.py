"""`yardctl init`: makes a data folder's secrets and the NATS server's files, for a yard of several processes.

It starts nothing and keeps what is there: a secret once made stays, a node once named stays allowed.
"""

from collections.abc import Iterable
from pathlib import Path

from controlplane.ctl.failures import CtlError, UsageMistake
from events.secrets import (
    api_token_path,
    ensure_node_secret,
    ensure_secret,
    secrets_folder,
    yard_secret_path,
)
from events.server import prepare
from events.subjects import NotASubject, decode_token

_BEFORE, _AFTER = "node-", ".key"


def known_nodes(data: Path) -> list[str]:
    """The nodes whose secrets lie in the folder, sorted."""
    found: list[str] = []
    for path in secrets_folder(data).glob(f"{_BEFORE}*{_AFTER}"):
        token = path.name.removeprefix(_BEFORE).removesuffix(_AFTER)
        try:
            found.append(decode_token(token))
        except (NotASubject, ValueError):
            continue  # not a name we would have written; somebody's own file
    return sorted(found)


def make_files(data: Path, nodes: Iterable[str]) -> Path:
    """Makes the secrets that are missing and the server's files; returns nats.conf. May raise OSError."""
    ensure_secret(yard_secret_path(data))
    ensure_secret(api_token_path(data))
    wanted = sorted({*known_nodes(data), *nodes})
    for node in wanted:
        ensure_node_secret(data, node)
    return prepare(data, wanted)


def make_yard(data: Path, nodes: Iterable[str]) -> list[str]:
    """Makes what is missing; returns what a person should know. Raises CtlError, UsageMistake."""
    wanted = sorted({*known_nodes(data), *nodes})
    if not wanted:
        raise UsageMistake("name at least one node: yardctl init --node NAME")
    try:
        configuration = make_files(data, wanted)
    except NotASubject as error:
        raise UsageMistake(f"no name of a node: {error}") from error
    except OSError as error:
        raise CtlError(f"cannot write below {data}: {error.strerror}") from error
    return [
        f"secrets        {secrets_folder(data)}",
        f"nodes          {', '.join(wanted)}",
        f"nats-server -c {configuration} -a 127.0.0.1 -p 4222 -m 8222 -sd {data / 'nats'}",
    ]
