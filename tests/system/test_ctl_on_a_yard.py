"""yardctl against a whole yard, as a person types it: every command once, with its exit code."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

from controlplane.ctl.supervisor import python_argv
from tests.support.aio import run
from tests.system.yard import rows, scripted_model, system_yard


def test_req_x1_a_person_adds_loads_watches_and_removes_a_model(tmp_path: Path) -> None:
    entry = scripted_model("mine", aliases=["m"])
    file = tmp_path / "one.yaml"
    file.write_text(json.dumps(entry))

    async def story() -> None:
        async with system_yard(tmp_path / "data") as yard:
            assert "the catalog is empty" in await yard.ctl("model", "list")
            added = await yard.ctl("model", "add", "-f", str(file))
            assert "mine: added, on demand" in added
            await yard.ctl("model", "add", "-f", str(file), expect=2)
            loaded = await yard.ctl("model", "load", "mine", "--for", "1h", "--wait")
            assert loaded.endswith("mine: 1 ready\n")
            (replica,) = await rows(yard, "replica", "list")
            assert (replica["model"], replica["phase"]) == ("mine", "ready")
            assert replica["id"] in await yard.ctl("replica", "list")
            assert "phase:" in await yard.ctl("replica", "show", replica["id"])
            assert await yard.ctl("replica", "logs", replica["id"]) != ""
            assert "mine" in await yard.ctl("status")
            assert "fail" not in await yard.ctl("doctor")
            await yard.ctl("model", "unload", "mine", "--wait")
            assert "mine: removed" in await yard.ctl("model", "rm", "mine", "--wait")
            await yard.ctl("model", "show", "mine", expect=1)
            await yard.ctl("model", "rm", "mine", expect=2)

    run(story(), timeout_s=55)


def test_a_dry_run_changes_nothing_and_tells_what_would(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path / "data") as yard:
            await yard.add(scripted_model("a"), scripted_model("b"))
            before = await rows(yard, "model", "list")
            catalog = json.dumps([scripted_model("a", description="new"), scripted_model("c")])
            told = await yard.ctl("apply", "-f", "-", "--dry-run", "--prune", stdin=catalog)
            assert told.splitlines()[0] == "a: changed (description)"
            assert "c: added" in told
            assert "b: removed" in told
            assert await rows(yard, "model", "list") == before
            await yard.ctl("apply", "-f", "-", "--prune", stdin=catalog)
            assert {model["name"] for model in await rows(yard, "model", "list")} == {"a", "c"}

    run(story(), timeout_s=55)


def test_req_a07_a_wrong_entry_is_refused_with_file_and_line_and_nothing_changes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "catalog.yaml"
    good = "- name: good\n  profiles: [{name: p, engine: command, command: x, memory: 1MiB}]\n"
    bad = "- name: bad\n  scaling:\n    min: 2\n    max: 1\n  profiles: []\n"
    file.write_text(good + bad)

    async def story() -> None:
        async with system_yard(tmp_path / "data") as yard:
            process = await asyncio.create_subprocess_exec(
                *python_argv("controlplane.ctl", "apply", "-f", str(file)),
                env={**os.environ, "YARD_DATA": str(yard.data)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await process.communicate()
            assert (process.returncode, out) == (2, b"")
            said = err.decode()
            assert f"{file}:6: [1].scaling.max: max (1) is below min (2)" in said
            assert f"{file}:7: [1].profiles: expected a list of at least one profile" in said
            assert await rows(yard, "model", "list") == []

    run(story(), timeout_s=55)


def test_inv_8_events_tell_who_did_what_and_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path / "data") as yard:
            await yard.add(scripted_model("a"))
            await yard.ctl("model", "scale", "a", "--min", "0", "--max", "2")
            text = await yard.ctl("events", "model.>", "--type", "model.*")
            lines = [json.loads(line) for line in text.splitlines()]
            assert [line["type"] for line in lines] == ["model.added", "model.changed"]
            assert {line["actor"] for line in lines} == {"admin"}
            command = lines[1]["causationid"]
            outcome = json.loads(await yard.ctl("command", "show", command, "-o", "json"))
            assert (outcome["status"], outcome["name"]) == ("accepted", "model.scale")
            assert "accepted" in await yard.ctl("command", "wait", command)
            later = await yard.ctl("events", "model.>", "--from-seq", str(lines[1]["seq"]))
            assert [json.loads(line)["seq"] for line in later.splitlines()] == [lines[1]["seq"]]
            (node,) = await rows(yard, "node", "list")
            await yard.ctl("node", "cordon", node["id"])
            assert "cordoned" in await yard.ctl("node", "list")
            await yard.ctl("node", "uncordon", node["id"])
            await yard.ctl("node", "cordon", "nobody", expect=2)

    run(story(), timeout_s=55)


CARDS = {
    "nodeagent": {
        "cards": [{"id": name, "memory": "1GiB"} for name in ("gpu0", "gpu1")],
        "gpus": False,
    }
}


async def started(data: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *python_argv("controlplane.ctl", *arguments),
        env={**os.environ, "YARD_DATA": str(data)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def test_req_d15_who_has_a_card_and_who_waits_is_shown_and_asked_for_by_name(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path / "data", settings=CARDS) as yard:
            names = [f"{c['node']}/{c['id']}" for c in await rows(yard, "card", "list")]
            assert names == ["local/cpu", "local/gpu0", "local/gpu1"]
            granted = json.loads(
                await yard.ctl("lease", "acquire", "local/gpu0", "local/gpu1", "--as", "render",
                               "--pinned", "-o", "json")
            )  # fmt: skip
            assert (granted["status"], granted["cards"]) == ("granted", ["gpu0", "gpu1"])
            leased = await yard.event("card.leased", lambda e: e.key == ("local", "gpu1"))
            assert leased.state is not None
            (lease,) = await rows(yard, "lease", "list")
            assert (lease["id"], lease["cards"], lease["state"], lease["pinned"]) == (
                granted["id"],
                ["gpu0", "gpu1"],
                "held",
                True,
            )
            said = (await yard.told("lease", "acquire", "local/gpu0", "--as", "x", "--wait", "0",
                                    expect=2))[1]  # fmt: skip
            assert "render" in said
            assert "[card_kept]" in said
            waiter = await started(
                yard.data, "run", "--card", "local/gpu0", "--as", "next", "--", "sh", "-c", "exit 5"
            )
            await yard.event("card.queued", lambda e: e.key == ("local", "gpu0"))
            page = await yard.ctl("card", "show", "local/gpu0")
            assert "local/gpu0: kept" in page
            assert f"render  lease {granted['id']}  the whole card" in page
            assert "1. next" in page
            assert f"waits for {granted['id']} (render)" in page
            assert (await yard.ctl("lease", "release", "render")).endswith("\n")
            _, err = await waiter.communicate()
            assert waiter.returncode == 5, err
            await yard.ctl("lease", "release", "render", expect=2)

    run(story(), timeout_s=58)


def test_a_card_is_asked_for_from_another_machine_and_the_place_in_line_taken_back(
    tmp_path: Path,
) -> None:
    """Another data folder with the same secrets and no agent: everything goes through NATS."""

    async def story() -> None:
        async with system_yard(tmp_path / "data", settings=CARDS) as yard:
            far = tmp_path / "far"
            far.mkdir()
            shutil.copytree(yard.data / "secrets", far / "secrets")
            shutil.copy(yard.data / "yard.json", far / "yard.json")
            first = await started(far, "claim", "start", "local/gpu0", "--as", "quake")
            out, err = await first.communicate()
            assert first.returncode == 0, err
            assert b"local/gpu0 is kept for quake" in out
            claimed = await yard.event("card.claimed")
            assert claimed.state is not None
            patient = await started(
                far, "lease", "acquire", "local/gpu0", "--as", "a", "--wait", "1h"
            )
            hasty = await started(
                far, "lease", "acquire", "local/gpu0", "--as", "b", "--wait", "1h"
            )
            for name in ("a", "b"):
                await yard.event(
                    "card.queued",
                    lambda e, name=name: any(
                        w.name == name for w in getattr(e.state, "waiters", ())
                    ),
                )
            hasty.send_signal(signal.SIGINT)
            await hasty.communicate()
            assert hasty.returncode == 130
            await yard.event("card.dequeued")
            end = await started(far, "claim", "end", "quake")
            await end.communicate()
            assert end.returncode == 0
            out, err = await patient.communicate()
            assert patient.returncode == 0, err
            assert b"local/gpu0 leased to a" in out
            run_far = await started(far, "run", "--card", "local/gpu0", "--as", "x", "--", "true")
            _, err = await run_far.communicate()
            assert run_far.returncode == 2
            assert b"[not_here]" in err

    run(story(), timeout_s=58)


def test_a_dry_run_of_placement_names_every_card(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path / "data", settings=CARDS) as yard:
            await yard.add(scripted_model("smol", profile={"card": ["gpu"]}))
            told = await yard.ctl("place", "smol")
            assert told.startswith("smol would go to local/gpu0 (rank 2")
            await yard.ctl("claim", "start", "local/gpu0", "--as", "quake")
            await yard.event("card.claimed")
            found = json.loads(await yard.ctl("place", "smol", "-o", "json"))
            assert [(c["cards"], c["rank"]) for c in found["candidates"]] == [
                (["gpu1"], 2),
                (["gpu0"], 5),
                (["cpu"], None),
            ]
            kept = await yard.ctl("place", "smol", "--card", "local/gpu0")
            assert kept.startswith("smol would wait for local/gpu0")
            await yard.ctl("place", "nobody", expect=1)
            assert await rows(yard, "replica", "list") == []

    run(story(), timeout_s=58)
