"""Serve jobs beyond the one node and the one open file: two nodes, shards, embeddings, a gate with a token."""

import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import gguf
import pytest

from controlplane.ctl.init import make_files
from controlplane.ctl.supervisor import ServiceSpec, python_argv
from tests.hub import ggufs
from tests.hub.contents import OnDisk
from tests.hub.server import Hub
from tests.support.aio import run
from tests.system.hubs import FILE, MIB, REPO, TINY, begin, hub_of, over, sha256_of, tiny
from tests.system.yard import SystemYard, chat, client, system_yard

TOKEN = "hf_" + "secretsecret" * 3


@asynccontextmanager
async def second_node(yard: SystemYard, folder: Path, name: str) -> AsyncIterator[None]:
    """An agent of another machine, as far as it can tell: only the secrets of its node, nothing linked."""
    secrets = folder / "secrets"
    secrets.mkdir(parents=True)
    for file in (yard.data / "secrets").glob(f"*{name}*"):
        shutil.copy(file, secrets)
    running = yard.running
    await running.supervisor.start(
        ServiceSpec(
            name=f"nodeagent-{name}",
            argv=python_argv(
                "nodeagent",
                *("--config", str(yard.data / "yard.yaml"), "--data", str(folder)),
                *("--nats", running.yard.nats_url, "--id", name),
            ),
            environment={},
            log=yard.data / "logs" / f"nodeagent-{name}.log",
        )
    )
    try:
        await yard.event("nodestate.joined", lambda e: e.key == (name,), timeout_s=30)
        yield
    finally:
        await running.supervisor.stop(f"nodeagent-{name}", stop_signal=signal.SIGINT)


@pytest.mark.timeout(120)
def test_req_c57_replicas_of_one_job_run_on_two_nodes_and_each_fetches_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has room for one of two replicas. The first that is ready ends the wait of the job."""

    async def story(hub: Hub) -> None:
        content = tiny(tmp_path / "models", size=16 * MIB)
        hub.repo(REPO).commit({FILE: content})
        settings = {"nodeagent": {"cpu_memory_bytes": 1100 * MIB}}
        make_files(tmp_path / "yard", ["far"])
        async with (
            system_yard(tmp_path / "yard", settings=settings) as yard,
            second_node(yard, tmp_path / "far", "far"),
        ):
            asked = (REPO, "--file", FILE, "--name", "m", "--replicas", "2", *TINY)
            done = await over(yard, await begin(yard, *asked))
            assert done.state == "done", done
            for node in ("local", "far"):
                await yard.event(
                    "replica.ready", lambda e, node=node: e.key[0] == node, timeout_s=40
                )
            first = next(e for e in await yard.in_log("replica.ready"))
            assert done.replica == first.key[1]
            assert done.steps[5].detail.startswith(
                f"{first.key[1]} ready on {first.key[0]} at http://"
            )
            (fetched,) = (tmp_path / "far/files/blobs").iterdir()
            assert sha256_of(fetched) == content.sha256
            assert len(await yard.in_log("file.present")) == 1
            assert hub.counters.bytes_of(f"{REPO}/{FILE}") <= content.size + 8 * MIB

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_scn_c2_a_set_of_shards_in_a_folder_is_served_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three shards in a folder that names the quantisation, with one projector beside them that is no model."""

    async def story(hub: Hub) -> None:
        whole = ggufs.write(tmp_path / "tiny.gguf", "llama")
        (tmp_path / "shards").mkdir()
        shards = ggufs.shards(whole, tmp_path / "shards", 3)
        files = {f"Q4_K_M/{path.name}": OnDisk(path) for path in shards}
        hub.repo(REPO).commit({**files, "mmproj-F16.gguf": OnDisk(whole)})
        async with system_yard(tmp_path / "yard") as yard:
            told = await yard.ctl("model", "serve", REPO, "--name", "m", *TINY)
            assert "3 files" in told
            assert "checksums match the registry" in told
            assert len(await yard.in_log("file.present")) == 3
            assert "mmproj" not in "".join(e.state.path for e in await yard.in_log("file.present"))
            names = {p.name for p in (tmp_path / "yard/files/sets").glob("*/*.gguf")}
            assert names == {path.name for path in shards}
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("m", max_tokens=2))
                assert answer.status_code == 200, answer.text

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_an_embedding_model_is_served_without_being_asked_to_say_hello(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        path = ggufs.write(tmp_path / "bert.gguf", "bert", quant=gguf.GGMLQuantizationType.F32)
        hub.repo(REPO).commit({"bert-F32.gguf": OnDisk(path)})
        async with system_yard(tmp_path / "yard") as yard:
            told = await yard.ctl(
                "model", "serve", REPO, "--quant", "F32", "--name", "m", "--ctx-pool", "512"
            )
            assert "smoke test  skipped" in told
            async with client(yard.gateway()) as http:
                body = {"model": "m", "input": "hello"}
                answer = await http.post("/v1/embeddings", json=body)
                assert answer.status_code == 200, answer.text
                assert len(answer.json()["data"][0]["embedding"]) > 8

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


def environments(yard: SystemYard) -> dict[str, str]:
    """Command line and environment of every process of the yard but the control plane, engines too."""
    keeper = yard.running.supervisor.pids["controlplane"]
    found: dict[str, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (keeper, os.getpid()):
            continue
        try:
            command = (entry / "cmdline").read_text().replace("\0", " ")
            environment = (entry / "environ").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if str(yard.data) in command or f"{yard.data}/" in environment:
            found[f"{entry.name} {command}"] = environment
    return found


@pytest.mark.timeout(120)
def test_scn_c8_a_gated_repository_is_served_with_a_token_that_nobody_else_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is in the control plane's environment, and nowhere else: no log, no event, no other process."""

    async def story(hub: Hub) -> None:
        hub.repo(REPO, gated="manual").commit({FILE: tiny(tmp_path / "models")})
        hub.reader(TOKEN, REPO)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        async with system_yard(tmp_path / "yard") as yard:
            monkeypatch.delenv("HF_TOKEN")
            done = await over(yard, await begin(yard, REPO, "--file", FILE, "--name", "m", *TINY))
            assert done.state == "done", done
            told = environments(yard)
            assert any("nodeagent" in line for line in told)
            assert any("YARD_LAUNCH_ID" in environment for environment in told.values())
            leaks = [line for line, env in told.items() if TOKEN in line or TOKEN in env]
            assert leaks == []
            secret = TOKEN.encode()
            for file in (tmp_path / "yard").rglob("*"):
                if file.is_file() and file.stat().st_size < 64 * MIB:
                    assert secret not in file.read_bytes(), file
            requests = hub.counters.counts().requests
            assert all(r.authorized for r in requests if r.at in ("api", "resolve"))
            assert not any(r.authorized for r in requests if r.at == "cdn")

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)
