"""`make demo`: starts a yard in a temporary folder, serves a model from a registry, and tells one cold request.

A client like any other: it uses yardctl, the gateway and the event stream, and invents no number. The
registry is a local one with the real file, started by the command it is given.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from controlplane.ctl.connect import find_place, open_api, open_log
from controlplane.ctl.supervisor import become_subreaper, bury_orphans, python_argv
from controlplane.ctl.up import RunningYard, UpError, UpOptions, Yard, lock_data, start_yard
from events.log import LogError, Recorded

MODEL: Final = "smollm2"
QUESTION: Final = "Write one sentence about a yard where machines rest until somebody needs them."
STORY_TIMEOUT_S: Final = 120.0
REGISTRY_START_S: Final = 20.0

REPO: Final = "yard/SmolLM2-135M-Instruct-GGUF"
"""What the local registry calls the repository with the file."""
CTX_POOL: Final = "2048"
# The events of the story, in the order they must come, and what each is called in the timeline.
STORY: Final = (
    ("activation.placing", "activation"),
    ("replica.starting", "starting"),
    ("replica.ready", "ready"),
    ("activation.idle", "idle"),
    ("replica.draining", "draining"),
    ("replica.stopped", "stopped"),
    ("card.released", "memory back"),
)


class DemoError(Exception):
    """The story did not happen as told; the sentence says what was missing."""


def say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


NOT_FOR_THE_DEMO: Final = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    # A machine that may not ask the real registry may well ask the one on itself.
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
"""What of the environment is meant for the real registry."""


def registry_environment(endpoint: str) -> dict[str, str]:
    """Has the control plane ask the registry at `endpoint`, on this machine, whatever proxy leads elsewhere."""
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    straight = ",".join(filter(None, (named, "127.0.0.1,localhost")))
    return {"HF_ENDPOINT": endpoint, "NO_PROXY": straight, "no_proxy": straight}


async def _yardctl(yard: Yard, *arguments: str) -> None:
    """Runs it and passes on each line as it comes. Raises DemoError when it did not end well."""
    process = await asyncio.create_subprocess_exec(
        *python_argv("controlplane.ctl", *arguments),
        env={**os.environ, "YARD_DATA": str(yard.data), "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    async for line in process.stdout:
        say(f"  {line.decode(errors='replace').rstrip()}")
    code = await process.wait()
    if code != 0:
        raise DemoError(f"yardctl {' '.join(arguments)} ended with {code}")


class Story:
    """Collects the first event of each kind of the story, with the time its writer gave it."""

    def __init__(self) -> None:
        self.moments: dict[str, dt.datetime] = {}
        self.details: dict[str, Recorded] = {}
        self.done = asyncio.Event()

    def add(self, event: Recorded) -> None:
        short = event.type
        names = dict(STORY)
        if short in names and names[short] not in self.moments:
            self.moments[names[short]] = event.time
            self.details[short] = event
        if len(self.moments) == len(STORY):
            self.done.set()


async def _watch(yard: Yard, story: Story, watching: asyncio.Event) -> None:
    """Follows the event stream from now on into the story; sets `watching` when it does."""
    async with open_log(yard.data) as log:
        follower = log.follow(["yard.evt.>"])
        try:
            synced = False
            while True:
                batch = await follower.next()
                if synced:
                    for item in batch.items:
                        if isinstance(item, Recorded):
                            story.add(item)
                if batch.synced and not synced:
                    synced = True
                    watching.set()
        finally:
            await follower.close()


async def _ask(yard: Yard) -> AsyncIterator[tuple[str, Any]]:
    """One streamed chat completion: ("request", time), ("text", …), ("end", request id)."""
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 60,
        "temperature": 0.2,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    async with httpx.AsyncClient(timeout=httpx.Timeout(90.0), trust_env=False) as client:
        yield "request", dt.datetime.now(dt.UTC)
        async with client.stream("POST", f"{yard.base_url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise DemoError(f"the gateway answered {answer.status_code}: {answer.text[:500]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    raise DemoError(f"the stream ended with {frame['error']}")
                for choice in frame.get("choices", []):
                    text = choice.get("delta", {}).get("content")
                    if text:
                        yield "text", text
            yield "end", answer.headers.get("x-request-id", "")


async def _written_at(yard: Yard, request: str) -> dt.datetime:
    """When the gateway wrote the request to the engine, from its own timeline."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        answer = await client.get(
            f"http://127.0.0.1:{yard.gateway_port}/yard/timeline", params={"request": request}
        )
        if answer.status_code != 200:
            raise DemoError(f"the gateway has no timeline of this request: {answer.text[:300]}")
        return dt.datetime.fromisoformat(answer.json()["written_to_engine"])


def timeline(moments: list[tuple[str, dt.datetime]]) -> list[str]:
    """The lines of the timeline: milliseconds since the step before, since the request, and the name."""
    lines = ["     since the step before   since the request"]
    first = moments[0][1]
    before = first
    for name, moment in moments:
        step = (moment - before).total_seconds() * 1000
        total = (moment - first).total_seconds() * 1000
        lines.append(f"{step:16.1f} ms {total:18.1f} ms   {name}")
        before = moment
    return lines


