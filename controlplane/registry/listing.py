"""Reads what a repository holds through huggingface_hub: the only file that knows that library.

The library reads its environment when it is first imported, so that is done here, in the thread of the
first question, once its environment says: no telemetry, no token but the one that is given. Its answers
are not trusted: what a listing says is checked before anybody else sees it.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS, suggest_name
from controlplane.domain.repo import Repo, RepoFile
from controlplane.registry import faults
from controlplane.registry.credentials import Token
from controlplane.registry.faults import Asked, RegistryFault

if TYPE_CHECKING:
    import httpx2

LISTING_BYTES: Final = 64 * 1024**2
"""A longer listing is refused: the largest real ones have a few MiB."""

LISTING_S: Final = 60.0
"""So long may the body of a listing take, however it drips in: its thread cannot be ended from outside."""

_ENVIRONMENT: Final = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE_BYTES: Final = 2**53
NAME_BYTES: Final = 255
"""No file system of a node keeps a longer name."""

_loading: Final = threading.Lock()
_loaded: Final = threading.Event()


class _TooLong(Exception):
    """A listing of more than LISTING_BYTES."""


class _Packed(Exception):
    """A listing that is to be unpacked first."""


def read_listing(asked: Asked, token: Token | None, timeout_s: float) -> Repo | RegistryFault:
    """The repository at the revision that was asked for. Blocks: connecting, and each wait for more bytes,
    take at most `timeout_s`. A fault is returned, not raised, so that nothing drags the library's exceptions
    (whose requests hold the token) along.
    """
    library = _load()
    api = library.HfApi(
        endpoint=asked.endpoint,
        token=False if token is None else token.reveal(),
        library_name="modelyard",
        # Packed listings could unpack to anything; LISTING_BYTES counts what comes over the wire, so one that
        # comes packed all the same is not read.
        headers={"Accept-Encoding": "identity"},
    )
    import httpx2
    from huggingface_hub import errors

    try:
        info = api.model_info(
            asked.repo, revision=asked.revision, files_metadata=True, timeout=timeout_s
        )
    except errors.HfHubHTTPError as error:
        answer = error.response
        return faults.of_answer(asked, answer.status_code, answer.headers, datetime.now(UTC))
    except errors.HFValidationError:
        return faults.no_name(asked.repo)
    except errors.OfflineModeIsEnabled:
        return faults.offline()
    except httpx2.TimeoutException:
        return faults.unreachable(asked, f"no answer within {timeout_s:g} s")
    except httpx2.TooManyRedirects:
        return faults.garbage(asked, "it sends us round in circles")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return faults.unreachable(asked, _reason(error, token))
    except _TooLong:
        return faults.garbage(asked, f"a listing of more than {LISTING_BYTES // 1024**2} MiB")
    except _Packed:
        return faults.garbage(asked, "the listing came packed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return faults.garbage(asked, "what came is no listing")
    return _checked(asked, info)


def _load() -> Any:
    """The library, imported with our environment. It has one HTTP client for the whole process: ours."""
    with _loading:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import huggingface_hub

        if not _loaded.is_set():
            huggingface_hub.set_client_factory(_client)
            _loaded.set()
        return huggingface_hub


def _client() -> "httpx2.Client":
    import httpx2
    from huggingface_hub.utils._http import hf_request_event_hook

    return httpx2.Client(
        event_hooks={"request": [hf_request_event_hook], "response": [_bound]},
        follow_redirects=True,
        max_redirects=5,
        timeout=30.0,
    )


def _bound(response: "httpx2.Response") -> None:
    """Counts the body as it comes in: nothing else keeps an endless one out of memory."""
    import httpx2

    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise _Packed
    source = response.stream
    ends_at = time.monotonic() + LISTING_S
    assert isinstance(source, httpx2.SyncByteStream)

    class Bounded(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            count = 0
            for piece in source:
                count += len(piece)
                if count > LISTING_BYTES:
                    raise _TooLong
                if time.monotonic() > ends_at:
                    raise httpx2.ReadTimeout(f"no whole listing within {LISTING_S:g} s")
                yield piece

        def close(self) -> None:
            source.close()

    response.stream = Bounded()


def _reason(error: Exception, token: Token | None) -> str:
    said = str(error) or type(error).__name__
    return said if token is None else token.hide(said)


def _checked(asked: Asked, info: Any) -> Repo | RegistryFault:
    """The listing as our own struct; a fault when it does not hold together."""
    if info.disabled:
        return faults.disabled(asked)
    if not isinstance(info.id, str) or not _NAME.fullmatch(info.id):
        return faults.garbage(asked, "the repository it tells of has no proper name")
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        return faults.garbage(asked, "it names no commit")
    if not isinstance(info.siblings, list):
        return faults.garbage(asked, "it lists no files")
    files: list[RepoFile] = []
    for told in info.siblings:
        file = _file(told)
        if file is not None:
            files.append(file)
        elif _may_be_chosen(str(told.rfilename)):
            return faults.garbage(asked, "one of its files has no proper path, size or sha256")
    return Repo(
        id=info.id,
        commit=info.sha,
        files=tuple(files),
        gated=_gate(info.gated),
        private=bool(info.private),
        suggested_name=suggest_name(info.id),
    )


def _may_be_chosen(path: str) -> bool:
    """Whether it is a model's or an adapter's: such a one that is not told properly is not passed over in silence."""
    return path.lower().endswith(".gguf") or path in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)


def _file(told: Any) -> RepoFile | None:
    """One file of the listing; None when it cannot be one that we may write to a disk."""
    lfs: Mapping[str, Any] | None = told.lfs
    path, size = told.rfilename, told.size
    if size is None and lfs is not None:
        size = lfs.get("size")
    sha256 = None if lfs is None else lfs.get("sha256")
    if sha256 is not None:
        sha256 = sha256.lower() if isinstance(sha256, str) else ""
    if not (isinstance(path, str) and _is_path(path)):
        return None
    if not (type(size) is int and 0 <= size <= _FILE_BYTES):
        return None
    if sha256 is not None and _SHA256.fullmatch(sha256) is None:
        return None
    return RepoFile(path=path, bytes=size, sha256=sha256)


def _is_path(path: str) -> bool:
    parts = path.split("/")
    return (
        path.isprintable()
        and 0 < len(path.encode()) <= 1024
        and "\\" not in path
        and all(part not in ("", ".", "..") and len(part.encode()) <= NAME_BYTES for part in parts)
    )


def _gate(told: Any) -> str | None:
    """`gated` is false or a word (`auto`, `manual`); a bare true is taken for `auto`."""
    if not told:
        return None
    return told[:32] if isinstance(told, str) else "auto"
