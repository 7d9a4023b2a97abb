"""Derives the key each engine asks for from the yard's secret; keys are made here and never stored or logged."""

from functools import lru_cache

from events.secrets import engine_key, node_secret
from gateway.endpoints import EngineKey
from schemas.replica import Replica


def engine_keys(yard_secret: str) -> EngineKey:
    """A function from a replica to its engine's key; None for an engine that was given none."""

    @lru_cache(maxsize=1024)
    def secret_of(node: str) -> str:
        return node_secret(yard_secret, node)

    @lru_cache(maxsize=16384)
    def key_of(node: str, launch: str) -> str:
        return engine_key(secret_of(node), launch)

    def key(replica: Replica) -> str | None:
        return key_of(replica.node, replica.id) if replica.has_key else None

    return key