async def _serve(yard: Yard) -> None:
    """From the registry to a replica that answered, then to an entry that runs only when asked for."""
    options = ("--quant", "Q4_1", "--name", MODEL, "--ctx-pool", CTX_POOL)
    window = ("--context-length", CTX_POOL)
    say(f"\n$ yardctl model serve {REPO} {' '.join((*options, *window))}")
    await _yardctl(yard, "model", "serve", REPO, *options, *window)
    say("\nA chat through the gateway:\n")
    async for kind, value in _ask(yard):
        if kind == "text":
            sys.stdout.write(value)
            sys.stdout.flush()
    say(
        "\n\n$ yardctl apply -f demo.yaml        (the same entry on demand: min 0, idle_timeout 5 s)"
    )
    async with open_api(find_place(data=yard.data)) as api:
        entry = on_demand(await api.data(f"/v1/models/{MODEL}"))
    catalog = yard.data / "demo.yaml"
    catalog.write_text(json.dumps(entry), encoding="utf-8")
    await _yardctl(yard, "apply", "-f", str(catalog))
    await _yardctl(yard, "model", "unload", MODEL, "--wait")


def on_demand(model: Mapping[str, Any]) -> dict[str, Any]:
    """A catalog entry as a file would hold it, from the API's view of one, with nothing kept running."""
    profiles = [
        {
            "name": profile["name"],
            "engine": profile["engine"],
            "args": profile["args"],
            "memory": profile["memory_bytes"],
        }
        for profile in model["profiles"]
    ]
    return {
        "name": model["name"],
        "source": model["source"],
        "context_length": model["context_length"],
        "max_output": model["max_output"],
        "scaling": {"min": 0, "max": 1, "idle_timeout": "5s"},
        "profiles": profiles,
    }


async def _tell(running: RunningYard) -> None:
    yard = running.yard
    await _serve(yard)
    say("\n$ yardctl model list")
    await _yardctl(yard, "model", "list")

    story = Story()
    watching = asyncio.Event()
    watcher = asyncio.create_task(_watch(yard, story, watching))
    try:
        await _first_of(watching, watcher, "the event stream")
        say(f"\nA client asks the cold model: {QUESTION}\n")
        requested = first_token = None
        request_id = ""
        async for kind, value in _ask(yard):
            if kind == "request":
                requested = value
            elif kind == "text":
                first_token = first_token or dt.datetime.now(dt.UTC)
                sys.stdout.write(value)
                sys.stdout.flush()
            else:
                request_id = value
        if requested is None or first_token is None:
            raise DemoError("the stream had no text")
        say("\n\nNobody asks any more; waiting until the model was given back …")
        await _first_of(story.done, watcher, "the end of the story")
        written = await _written_at(yard, request_id)
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError, LogError):
            await watcher
    at = story.moments
    moments = [
        ("request", requested),
        *((name, at[name]) for name in ("activation", "starting", "ready")),
        ("request written to the engine", written),
        ("first token", first_token),
        *((name, at[name]) for name in ("idle", "draining", "stopped", "memory back")),
    ]
    say()
    for line in timeline(moments):
        say(line)
    gap_ms = (written - at["ready"]).total_seconds() * 1000
    say(f"\nready -> request written to the engine: {gap_ms:.1f} ms")


async def _first_of(event: asyncio.Event, watcher: "asyncio.Task[None]", what: str) -> None:
    """Waits for `event`; a watcher that ended, or the deadline, is an error that names `what`."""
    waiting = asyncio.create_task(event.wait())
    try:
        done, _ = await asyncio.wait(
            {waiting, watcher}, timeout=STORY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if waiting not in done:
            if watcher in done:
                watcher.result()
            raise DemoError(f"waited {STORY_TIMEOUT_S:g} s for {what}")
    finally:
        waiting.cancel()


@contextlib.asynccontextmanager
async def _registry(command: Sequence[str]) -> AsyncIterator[str]:
    """Starts the local registry, which prints its address once it listens, and ends it. Raises DemoError."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(REGISTRY_START_S):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise DemoError("the local registry did not start")
        yield address
    except TimeoutError:
        raise DemoError("the local registry did not start in time") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def run_demo(registry: Sequence[str]) -> int:
    """Tells the story; 0 when all of it happened. Leaves no process and no file behind.

    `registry` is the command that starts the local registry.
    """
    become_subreaper()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, bury_orphans)
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, this.cancel)
    data = Path(tempfile.mkdtemp(prefix="modelyard-demo-"))
    running: RunningYard | None = None
    code = 0
    try:
        async with _registry(registry) as endpoint:
            os.environ.update(registry_environment(endpoint))
            for name in NOT_FOR_THE_DEMO:
                os.environ.pop(name, None)
            with lock_data(data):
                say("Starting nats-server, control plane, gateway and agent on free ports …")
                running = await start_yard(
                    UpOptions(data=data, gateway_port=0, api_port=0, nats_port=0), say
                )
                say(f"ready: {running.yard.base_url}")
                await _tell(running)
    except (DemoError, UpError, LogError, httpx.HTTPError) as error:
        say(f"\ndemo: {error or error.__class__.__name__}")
        for log in sorted((data / "logs").glob("*.log")):
            say(f"--- the end of {log.name}")
            say("\n".join(log.read_text(errors="replace").splitlines()[-15:]))
        code = 1
    except asyncio.CancelledError:
        say("\ninterrupted")
        code = 130
    finally:
        # A second Ctrl-C would cut the stop short and leave the engine behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, say, "stopping already …")
        if running is not None:
            await running.stop()
        bury_orphans()
        shutil.rmtree(data, ignore_errors=True)
    if code == 0:
        say("Everything was stopped; nothing is left running.")
    return code


def main() -> int:
    """`python -m controlplane.ctl.demo -- COMMAND…`, the command that starts the local registry."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("registry", nargs="+", help="starts the local registry")
    given = parser.parse_args()
    return asyncio.run(run_demo(given.registry))


if __name__ == "__main__":
    sys.exit(main())
