"""Looks at an agent from outside: its engines by the log, by HTTP and among processes, and its journal."""

import sqlite3

import httpx
import msgspec
import psutil

from nodeagent.journal import KnownPlan
from schemas.plan import Plan
from tests.support.agent_yard import MemoryYard


async def pid_of(yard: MemoryYard, replica: str) -> int:
    """The engine's pid, as the log tells it."""
    await yard.hand.expect(
        lambda: (r := yard.hand.replica(replica)) is not None and r.pid, f"the pid of {replica}"
    )
    found = yard.hand.replica(replica)
    assert found is not None
    assert found.pid is not None
    return found.pid


async def serves(endpoint: str | None, replica: str) -> bool:
    headers = {"Authorization": f"Bearer key-of-{replica}"}
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{endpoint}/v1/models", headers=headers)).status_code == 200


def engines_of(yard: MemoryYard, replica: str) -> list[psutil.Process]:
    """Living engine processes of a launch of this very yard, the launcher left out."""
    folder = str(yard.folder)
    found = []
    for process in psutil.process_iter():
        try:
            above = process.parent()
            if (
                above is not None
                and any(word.startswith(folder) for word in above.cmdline())
                and process.environ().get("YARD_LAUNCH_ID") == replica
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def journal_has(yard: MemoryYard, replica: str, phase: str) -> bool:
    database = sqlite3.connect(yard.folder / "nodeagent" / "journal.sqlite")
    try:
        rows = database.execute(
            "SELECT body FROM kept WHERE kind = 'held' AND key = ?", (replica,)
        ).fetchall()
    finally:
        database.close()
    return any(msgspec.json.decode(row[0])["replica"]["phase"] == phase for row in rows)


def plan_in_journal(yard: MemoryYard, *items) -> None:
    known = KnownPlan(plan=Plan(node="n1", items=items), seq=yard.hand.seq)
    database = sqlite3.connect(yard.folder / "nodeagent" / "journal.sqlite")
    with database:
        database.execute(
            "UPDATE kept SET body = ? WHERE kind = 'fact' AND key = 'plan'",
            (msgspec.json.encode(known),),
        )
    database.close()
