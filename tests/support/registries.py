"""What tests of the registry's reader share: a repository, a reader of a hub, and how a question fails."""

from typing import Any

import pytest

from controlplane.registry.client import Registry
from controlplane.registry.faults import RegistryFault
from tests.hub.contents import Held, MadeUp
from tests.hub.repos import Entry
from tests.hub.server import Hub

SECRET = "hf_SecretSecretSecret"
PATH = "model-Q4_K_M.gguf"
BIG = MadeUp(3 * 1024**2 + 17, seed=7)
README = Entry(content=Held(b"# a model\n"), lfs=False)


def fill(hub: Hub, repo_id: str, **options: Any) -> str:
    return hub.repo(repo_id, **options).commit({PATH: BIG, "README.md": README})


def registry(hub: Hub, token: str | None = None, *, retry_for_s: float = 0.0) -> Registry:
    return Registry(endpoint=hub.url, token=token, timeout_s=2.0, retry_for_s=retry_for_s)


async def fault_of_repo(
    hub: Hub, repo_id: str, revision: str | None = None, *, token: str | None = None
) -> RegistryFault:
    async with registry(hub, token) as asked:
        with pytest.raises(RegistryFault) as raised:
            await asked.repo(repo_id, revision)
    return raised.value


async def fault_of_head(hub: Hub, repo_id: str, commit: str, path: str = PATH) -> RegistryFault:
    async with registry(hub) as asked:
        with pytest.raises(RegistryFault) as raised:
            await asked.head(repo_id, commit, path, 5, 8)
    return raised.value


def host(hub: Hub) -> str:
    return hub.url.removeprefix("http://")
