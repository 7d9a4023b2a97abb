"""`python -m tests.clients`: every client against one yard, and docs/transcript.md of it; fails where an answer is wrong."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.clients import with_anthropic, with_browser, with_openai
from tests.clients.asking import ask_all, complaints
from tests.clients.calls import OF_THE_GATEWAY
from tests.clients.steps import complaints as complaints_of_steps
from tests.clients.transcript import written
from tests.clients.with_browser import Pages, browser
from tests.clients.with_curl import Curl
from tests.clients.yard import ClientYard, clients_yard, spend
from tests.system.yard import CTL

TRANSCRIPT: Final = Path(__file__).parents[2] / "docs" / "transcript.md"


async def _told_elsewhere(yard: ClientYard, profile: Path) -> dict[str, Any]:
    """What a page is told whose origin is not allowed."""
    pages = Pages()
    try:
        async with browser(yard, pages, profile) as page:
            return await page.try_(OF_THE_GATEWAY[0])
    finally:
        pages.close()


def _version() -> str:
    told = subprocess.run(
        [with_browser.program(), "--version"], capture_output=True, text=True, check=True
    )
    return " ".join(told.stdout.split()[:2])


async def _all(folder: Path, pages: Pages) -> tuple[str, list[str]]:
    """The document, and what was wrong."""
    files = folder / "files"
    files.mkdir()
    async with clients_yard(folder / "yard", (pages.origin,)) as yard:
        curl = await ask_all(Curl(yard, files), yard)
        await spend(yard)
        with_packages = [
            (module.NAME, await asyncio.to_thread(module.run, yard))
            for module in (with_openai, with_anthropic)
        ]
        async with browser(yard, pages, folder / "profile") as opened:
            page = await ask_all(opened, yard)
        other = await _told_elsewhere(yard, folder / "other-profile")
    wrong = [f"curl: {why}" for why in complaints(curl)]
    wrong += [f"{with_browser.NAME}: {why}" for why in complaints(page)]
    for name, taken in with_packages:
        wrong += [f"{name}: {why}" for why in complaints_of_steps(taken)]
    if "failed" not in other:
        wrong.append(f"a page of another origin was let see {other}")
    text = written(curl, page, with_packages, _version(), str(other.get("failed")))
    return text, wrong


def main() -> int:
    pages = Pages()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            text, wrong = asyncio.run(_all(Path(folder), pages))
    finally:
        pages.close()
        CTL.close()
    TRANSCRIPT.write_text(text, encoding="utf-8")
    sys.stdout.write("".join(f"{why}\n" for why in wrong) or f"written: {TRANSCRIPT.name}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
