"""Measures a mirror beside `curl` and `sha256sum`: download, check, serve, and the memory that takes.

One file server (nginx) has the file. Each round takes turns: `curl` to a file, then `sha256sum` of it; our
fetch, which writes and hashes in one pass; the same file out of our mirror into `curl`, and out of nginx.
Only the ratios carry over to another machine; the target is 0.8 for fetch and serve together.

    python bench/mirror.py [--rounds 5] [--mib 1024] [--folder DIR]

It needs nginx (`apt-get install nginx-light`), curl and sha256sum.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.rig import free_port, nginx_binary, wait_open

TARGET = 0.8
MEMORY_TARGET_MIB = 100
MIB = 1024 * 1024
YARD_SECRET = "benchmark"
REPO, COMMIT, NAME = "bench/mark", "0" * 40, "model.gguf"
KEY = hashlib.sha256(f"{REPO}@{COMMIT}/{NAME}".encode()).hexdigest()

NGINX_CONF = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  sendfile on; tcp_nopush on;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


class Peak:
    """The most memory this process had above what it had at the beginning, asked every 10 ms."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self.first = self._me.memory_info().rss
        self.most = self.first

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, self._me.memory_info().rss)
            await asyncio.sleep(0.01)

    def row(self) -> dict[str, float]:
        return {
            "grown_mib": (self.most - self.first) / MIB,
            "peak_mib": self.most / MIB,
        }


# -- the parts that run as processes of their own ----------------------------------------------


async def fetch(folder: Path, url: str, size: int, sha256: str) -> None:
    """Prints one JSON line: seconds until the file was there and checked, until it was on the disk."""
    from controlplane.domain.reports import FileStored
    from controlplane.domain.work import Fetch
    from controlplane.mirror.domain.sources import sources_of
    from controlplane.mirror.fetching import Fetcher
    from controlplane.mirror.store import Store
    from schemas.settings import ControlplaneSettings

    store = Store(folder, keep_free_bytes=0)
    store.open()
    task = Fetch(key=KEY, repo=REPO, commit=COMMIT, path=NAME, bytes=size, sha256=sha256)
    sources = sources_of(task, mirrors={}, mirror_token="", endpoint=url, registry_token=None)
    fetcher = Fetcher(store, mirror="bench", settings=ControlplaneSettings())
    peak = Peak()
    watch = asyncio.create_task(peak.watch())
    begun = time.perf_counter()
    result = await fetcher.fetch(task, sources=sources)
    took = time.perf_counter() - begun
    if not isinstance(result, FileStored):
        raise SystemExit(result.sentence)
    await fetcher.settled()
    settled = time.perf_counter() - begun
    watch.cancel()
    print(json.dumps({"took_s": took, "settled_s": settled, **peak.row()}), flush=True)


async def serve(folder: Path, port: int) -> None:
    """The mirror, as a control plane serves it. Prints its memory when it is told to end."""
    import uvicorn

    from controlplane.mirror.serving import MirrorApp
    from controlplane.mirror.store import Store

    async def nothing(scope: object, receive: object, send: object) -> None:
        raise AssertionError("only the mirror is asked here")

    store = Store(folder, keep_free_bytes=0)
    store.open()
    app = MirrorApp(nothing, store=store, yard_secret=YARD_SECRET, manifest_of=lambda _: None)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, lifespan="off", log_config=None, access_log=False)
    )
    peak = Peak()
    watch = asyncio.create_task(peak.watch())
    # uvicorn raises the signal that ended it once more: it must not end what comes after.
    signal.signal(signal.SIGTERM, lambda *_: None)
    await server.serve()
    watch.cancel()
    print(json.dumps(peak.row()), flush=True)


# -- the rounds ---------------------------------------------------------------------------------


@contextmanager
def running(port: int, argv: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """The process while it runs; its whole group is gone afterwards."""
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
    try:
        wait_open(port, process)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def own(role: str, *arguments: object) -> list[str]:
    return [sys.executable, __file__, f"--role={role}", *map(str, arguments)]


def timed(argv: list[str]) -> float:
    """Seconds a program takes, its start included; what it prints is thrown away."""
    begun = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def write_file(path: Path, mib: int) -> str:
    """A file of `mib` MiB that begins as a model does; returns its sha256."""
    noise = random.Random(7).randbytes(MIB)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for number in range(mib):
            piece = (b"GGUF" if number == 0 else number.to_bytes(4, "big")) + noise[4:]
            digest.update(piece)
            file.write(piece)
    os.sync()
    return digest.hexdigest()


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):8.2f} {unit:6} ({min(values):.2f}..{max(values):.2f})"


