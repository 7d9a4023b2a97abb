"""yardctl against a whole yard, as a person types it: every command once, with its exit code."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from controlplane.ctl.supervisor import python_argv
from tests.support.aio import run
from tests.system.yard import SystemYard, scripted_model, system_yard


async def rows(yard: SystemYard, *arguments: str) -> list[dict[str, Any]]:
    return json.loads(await yard.ctl(*arguments, "-o", "json"))


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
