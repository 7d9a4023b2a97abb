"""Finds an adapter in a repository of the registry, at one commit. Only its top folder is looked at."""

import hashlib

from controlplane.adapterplaces.found import Found, Unreadable
from controlplane.domain.adapterconfig import CONFIG_BYTES
from controlplane.domain.adaptersources import RepoSource, choose
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from controlplane.registry.client import Registry
from schemas.codes import NOT_AN_ADAPTER, REGISTRY_ANSWER


async def find(registry: Registry, source: RepoSource) -> Found:
    """The adapter of `source`, its commit pinned. Raises RegistryFault, Unreadable."""
    repo = await registry.repo(source.repo, source.revision)
    files = {file.path: file for file in repo.files}
    refusal = choose(repo.id, files)
    if refusal is not None:
        raise Unreadable(refusal.code, refusal.sentence)
    weights, config = files[ADAPTER_WEIGHTS], files[ADAPTER_CONFIG]
    if not 0 < config.bytes <= CONFIG_BYTES:
        raise Unreadable(
            NOT_AN_ADAPTER,
            f"{repo.id}/{ADAPTER_CONFIG} has {config.bytes} bytes; 1 to {CONFIG_BYTES} are read",
        )
    if weights.bytes == 0:
        raise Unreadable(NOT_AN_ADAPTER, f"{repo.id}/{ADAPTER_WEIGHTS} is empty")
    raw = await registry.head(repo.id, repo.commit, ADAPTER_CONFIG, 0, config.bytes)
    actual = hashlib.sha256(raw).hexdigest()
    if len(raw) != config.bytes or (config.sha256 is not None and config.sha256 != actual):
        raise Unreadable(
            REGISTRY_ANSWER,
            f"{repo.id}/{ADAPTER_CONFIG} is not what the registry published: {len(raw)} of "
            f"{config.bytes} bytes came",
        )
    return Found(
        repo=repo.id,
        commit=repo.commit,
        config=raw,
        weights_bytes=weights.bytes,
        weights_sha256=weights.sha256 or "",
    )
