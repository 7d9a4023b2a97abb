"""Says where a file may be had and in which order: live mirrors of the yard first, then where it comes from."""

from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from msgspec import Struct

from controlplane.domain.adaptersources import place_of
from controlplane.domain.work import Fetch
from controlplane.mirror.domain.answers import Origin


class Source(Struct, frozen=True, kw_only=True):
    """One address of a file; of one in a folder of this machine the folder alone. `token` goes to the host of `url` only; `place` names the server for people.

    Never put one in a log line or a repr that leaves the process: it holds the token.
    """

    url: str
    origin: Origin
    place: str
    token: str = ""
    endpoint: str = ""
    """The registry's own address; a mirror has none."""


def host_of(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what has to be the same for a token to be sent along."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def registry_url(endpoint: str, repo: str, commit: str, path: str) -> str:
    """`endpoint/repo/resolve/commit/path`, each part encoded."""
    return (
        f"{endpoint.rstrip('/')}/{quote(repo, safe='/')}/resolve/{quote(commit, safe='')}"
        f"/{quote(path, safe='/')}"
    )


def sources_of(
    task: Fetch,
    *,
    mirrors: Mapping[str, str],
    mirror_token: str,
    endpoint: str,
    registry_token: str | None,
) -> tuple[Source, ...]:
    """The sources of `task`. `mirrors` gives the URLs of the live ones by name; others are left out. A token goes
    to the registry alone, never to an adapter's URL."""
    others = [
        Source(
            url=f"{mirrors[name].rstrip('/')}/mirror/files/{task.key}",
            origin="mirror",
            place=f"mirror {name}",
            token=mirror_token,
        )
        for name in task.others
        if mirrors.get(name)
    ]
    place = place_of(task.repo)
    if place == "folder":
        return (*others, Source(url=task.repo, origin="folder", place=f"the folder {task.repo}"))
    if place == "web":
        url = f"{task.repo}/{quote(task.path)}"
        return (*others, Source(url=url, origin="web", place=urlsplit(url).netloc))
    registry = Source(
        url=registry_url(endpoint, task.repo, task.commit, task.path),
        origin="registry",
        place=urlsplit(endpoint).hostname or endpoint,
        token=registry_token or "",
        endpoint=endpoint,
    )
    return (*others, registry)
