"""Reads what `adapter add --source` names: a folder, a repository of a registry, or the URL of a folder.

A relative path becomes absolute here, where its shell stands. Whether there is an adapter is the control
plane's to find out: the folder is on its machine, which need not be this one.
"""

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from controlplane.ctl.failures import UsageMistake

_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?", re.ASCII)
_SHAPES: Final = "a folder, OWNER/REPO[@REVISION], or the http(s) URL of a folder"


def source_of(text: str, folder: Path) -> str:
    """The source as the command carries it; `folder` is where a relative path begins.

    1. A URL stays as it is. 2. What begins with `/`, `.` or `~` is a path. 3. `OWNER/REPO[@REVISION]` is a
    repository, unless a folder of that name is here: then nobody can know which is meant. 4. Any other word
    is a path when something is there. Raises UsageMistake.
    """
    if not text:
        raise UsageMistake(f"--source: expected {_SHAPES}, got nothing")
    scheme, colon, _ = text.partition("://")
    if colon:
        if scheme.lower() not in ("http", "https"):
            raise UsageMistake(f"--source {text}: {scheme} is no scheme of a source: {_SHAPES}")
        return _url(text)
    if text[0] in "/.~":
        return _path(text, folder)
    is_here = os.path.lexists(folder / text)
    if _REPO.fullmatch(text):
        if is_here:
            raise UsageMistake(
                f"--source {text}: this may be a repository, and a folder of that name is here; "
                f"write ./{text} for the folder, {text}@main for the repository"
            )
        return text
    if is_here:
        return _path(text, folder)
    raise UsageMistake(f"--source {text}: there is no such folder here; expected {_SHAPES}")


def _url(text: str) -> str:
    """A password is refused before the command is sent: it would be kept with it, for everybody to read."""
    try:
        netloc = urlsplit(text).netloc
    except ValueError:
        raise UsageMistake(
            f"--source: {text.rpartition('@')[2]} is no address of the web"
        ) from None
    if "@" in netloc:
        raise UsageMistake("--source: the URL of an adapter holds no name and password")
    return text


def _path(text: str, folder: Path) -> str:
    named = os.path.expanduser(text)
    is_relative = not os.path.isabs(named)
    # Not resolved: a link may be meant to be followed on the control plane's machine, at the time it reads.
    path = os.path.normpath(os.path.join(folder, named))
    if os.path.isfile(path):
        raise UsageMistake(f"--source {text}: this is a file; name the folder that holds it")
    if is_relative and not os.path.isdir(path):
        raise UsageMistake(
            f"--source {text}: there is no folder {path} here; name one of the control plane's "
            "machine by its whole path"
        )
    return path
