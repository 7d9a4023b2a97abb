"""What the hub answers: the listing of a repository, where a file's bytes are, and what tests steer it by.

Status, `X-Error-Code` and `X-Error-Message` are those the Hub uses, as far as readers tell cases apart by
them. `/-/…` is ours.
"""

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec

from tests.hub.contents import Held, MadeUp
from tests.hub.faults import Fault
from tests.hub.repos import Entry, Reader, Repository
from tests.hub.wire import Answered, Exchange

if TYPE_CHECKING:
    from tests.hub.server import Hub


class HubExchange(Exchange):
    """One request to the hub's own port."""

    @property
    def hub(self) -> "Hub":
        return self.server.hub

    def answer(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        try:
            match parts:
                case ["-", *rest]:
                    self._control(rest)
                case ["api", "models", owner, name]:
                    self._listing(f"{owner}/{name}", None, url.query)
                case ["api", "models", owner, name, "revision", revision]:
                    self._listing(f"{owner}/{name}", revision, url.query)
                case [owner, name, "resolve", revision, *path] if path:
                    self._resolve(f"{owner}/{name}", revision, "/".join(path))
                case _:
                    self._error(404, "", "Sorry, we can't find the page you are looking for.")
        except Answered:
            return

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message}
        if code:
            headers["X-Error-Code"] = code
        self.reply(status, {"error": message}, headers)

    def _reader(self) -> Reader | None:
        """Who asks; None: nobody known. A token that is not known ends the exchange."""
        token = self.token()
        if token is None:
            return None
        reader = self.hub.shelf.reader(token)
        if reader is None:
            self._error(401, "", "Invalid credentials in Authorization header")
            raise Answered
        return reader

    def _find(self, repo_id: str, rest: str) -> Repository:
        """The repository, when this reader may know of it; `rest` is the address behind its name."""
        reader = self._reader()
        moved = self.hub.shelf.moved(repo_id)
        repo = self.hub.shelf.find(moved or repo_id)
        hidden = repo is not None and (
            repo.private and (reader is None or repo.id not in reader.granted)
        )
        if repo is None or hidden:
            if reader is None:
                self._error(401, "RepoNotFound", "Invalid username or password.")
            else:
                self._error(404, "RepoNotFound", "Repository not found")
            raise Answered
        if moved is not None:
            prefix = "/api/models" if self.where == "api" else ""
            self.reply(307, f"Moved to {moved}", {"Location": f"{prefix}/{quote(moved)}{rest}"})
            raise Answered
        if repo.disabled:
            self._error(403, "", "Access to this resource is disabled.")
            raise Answered
        return repo

    def _revision(self, repo: Repository, revision: str) -> str:
        commit = repo.resolve(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            raise Answered
        return commit

    def _listing(self, repo_id: str, revision: str | None, query: str) -> None:
        self.where, self.subject = "api", repo_id
        behind = "" if revision is None else f"/revision/{quote(revision, safe='')}"
        behind += f"?{query}" if query else ""
        self.fault("api", repo_id)
        repo = self._find(repo_id, behind)
        commit = self._revision(repo, "main" if revision is None else revision)
        blobs = "blobs" in parse_qs(query)
        self.reply(
            200,
            {
                "_id": commit[:24],
                "id": repo.id,
                "modelId": repo.id,
                "author": repo.id.partition("/")[0],
                "sha": commit,
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "private": repo.private,
                "gated": repo.gated or False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": ["gguf"],
                "library_name": "gguf",
                "siblings": [
                    _sibling(path, entry, blobs)
                    for path, entry in sorted(repo.commits[commit].items())
                ],
            },
        )

    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        self.where, self.subject = "resolve", f"{repo_id}/{path}"
        fault = self.fault("resolve", path)
        repo = self._find(repo_id, f"/resolve/{quote(revision, safe='')}/{quote(path)}")
        commit = self._revision(repo, revision)
        entry = repo.commits[commit].get(path)
        if repo.gated is not None:
            self._gate(repo)
        if entry is None:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit}
        if not entry.lfs:
            self.send_file(entry.content, entry.blob_id, fault, headers)
            return
        sha256 = entry.content.sha256
        headers |= {
            "Accept-Ranges": "bytes",
            "ETag": f'"{sha256}"',
            "X-Linked-Size": str(entry.content.size),
            "X-Linked-ETag": f'"{sha256}"',
            "Location": self.hub.cdn_address(repo.id, commit, path),
        }
        self.reply(302, "Found. The bytes are elsewhere.", headers)

    def _gate(self, repo: Repository) -> None:
        reader = self._reader()
        if reader is None:
            self._error(
                401,
                "GatedRepo",
                f"Access to model {repo.id} is restricted. You must have access to it and be "
                "authenticated to access it. Please log in.",
            )
            raise Answered
        if repo.id not in reader.granted:
            waiting = repo.id in reader.pending
            self._error(
                403,
                "GatedRepo",
                f"Your request to access model {repo.id} is awaiting a review from the repo authors."
                if waiting
                else f"Access to model {repo.id} is restricted and you are not in the authorized "
                "list. Visit the repository's page to ask for access.",
            )
            raise Answered

    def _control(self, parts: list[str]) -> None:
        """`counts` (GET, DELETE), `faults` (POST, DELETE), `rate` (POST), `commit` (POST)."""
        self.subject = "/".join(parts)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        try:
            match self.command, parts:
                case "GET", ["counts"]:
                    self.reply(200, msgspec.to_builtins(self.hub.counters.counts()))
                    return
                case "DELETE", ["counts"]:
                    self.hub.counters.reset()
                case "POST", ["faults"]:
                    self.hub.faults.add(msgspec.json.decode(body, type=Fault))
                case "DELETE", ["faults"]:
                    self.hub.faults.clear()
                case "POST", ["rate"]:
                    self.hub.pace.set(msgspec.json.decode(body, type=SetRate).bytes_per_s)
                case "POST", ["commit"]:
                    made = msgspec.json.decode(body, type=MakeCommit)
                    self.reply(200, {"commit": _commit(self.hub, made)})
                    return
                case _:
                    self.reply(404, "no such control")
                    return
        except msgspec.MsgspecError as error:
            self.reply(400, str(error))
            return
        self.reply(204)


class SetRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes_per_s: float


class MakeCommit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adds to what main holds: `made_up` sizes in bytes by path, `text` contents by path."""

    repo: str
    made_up: dict[str, int] = {}
    text: dict[str, str] = {}
    seed: int = 0


def _commit(hub: "Hub", made: MakeCommit) -> str:
    repo = hub.shelf.find(made.repo) or hub.repo(made.repo)
    files = dict(repo.commits[repo.main]) if repo.commits else {}
    for path, size in made.made_up.items():
        files[path] = Entry(content=MadeUp(size, made.seed))
    for path, text in made.text.items():
        files[path] = Entry(content=Held(text.encode()), lfs=False)
    return repo.commit(files)


def _sibling(path: str, entry: Entry, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    told: dict[str, Any] = {
        "rfilename": path,
        "size": entry.content.size,
        "blobId": entry.blob_id,
    }
    if entry.lfs:
        told["lfs"] = {
            "sha256": entry.content.sha256,
            "size": entry.content.size,
            "pointerSize": 135,
        }
    return told
