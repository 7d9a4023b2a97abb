"""Groups a repository's files into sets that each make one model, and chooses the set that was asked for.

It reads names alone: what is in the files is the header's affair. A set with a missing shard is still a
set, so that a person sees it; choosing it is refused, before a byte is downloaded.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from controlplane.domain.repo import Repo, RepoFile
from schemas.codes import AMBIGUOUS, NO_GGUF, NO_SUCH_FILE, SHARD_MISSING
from schemas.job import FileSet

DEFAULT_QUANT: Final = "Q4_K_M"
"""What is taken when neither a quant nor a file is asked for."""

NAMES_SHOWN: Final = 40
"""At most so many sets are named in a sentence: one that lists hundreds is not read, and fills the log."""

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
"""The two files of a LoRA adapter, by the names that engines look for in a folder."""

_SIDE_PARTS: Final = ("mmproj", "imatrix")
"""A vision projector, an importance matrix: left out wherever the path says so, however it goes on."""

_SIDE_WORDS: Final = frozenset({"mtp", "draft", "drafter", "eagle3"})
"""Files of speculative decoding, left out where the path has the whole word."""

_SHARD: Final = re.compile(
    r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_QUANT: Final = (
    r"(?:(?:UD|I1)[-_])?"
    r"(?:(?:I?Q|TQ)\d(?:_(?:\d|K|KS|KSS|KT|KL|NL|XXS|XS|S|M|L|XL|XXL|R\d))*"
    r"|(?:MXFP\d|NVFP4)(?:_MOE)?|BF16|F16|F32|F64|FP16|FP32|FP8|FP4|INT8|INT4)"
)
_TOKEN: Final = re.compile(
    rf"(?<![A-Za-z0-9])(?P<quant>{_QUANT})(?![A-Za-z0-9])|[^\W_]+", re.IGNORECASE
)
"""One word of a path: a quantisation's whole name, its `_` and its `UD-` included, or letters and digits."""

_PREFIX: Final = re.compile(r"(?:UD|I1)-", re.ASCII)
_SUFFIX: Final = re.compile(r"[-_. ](?:gguf|ggml|i1)", re.ASCII | re.IGNORECASE)


class Refusal(Struct, frozen=True, kw_only=True):
    """Why no set, or no adapter, can be taken: a code of schemas/codes.py and the sentence a person reads."""

    code: str
    sentence: str


def group(repo: Repo) -> tuple[FileSet, ...]:
    """Every set of `repo`, by name. Names are unique: a path without `.gguf` and without the shard's number.

    A split model and a joined copy of it beside each other would share one name: then each of the two is
    named by the whole path of its first file instead (as is a set whose name is another one's path).
    """
    shards: defaultdict[tuple[str, int], list[RepoFile]] = defaultdict(list)
    for file in _models(repo):
        shards[_place(file.path)].append(file)
    names = Counter(_set_name(first) for first, _ in shards)
    names.update(first for first, _ in shards)
    found = [
        FileSet(
            name=name if names[name] == 1 else first,
            first=first,
            quant=_quant_of(name),
            shards=count,
            bytes=sum(file.bytes for file in files),
            published=sum(file.sha256 is not None for file in files),
        )
        for (first, count), files in shards.items()
        for name in (_set_name(first),)
    ]
    return tuple(sorted(found, key=lambda one: one.name))


def pick(repo: Repo, *, quant: str | None, file: str | None) -> FileSet | Refusal:
    """The set that was asked for; with neither given, the one of DEFAULT_QUANT.

    1. No set at all: NO_GGUF.
    2. `file` is a set's name or the path of any of its files, exactly; `quant` is then not looked at.
    3. Else `quant` as a whole word, in any case. A name that has exactly it comes before one that has it
       behind a prefix (`UD-Q4_K_XL` for `Q4_K_XL`). What a file's own name says comes before its folders.
       A word that is no quantisation's name may stand anywhere in the path.
    4. None: NO_SUCH_FILE. Several that are not copies of one thing: AMBIGUOUS.
    5. Of copies the complete one, then the fewest shards, then the first by path.
    6. One whose shards are not all there: SHARD_MISSING.
    """
    sets = group(repo)
    if not sets:
        return Refusal(
            code=NO_GGUF,
            sentence=f"{repo.id} has no GGUF files; the nodes run llama.cpp, which needs one",
        )
    if file is not None:
        candidates = [one for one in sets if file == one.name]
        candidates = candidates or [one for one in sets if file in paths_of(one)]
        wanted = file
    else:
        wanted = DEFAULT_QUANT if quant is None else quant.strip()
        candidates = _having(sets, wanted)
    if not candidates:
        return Refusal(
            code=NO_SUCH_FILE,
            sentence=f'{repo.id} has no file matching "{wanted}"; it has: {_named(sets)}',
        )
    kinds = {(one.quant, _model_of(one)) for one in candidates}
    if file is None and len(kinds) > 1:
        return Refusal(
            code=AMBIGUOUS,
            sentence=f'{repo.id} has several files matching "{wanted}": {_named(candidates)}; '
            "name one of them with --file",
        )
    chosen = min(candidates, key=lambda one: (bool(missing(repo, one)), one.shards, one.first))
    absent = missing(repo, chosen)
    if absent:
        return Refusal(
            code=SHARD_MISSING,
            sentence=f"{repo.id} lacks {len(absent)} of the {chosen.shards} shards of "
            f"{chosen.name}, among them {absent[0]}",
        )
    return chosen


def files_of(repo: Repo, file_set: FileSet) -> tuple[RepoFile, ...]:
    """The files of `file_set` that `repo` has, in order of shards: all of them for a set that was picked."""
    known = {file.path: file for file in _models(repo)}
    return tuple(known[path] for path in paths_of(file_set) if path in known)


