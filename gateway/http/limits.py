"""The bounds of the data path as values: what a client or an engine may make us hold or wait for.

Every wait on the network has its bound here; 0 or None means there is none, said field by field.
"""

from msgspec import Struct

from schemas.settings import KIB, MIB


class ServerLimits(Struct, frozen=True, kw_only=True):
    """What one client connection may cost. Times in seconds, sizes in bytes.

    `head_timeout_s`: from the first byte of a request head to its last. `idle_timeout_s`: an open
    connection without a request. `body_idle_timeout_s`: silence in the middle of a body; `body_bytes_per_s`: behind
    the first so many seconds a whole body comes at least that fast on average, 0 = at any pace.
    `write_stall_timeout_s`: a client that takes nothing of its answer for that long is dropped.
    `discard_bytes`: so much of a body nobody wanted is still read to keep the connection usable.
    `connections`: open at once, above it idle ones end for new ones; 0 = as many as there are descriptors for.
    `linger_s`: how long an answer given before the end of the body stays readable for the client.
    """

    head_bytes: int = 32 * KIB
    head_count: int = 100
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    body_bytes: int = 64 * MIB
    body_memory_bytes: int = 256 * KIB
    body_idle_timeout_s: float = 60.0
    body_bytes_per_s: int = 512
    write_stall_timeout_s: float = 300.0
    discard_bytes: int = 256 * KIB
    linger_s: float = 2.0
    connections: int = 0
    spool_dir: str | None = None
    """Where large bodies are spooled; None = the system's temporary folder."""


class ClientLimits(Struct, frozen=True, kw_only=True):
    """What one engine may cost. Times in seconds, sizes in bytes.

    `first_byte_s`: from the request being written to the first byte of the answer's body; 0 = no bound, because a
    prefill may take ten minutes, and a head may be sent before it. `stall_s`: silence in an answer whose body
    has begun; 0 = no bound. `idle_s`: how long an unused connection is kept. `stale_s`: a reused connection
    that closes within this of our writing was closed before it saw the request. `connect_timeout_s` 0: the system's.
    """

    connect_timeout_s: float = 5.0
    first_byte_s: float = 0.0
    stall_s: float = 0.0
    head_bytes: int = 64 * KIB
    head_count: int = 200
    idle_s: float = 30.0
    idle_per_endpoint: int = 256
    stale_s: float = 1.0
