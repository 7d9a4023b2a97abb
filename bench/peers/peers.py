"""What the gateway is compared with: which version of each, its own virtual environment, and how it is started.

Run as a program it makes those environments under .cache/peers, from PyPI, those that are missing only. Each is
started with what costs it least and still chooses among the engines; none of them checks a key, counts or logs requests
as the gateway does in the same run.

    make bench-peers        (python bench/peers/peers.py)
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).resolve().parent.parent.parent / ".cache" / "peers"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """`requirement` is what pip installs; `command(port, another port for its
    metrics, engine ports, folder)` the argv behind the program."""

    name: str
    requirement: str
    program: str
    command: Callable[[int, int, Sequence[int], Path], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    clients: int | None = None
    """Fewer streams at once than the others get, for one that would only be saturated."""

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def is_there(self) -> bool:
        return (self.environment / "bin" / self.program).exists()

    def argv(self, port: int, spare: int, engines: Sequence[int], folder: Path) -> list[str]:
        """How it is started in front of `engines`; `spare` is another free port, `folder` its own for the run."""
        return [
            str(self.environment / "bin" / self.program),
            *self.command(port, spare, engines, folder),
        ]


def _urls(engines: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{engine}" for engine in engines]


def _vllm_router(port: int, spare: int, engines: Sequence[int], folder: Path) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *_urls(engines)),
        *("--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(spare)),
    ]


def _sglang_router(port: int, spare: int, engines: Sequence[int], folder: Path) -> list[str]:
    return ["launch", *_vllm_router(port, spare, engines, folder)]


def _litellm(port: int, spare: int, engines: Sequence[int], folder: Path) -> list[str]:
    config = folder / "litellm.yaml"
    models = "".join(
        f"  - model_name: tiny\n    litellm_params:\n      model: openai/tiny\n"
        f"      api_base: {url}/v1\n      api_key: none\n"
        for url in _urls(engines)
    )
    config.write_text(f"model_list:\n{models}litellm_settings:\n  telemetry: false\n")
    return [
        *("--config", str(config), "--host", "127.0.0.1", "--port", str(port)),
        *("--num_workers", "1", "--telemetry", "False"),
    ]


PEERS: Final = (
    Peer(
        name="vllm-router",
        requirement="vllm-router==0.1.17",
        program="vllm-router",
        command=_vllm_router,
    ),
    Peer(
        name="sglang-router",
        requirement="sglang-router==0.3.2",
        program="sglang-router",
        command=_sglang_router,
    ),
    Peer(
        name="litellm",
        requirement="litellm[proxy]==1.79.3",
        program="litellm",
        command=_litellm,
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        clients=30,
    ),
)


def make(peer: Peer) -> None:
    """Makes the environment of one; one that is half there is made anew. Raises CalledProcessError."""
    if peer.is_there:
        print(f"bench-peers: {peer.requirement} is there", flush=True)
        return
    print(f"bench-peers: installing {peer.requirement}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", peer.environment], check=True)
    pip = (peer.environment / "bin" / "python", "-m", "pip", "install", "-q")
    subprocess.run([*pip, "--disable-pip-version-check", peer.requirement], check=True)


if __name__ == "__main__":
    for each in PEERS:
        make(each)
