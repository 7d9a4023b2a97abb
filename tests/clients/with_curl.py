"""Asks a call by curl, as somebody would type it, and reads what curl printed."""

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Final

from tests.clients.calls import Call, File
from tests.clients.judging import Reply
from tests.clients.yard import ClientYard

NAME: Final = "curl"
TIMEOUT_S: Final = 30


def arguments(call: Call, base: str, key: str) -> list[str]:
    """The command; files lie in the folder it runs in."""
    made = ["curl", "-sS", "-i", "--max-time", str(TIMEOUT_S)]
    if call.method == "HEAD":
        made.append("-I")
    elif call.method != ("POST" if call.json or call.form or call.file else "GET"):
        made += ["-X", call.method]
    made.append(base + call.path)
    if key:
        made += ["-H", f"Authorization: Bearer {key}"]
    for name, value in call.headers.items():
        made += ["-H", f"{name}: {value}"]
    if call.json is not None:
        made += ["-H", "Content-Type: application/json"]
        made += ["-d", json.dumps(call.json, ensure_ascii=False)]
    for name, part in call.form:
        file = isinstance(part, File)
        made += ["-F", f"{name}=@{part.name};type={part.type}" if file else f"{name}={part}"]
    if call.file is not None:
        made += ["--data-binary", f"@{call.file.name}"]
    return made


def typed(call: Call) -> str:
    """The command for a reader, in whose shell $YARD is the gateway and $ALL_KEY and the like are keys."""
    key = f"{call.key.upper()}_KEY" if call.key != "none" else ""
    command = shlex.join(["curl", "-i", *arguments(call, "YARD", key)[5:]])
    command = command.replace("{id}", "resp_1")
    bearer = "Authorization: Bearer "
    command = command.replace(f"'{bearer}{key}'", f'"{bearer}${key}"')
    return re.sub(r"( '?)YARD/", r"\1$YARD/", command, count=1).replace(" '$YARD", " $YARD'")


def parsed(output: bytes) -> Reply:
    """The last answer; those before it are 100 Continue."""
    head, _, body = output.partition(b"\r\n\r\n")
    while head.split(b" ", 2)[1].startswith(b"1"):
        head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Reply(
        status=int(first.split(" ")[1]),
        headers={name.lower(): value.strip() for name, _, value in pairs},
        text=body.decode("utf-8", "replace"),
    )


class Curl:
    """One process for each call, in a folder with the files that calls send."""

    def __init__(self, yard: ClientYard, folder: Path) -> None:
        self._yard = yard
        self._folder = folder

    async def ask(self, call: Call) -> Reply:
        for file in (call.file, *(part for _, part in call.form)):
            if isinstance(file, File):
                (self._folder / file.name).write_bytes(file.content)
        process = await asyncio.create_subprocess_exec(
            *arguments(call, self._yard.base, self._yard.keys[call.key]),
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        # 18: the answer ended early; what came of it is to be judged.
        if process.returncode not in (0, 18) or not out:
            raise AssertionError(f"{typed(call)}: curl ended with {process.returncode}: {err!r}")
        return parsed(out)