def missing(repo: Repo, file_set: FileSet) -> tuple[str, ...]:
    """The paths of the set's shards that `repo` does not have, in order."""
    known = {file.path for file in repo.files}
    return tuple(path for path in paths_of(file_set) if path not in known)


def paths_of(file_set: FileSet) -> tuple[str, ...]:
    """The paths of all its files in order of shards, from the first one's path and their count alone."""
    found = _shard(file_set.first)
    if found is None:
        return (file_set.first,)
    return tuple(_shard_path(found, index) for index in range(1, file_set.shards + 1))


def paths_from(first: str) -> tuple[str, ...]:
    """The paths of the set whose first file has this path, told from it alone: a model's shards, or an adapter's
    weights and the configuration beside them. Any other file is a set of one."""
    folder, _, name = first.rpartition("/")
    if name == ADAPTER_WEIGHTS:
        return (first, f"{folder}/{ADAPTER_CONFIG}" if folder else ADAPTER_CONFIG)
    place, shards = _place(first)
    if place != first:
        return (first,)
    return paths_of(FileSet(name="", first=first, shards=shards, bytes=0))


def file_key(repo_id: str, commit: str, path: str) -> str:
    """What names the file in the log before its first byte is there: sha256, in hex, of `repo@commit/path`."""
    return hashlib.sha256(f"{repo_id}@{commit}/{path}".encode()).hexdigest()


def suggest_name(repo_id: str) -> str:
    """The model's name when none was asked for, from the registry's own spelling of the repository.

    The part behind the owner, in lower case, without what only says how it is packed (`-GGUF`, `-i1-GGUF`).
    """
    name = repo_id.rpartition("/")[2].strip()
    found = re.fullmatch(rf"(.+?)(?:{_SUFFIX.pattern})*", name, re.IGNORECASE | re.DOTALL)
    return (found[1] if found else name).lower()


def _models(repo: Repo) -> list[RepoFile]:
    """The GGUF files that are models themselves, each path once.

    A model whose own name has such a word (`Some-7B-MTP`, its heads built in) is no side file of itself, so
    the repository's name is not looked at where a path repeats it. In a repository so named that has
    nothing else, those files are what a person who names it wants; saying that it has no GGUF files would
    be false.
    """
    by_path = {file.path: file for file in sorted(repo.files, key=_file_order, reverse=True)}
    weights = [
        file
        for path, file in sorted(by_path.items())
        if path.lower().endswith(".gguf") and not any(part in path.lower() for part in _SIDE_PARTS)
    ]
    own = suggest_name(repo.id)
    main = [file for file in weights if not _SIDE_WORDS & _words(_without(own, file.path))]
    return main or (weights if _SIDE_WORDS & _words(own) else main)


def _without(own: str, path: str) -> str:
    return path.lower().replace(own, " ") if _SIDE_WORDS & _words(own) else path


def _file_order(file: RepoFile) -> tuple[str, int, str]:
    return file.path, file.bytes, file.sha256 or ""


def _words(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", path.lower()))


def _shard(path: str) -> re.Match[str] | None:
    """The parts of a shard's path. A number that no shard can have (`-00004-of-00003`, `-00000-of-…`) is
    part of an ordinary name.
    """
    found = _SHARD.fullmatch(path)
    return found if found and 1 <= int(found["index"]) <= int(found["count"]) else None


def _place(path: str) -> tuple[str, int]:
    """The path of the set's first file, and how many files it has."""
    found = _shard(path)
    return (path, 1) if found is None else (_shard_path(found, 1), int(found["count"]))


def _shard_path(found: re.Match[str], index: int) -> str:
    # The separators are taken from the path itself: `-OF-` and `.GGUF` stay as they are written.
    path = found.string
    at = found.start("index")
    return f"{path[:at]}{index:05d}{path[found.end('index') :]}"


def _set_name(first: str) -> str:
    found = _shard(first)
    return (first[: -len(".gguf")] if found is None else found["stem"]) or first


def _quants(text: str) -> list[str]:
    return [_spelled(found["quant"]) for found in _TOKEN.finditer(text) if found["quant"]]


def _spelled(quant: str) -> str:
    return re.sub(r"^(UD|I1)[-_]", r"\1-", quant.upper())


def _quant_of(name: str) -> str:
    """The last one in the file's name, else in the nearest folder that has one; empty: none known."""
    for part in reversed(name.split("/")):
        found = _quants(part)
        if found:
            return found[-1]
    return ""


def _tokens(text: str) -> list[str]:
    return [
        _spelled(found["quant"]) if found["quant"] else found[0].upper()
        for found in _TOKEN.finditer(text)
    ]


def _having(sets: Iterable[FileSet], wanted: str) -> list[FileSet]:
    """The sets that `wanted` means (3 of pick), all of one rank."""
    asked = _tokens(wanted)
    if not asked:
        return []
    if len(asked) == 1 and _quants(wanted):
        exact = [one for one in sets if one.quant == asked[0]]
        return exact or [one for one in sets if _PREFIX.sub("", one.quant, count=1) == asked[0]]
    return [one for one in sets if _within(asked, _tokens(one.name))]


def _within(asked: list[str], tokens: list[str]) -> bool:
    size = len(asked)
    return any(tokens[at : at + size] == asked for at in range(len(tokens) - size + 1))


def _model_of(file_set: FileSet) -> tuple[str, ...]:
    """What the file's own name says besides the quantisation: two copies of one model agree in it."""
    last = _set_name(file_set.first).rpartition("/")[2]
    return tuple(token for token in _tokens(last) if token != file_set.quant)


def _named(sets: Iterable[FileSet]) -> str:
    names = [one.name for one in sets]
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
