"""What yardctl does about serve jobs, the mirror and the registry: sends commands, reads, and prints.

A job is only watched from here: it runs in the control plane, whatever becomes of this terminal.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import msgspec

from controlplane.ctl import jobview
from controlplane.ctl.acts import tell
from controlplane.ctl.commanding import carry_out
from controlplane.ctl.connect import Api, Place, open_log
from controlplane.ctl.failures import EXIT_FAILED, CtlError, Unreachable, UsageMistake
from controlplane.ctl.reads import refuse_unread
from controlplane.ctl.show import (
    age,
    console,
    notes_of,
    print_fields,
    print_json,
    print_table,
    size,
)
from events.log import EventLog, Recorded
from schemas.commands import (
    CommandBody,
    JobCancel,
    JobRetry,
    JobServe,
    MirrorGc,
    MirrorRemove,
    MirrorVerify,
    Outcome,
)
from schemas.file import File

Row = Mapping[str, Any]
REGISTRY_S: Final = 120.0
"""Reading a repository and a header may take this long."""


async def send(place: Place, body: CommandBody, timeout_s: float) -> Outcome:
    """The accepted outcome, printed. Raises as `carry_out`."""
    outcome = await _carried(place, body, timeout_s)
    tell(outcome)
    return outcome


async def _carried(place: Place, body: CommandBody, timeout_s: float) -> Outcome:
    async with open_log(place) as log:
        return await carry_out(log, body, prefix=place.prefix, timeout_s=timeout_s)


def _tell_all(outcome: Outcome) -> None:
    """What it is about, a line each, then the sentence about all of it."""
    for line in (*outcome.lines, outcome.sentence):
        print(line)


async def serve(place: Place, body: JobServe, timeout_s: float, *, detach: bool) -> None:
    """Starts the job, or joins the one that does the same, and watches it."""
    await _started(place, body, timeout_s, detach=detach)


async def retry(place: Place, job: str, timeout_s: float, *, detach: bool) -> None:
    await _started(place, JobRetry(job=job), timeout_s, detach=detach)


async def cancel(place: Place, job: str, timeout_s: float) -> None:
    """Prints that it is over and what it leaves behind, in the one sentence that says both."""
    print((await _carried(place, JobCancel(job=job), timeout_s)).sentence)


async def remove(place: Place, what: str, timeout_s: float) -> None:
    _tell_all(await _carried(place, MirrorRemove(what=what), timeout_s))


async def verify(place: Place, what: str, timeout_s: float) -> None:
    """Has files read again and prints what came of each. Raises CtlError when one is not as it was."""
    async with open_log(place) as log:
        body = MirrorVerify(what=what)
        outcome = await carry_out(log, body, prefix=place.prefix, timeout_s=timeout_s)
        tell(outcome)
        files = [ref for ref in outcome.refs if ref.startswith(f"{place.prefix}.evt.file.")]
        bad = await _verified(log, files) if files else 0
    if bad:
        raise CtlError(
            f"{bad} of {len(files)} files are not what they were; a job retry fetches them"
        )


async def _verified(log: EventLog, subjects: list[str]) -> int:
    """Waits until none of these files is being read; how many failed. Raises Unreachable."""
    follower = log.follow(subjects)
    left = set(subjects)
    bad = 0
    try:
        while left:
            batch = await follower.next()
            if not batch.connected:
                raise Unreachable(
                    "NATS went away; the files are verified all the same: yardctl mirror list"
                )
            for item in batch.items:
                if not isinstance(item, Recorded) or item.subject not in left:
                    continue
                file = item.state
                if isinstance(file, File) and any(c.phase == "verifying" for c in file.copies):
                    continue
                left.discard(item.subject)
                failed = (
                    [c for c in file.copies if c.phase == "failed"]
                    if isinstance(file, File)
                    else []
                )
                bad += bool(failed)
                if not isinstance(file, File):
                    print(f"{item.key[0]}: gone meanwhile")
                    continue
                print(f"{file.repo}/{file.path}: {failed[0].reason if failed else 'as it was'}")
    finally:
        await follower.close()
    return bad


async def collect(place: Place, timeout_s: float, *, dry_run: bool) -> None:
    _tell_all(await _carried(place, MirrorGc(dry_run=dry_run), timeout_s))


async def follow(place: Place, job: str) -> None:
    """Watches a job until it is over. Raises as `jobwatch.watch`."""
    _typed(job, "a job")
    # Imported here: what draws bars is no part of the other commands' start.
    from controlplane.ctl.jobwatch import watch

    try:
        await watch(place, job)
    except BaseException as error:
        # Whatever ended but the job itself (its own end is 1): Ctrl-C, a NATS that went away.
        if not isinstance(error, CtlError) or error.code != EXIT_FAILED:
            console(stderr=True).print(f"the job goes on: yardctl job watch {job}")
        raise


async def _started(place: Place, body: CommandBody, timeout_s: float, *, detach: bool) -> None:
    outcome = await send(place, body, timeout_s)
    marker = f"{place.prefix}.evt.job."
    jobs = [ref.removeprefix(marker) for ref in outcome.refs if ref.startswith(marker)]
    if not jobs:
        raise CtlError("the control plane named no job; yardctl job list shows them")
    if detach:
        print(f"watch it: yardctl job watch {jobs[0]}")
        return
    await follow(place, jobs[0])


async def list_jobs(api: Api, output: str, now: datetime) -> None:
    listed = await api.listed("/v1/jobs")
    jobs: list[Row] = sorted(listed.rows, key=lambda job: str(job["started"]))
    if output == "json":
        print_json([*jobs, *listed.unread])
        return
    print_table(
        ("id", "state", "repository", "model", "step", "since"),
        (jobview.row(job, age(job["started"], now)) for job in jobs),
        "there is no job; serve a model: yardctl model serve OWNER/REPO",
        notes_of(listed),
    )


async def show_job(api: Api, job: str, output: str) -> None:
    found: Row = await api.data(f"/v1/jobs/{quote(_typed(job, 'a job'), safe='')}")
    if output == "json":
        print_json(found)
        return
    steps = found.get("steps", [])
    print_fields(jobview.fields(found))
    if steps:
        print("steps:")
        for step in steps:
            line = jobview.Line(name=step["name"], state=step["state"], detail=step["detail"])
            print(f"  {line.text()}")


async def list_files(api: Api, output: str, now: datetime) -> None:
    listed = await api.listed("/v1/files")
    files: list[Row] = sorted(
        listed.rows, key=lambda file: (file["repo"], file["path"], file["commit"])
    )
    if output == "json":
        print_json([*files, *listed.unread])
        return
    print_table(
        ("key", "repository", "file", "size", "state", "since"),
        (_file_row(file, now) for file in files),
        "the mirrors hold nothing; serve a model: yardctl model serve OWNER/REPO",
        notes_of(listed),
    )


def _file_row(file: Row, now: datetime) -> tuple[str, ...]:
    copies = file.get("copies", [])
    states = sorted({copy["phase"] for copy in copies}) or ["absent"]
    since = max((copy["since"] for copy in copies), default=None)
    return (
        file["key"][:12],
        f"{file['repo']}@{file['commit'][:7]}",
        file["path"],
        size(file.get("bytes") or file["published_bytes"]),
        ", ".join(states),
        age(since, now),
    )


async def show_file(api: Api, key: str, output: str) -> None:
    """One file by its key or the beginning of it. Raises CtlError when none or several match."""
    _typed(key, "a file's key")
    listed = await api.listed("/v1/files")
    found = [file for file in listed.rows if file["key"].startswith(key) or file["path"] == key]
    if not found:
        ahead = [one["name"] for one in listed.unread if one["name"].startswith(key)]
        if len(ahead) == 1:
            refuse_unread(listed, ahead[0])
    if len(found) != 1:
        how = "no file" if not found else f"{len(found)} files"
        raise CtlError(f"{how} of the mirrors begin with {key!r}; yardctl mirror list shows them")
    if output == "json":
        print_json(found[0])
    else:
        print_fields(found[0])


async def show_registry(
    api: Api, repo: str, quant: str | None, file: str | None, revision: str | None, output: str
) -> None:
    """What a repository holds and what would be picked of it."""
    owner, _, name = repo.partition("/")
    if not (owner and name) or "/" in name or owner.startswith("."):
        raise UsageMistake(f"{repo!r} is not a repository; it looks like OWNER/REPO")
    query = {"quant": quant, "file": file, "revision": revision}
    found: Row = (
        await api.get(
            f"/v1/registry/{quote(repo, safe='/')}",
            wait_s=REGISTRY_S,
            **{name: value for name, value in query.items() if value},
        )
    )["data"]
    if output == "json":
        print_json(found)
        return
    access = found.get("gated") or ("private" if found.get("private") else "open")
    print(
        f"{found['repo']} at {found['commit'][: jobview.COMMIT_SHOWN]}, {access if access != 'auto' else 'gated'}"
    )
    print_table(
        ("", "file set", "quant", "size", "files"),
        (
            (
                "→" if one["picked"] else "",
                one["name"],
                one["quant"],
                size(one["bytes"]),
                str(one["shards"]),
            )
            for one in found["sets"]
        ),
        "no GGUF files",
    )
    if found.get("left_out"):
        print(f"left out: {', '.join(found['left_out'])}")
    print(found["sentence"])


async def show_plan(api: Api, body: JobServe, output: str) -> None:
    """What `serve` would do. Raises CtlError when it would fail, after everything was shown."""
    asked = {k: v for k, v in msgspec.to_builtins(body).items() if k != "do" and v is not None}
    found: dict[str, Any] = (await api.post("/v1/plan", asked, wait_s=REGISTRY_S))["data"]
    problems = found.get("problems", [])
    if output == "json":
        print_json(found)
    else:
        _print_plan(found)
    if problems:
        raise CtlError(*(f"{problem['sentence']} [{problem['code']}]" for problem in problems))


def _print_plan(found: Row) -> None:
    chosen = found.get("file_set") or {}
    there = found.get("fetched_bytes") or 0
    print_fields(
        {
            "repository": f"{found['repo']} at {found['commit'][: jobview.COMMIT_SHOWN]}",
            "model": found.get("model"),
            "files": jobview.files_text(chosen) if chosen else None,
            "to fetch": _lacking(chosen["bytes"] - there) if chosen and there else None,
            "architecture": found.get("architecture"),
            "context": found.get("context_length"),
            "memory": found.get("explained"),
        }
    )
    if found.get("places"):
        fits = any(place.get("rank") for place in found["places"])
        print("where it would fit:" if fits else "it fits nowhere:")
        rows = (
            (
                f"{place['node']}/{'+'.join(place['cards'])}",
                place["profile"],
                str(place["rank"]) if place.get("rank") else "no",
                place.get("reason", ""),
            )
            for place in found["places"]
        )
        print_table(("  card", "profile", "rank", "why"), ((f"  {a}", *b) for a, *b in rows), "")


def _lacking(amount: int) -> str:
    return size(amount) if amount else "nothing: the mirror has it"


def _typed(name: str, what: str) -> str:
    """`name` itself. Raises UsageMistake when nothing was typed, which would name all of them."""
    if not name:
        raise UsageMistake(f"expected the name of {what}, got nothing")
    return name
