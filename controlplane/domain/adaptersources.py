"""Reads where an adapter comes from (a folder here, a repository, a URL) and chooses its files by their names.

It names places and sums, and opens nothing. Engines load what is in these files, so only one kind of weights
is taken: safetensors, which hold numbers alone; a pickle may run code.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Refusal
from schemas.codes import INVALID, NOT_AN_ADAPTER

SOURCE_BYTES: Final = 1024
"""A longer path or URL is refused: an adapter carries its source in every event, and each file once more."""

PICKLES: Final = (
    "adapter_model.bin",
    "adapter_model.pt",
    "adapter_model.pth",
    "adapter_model.ckpt",
)
SHARD_INDEX: Final = "adapter_model.safetensors.index.json"

COMMIT_DIGITS: Final = 40
_STAMP_DIGITS: Final = 20

_REPO: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[^\s@]{1,255}))?",
    re.ASCII,
)
_SHARD: Final = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors", re.ASCII)

_FORMS: Final = "an absolute path, OWNER/REPO[@REVISION], or the http(s) URL of a folder"

Place = Literal["registry", "web", "folder"]


class RepoSource(Struct, frozen=True, kw_only=True):
    """A repository of the registry; `revision` None: its main branch."""

    repo: str
    revision: str | None = None


class WebSource(Struct, frozen=True, kw_only=True):
    """A folder behind an http(s) URL, without a slash at its end, a query or a name and password."""

    url: str


class FolderSource(Struct, frozen=True, kw_only=True):
    """A folder of the machine on which the leading control plane runs, by its absolute path."""

    path: str


AdapterSource = RepoSource | WebSource | FolderSource


def read_source(text: str) -> AdapterSource | Refusal:
    """What `text` names: 1 a path   2 a URL   3 a repository   4 nothing of these, with the reason."""
    given = text.strip()
    if not given or not given.isprintable() or len(given.encode()) > SOURCE_BYTES:
        return _no(f"the source of an adapter is {_FORMS}, in at most {SOURCE_BYTES} bytes")
    if given.startswith("/"):  # 1
        return _folder(given)
    if "://" in given:  # 2
        return _web(given)
    found = _REPO.fullmatch(given)  # 3
    if found is None:  # 4
        return _no(f"{given[:200]!r} is no source of an adapter: that is {_FORMS}")
    return RepoSource(repo=found["repo"], revision=found["revision"])


def _folder(given: str) -> FolderSource | Refusal:
    parts = [part for part in given.split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        return _no(f"{given[:200]!r} is no absolute path of a folder without `.` and `..`")
    return FolderSource(path="/" + "/".join(parts))


def _web(given: str) -> WebSource | Refusal:
    try:
        parts = urlsplit(given)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname)
        fine = fine and (parts.port is None or parts.port > 0)
    except ValueError:
        return _no(f"{given.rpartition('@')[2][:200]!r} is no address of the web")
    if "@" in parts.netloc:
        # It would be in the log for everybody to read; nor is it repeated here.
        return _no("the URL of an adapter holds no name and password: the log would tell them")
    if not fine:
        return _no(f"{given[:200]!r} is no http or https address")
    if "?" in given or "#" in given:
        return _no(f"{given.partition('?')[0][:200]!r} has to be a folder: no `?` and no `#`")
    if not given.isascii() or " " in given:
        return _no(
            f"{given[:200]!r}: in a URL, blanks and letters beyond ASCII are written with %, "
            "such as %20"
        )
    return WebSource(url=given.rstrip("/"))


def place_of(repo: str) -> Place:
    """Where a file with this `repo` comes from: a registry's repository has neither a scheme nor a slash in
    front."""
    if repo.startswith("/"):
        return "folder"
    return "web" if "://" in repo else "registry"


def told_by(repo: str) -> str:
    """Who said of a file how long it is and what its sha256 is, before the words for that."""
    return "the registry published" if place_of(repo) == "registry" else "when it was added it had"


def choose(where: str, names: Iterable[str]) -> Refusal | None:
    """Why the files called `names` make no adapter that is taken; None: weights and configuration are there.

    `where` is what a person calls the place. Paths below it are named and not taken.

    1 both are there   2 weights in several parts   3 pickles   4 in a folder below   5 something is missing
    """
    known = set(names)
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if name not in known]
    if not missing:  # 1
        return None
    if ADAPTER_WEIGHTS in missing:
        if SHARD_INDEX in known or any(_SHARD.fullmatch(name) for name in known):  # 2
            return _none(
                f"the weights of {where} are in several parts; engines load {ADAPTER_WEIGHTS} alone"
            )
        pickle = next((name for name in PICKLES if name in known), None)
        if pickle is not None:  # 3
            return _none(
                f"{where} has its weights as a pickle ({pickle}), which may run code; convert them to "
                f"{ADAPTER_WEIGHTS}"
            )
    below = sorted(
        name for name in known if name.endswith((f"/{ADAPTER_CONFIG}", f"/{ADAPTER_WEIGHTS}"))
    )
    if below:  # 4
        return _none(
            f"{where} has no {missing[0]} in its top folder, where alone it is looked for; there is "
            f"{below[0][:200]}"
        )
    return _none(f"{where} has no {' and no '.join(missing)}")  # 5


def sum_of_contents(config_sha256: str, weights_sha256: str) -> str:
    """The commit of a folder: other contents are another commit, so their files get other keys."""
    said = f"{config_sha256} {ADAPTER_CONFIG}\n{weights_sha256} {ADAPTER_WEIGHTS}\n"
    return hashlib.sha256(said.encode()).hexdigest()[:COMMIT_DIGITS]


def sum_of_web(config_sha256: str, stamp: str) -> str:
    """The commit of a URL: its configuration's contents and what its server says of the weights (`stamp`)."""
    return config_sha256[: COMMIT_DIGITS - _STAMP_DIGITS] + stamp


def stamp_of(etag: str, last_modified: str, size: int) -> str:
    """What a server says of a file's version, in a few digits: its ETag, else when it changed, and its size.

    Weak and strong tags count alike: some servers make one of the other for a part of the file.
    """
    version = etag.strip().removeprefix("W/") or last_modified.strip()
    return hashlib.sha256(f"{version}\n{size}".encode()).hexdigest()[:_STAMP_DIGITS]


def stamp_in(commit: str) -> str:
    """The stamp that `sum_of_web` was given."""
    return commit[COMMIT_DIGITS - _STAMP_DIGITS : COMMIT_DIGITS]


def _no(sentence: str) -> Refusal:
    return Refusal(code=INVALID, sentence=sentence)


def _none(sentence: str) -> Refusal:
    return Refusal(code=NOT_AN_ADAPTER, sentence=sentence)
