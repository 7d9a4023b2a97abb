"""Progress in `yard.prog.>`: percentages and bytes, at most one a second each, kept in memory only."""

from msgspec import Struct


class FileProgress(Struct, frozen=True, kw_only=True):
    """Bytes of one file on their way: into a mirror (`key` is the file's), or to a node for a replica.

    `total_bytes` 0: not known yet. `rate_bytes_s` is over the last seconds. `what` says what is being done
    with them: `fetching`, `hashing` (bytes that were there already), `copying` (from another mirror), `verifying`.
    """

    key: str
    bytes: int
    total_bytes: int
    rate_bytes_s: float = 0.0
    what: str = "fetching"
    replica: str = ""
    model: str = ""
    """Of a node's fetch: what it is fetched for."""