def one_round(
    folder: Path, origin: str, size: int, sha256: str, rows: dict[str, list[float]]
) -> None:
    """Every program of one round, each on fresh files."""

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    from events.secrets import mirror_token, node_secret

    copy = folder / "copy"
    url = f"{origin}/{REPO}/resolve/{COMMIT}/{NAME}"
    os.sync()  # nobody writes back what another left
    note("curl", timed(["curl", "-sf", "-o", str(copy), url]))
    note("sha256sum", timed(["sha256sum", str(copy)]))
    copy.unlink()
    os.sync()
    store = folder / "mirror"
    said = subprocess.run(
        own("fetch", store, origin, size, sha256), check=True, stdout=subprocess.PIPE
    )
    row = json.loads(said.stdout)
    note("fetch", row["took_s"])
    note("fetch+fsync", row["settled_s"])
    note("fetch memory", row["grown_mib"])
    port = free_port()
    token = mirror_token(node_secret(YARD_SECRET, "bench"), "bench")
    with running(port, own("serve", store, port)) as server:
        served = f"http://127.0.0.1:{port}/mirror/files/{KEY}"
        bearer = f"Authorization: Bearer {token}"
        note("serve", timed(["curl", "-sf", "-o", "/dev/null", "-H", bearer, served]))
        os.killpg(server.pid, signal.SIGTERM)
        assert server.stdout is not None
        note("serve memory", json.loads(server.stdout.readline())["grown_mib"])
    note("nginx", timed(["curl", "-sf", "-o", "/dev/null", url]))
    shutil.rmtree(store)


def report(rows: dict[str, list[float]], mib: int) -> None:
    for name in ("curl", "sha256sum", "fetch", "fetch+fsync", "serve", "nginx"):
        rate = mib / statistics.median(rows[name])
        print(f"  {name:14} {spread(rows[name], 's')}  {rate:8.0f} MiB/s")
    theirs = [a + b for a, b in zip(rows["curl"], rows["sha256sum"], strict=True)]
    ratios = {
        "fetch": rows["fetch"],
        "fetch+fsync": rows["fetch+fsync"],
        "fetch + serve": [a + b for a, b in zip(rows["fetch"], rows["serve"], strict=True)],
    }
    print(f"\n  speed against curl + sha256sum ({statistics.median(theirs):.2f} s); 1 = as fast")
    for name, ours in ratios.items():
        values = [b / a for a, b in zip(ours, theirs, strict=True)]
        target = f"  target {TARGET}" if name == "fetch + serve" else ""
        print(f"  {name:14} {spread(values, 'x')}{target}")
    values = [b / a for a, b in zip(rows["serve"], rows["nginx"], strict=True)]
    print(f"  {'serve / nginx':14} {spread(values, 'x')}")
    print(f"\n  memory above an idle process; target under {MEMORY_TARGET_MIB} MiB")
    for name in ("fetch memory", "serve memory"):
        print(f"  {name:14} {max(rows[name]):8.1f} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument(
        "--folder", help="where the files are written; default: the temporary folder"
    )
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "fetch":
        folder, url, size, sha256 = options.arguments
        asyncio.run(fetch(Path(folder), url, int(size), sha256))
        return
    if options.role == "serve":
        import uvloop

        folder, port = options.arguments
        uvloop.run(serve(Path(folder), int(port)))
        return
    for program in ("curl", "sha256sum"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed")
    binary = nginx_binary()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        file = folder / "origin" / REPO / "resolve" / COMMIT / NAME
        file.parent.mkdir(parents=True)
        sha256 = write_file(file, options.mib)
        port = free_port()
        config = folder / "nginx.conf"
        config.write_text(NGINX_CONF.format(dir=folder, port=port, root=folder / "origin"))
        argv = [binary, "-c", str(config), "-p", str(folder), "-e", f"{folder}/error.log"]
        rows: dict[str, list[float]] = {}
        with running(port, argv):
            # nginx's workers read as another user when it is started by root.
            os.chmod(folder, 0o755)
            for _ in range(options.rounds):
                one_round(folder, f"http://127.0.0.1:{port}", options.mib * MIB, sha256, rows)
        print(f"\n{options.mib} MiB, {options.rounds} rounds")
        report(rows, options.mib)


if __name__ == "__main__":
    main()
