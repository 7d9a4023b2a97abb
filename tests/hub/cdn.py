"""The other host, where the bytes are: it knows addresses that the hub signed, and refuses the hub's tokens.

Refusing them is what such stores do (two authorizations), and it shows a reader that leaks its token.
"""

from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.wire import Answered, Exchange

if TYPE_CHECKING:
    from tests.hub.server import Hub


class CdnExchange(Exchange):
    """One request for a file's bytes: `/OWNER/NAME/COMMIT/PATH?signature=…`."""

    where = "cdn"

    @property
    def hub(self) -> "Hub":
        return self.server.hub

    def answer(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.lstrip("/").split("/")]
        if len(parts) < 4:
            self.reply(404, "no such address")
            return
        owner, name, commit, path = parts[0], parts[1], parts[2], "/".join(parts[3:])
        self.subject = f"{owner}/{name}/{path}"
        if "Authorization" in self.headers:
            self.reply(400, "Only one auth mechanism allowed")
            return
        signature = parse_qs(url.query).get("signature", [""])[0]
        if signature != self.hub.signature(f"{owner}/{name}", commit, path):
            self.reply(403, "Access denied: this address has expired or was not signed by the hub")
            return
        try:
            fault = self.fault("cdn", path)
        except Answered:
            return
        repo = self.hub.shelf.find(f"{owner}/{name}")
        entry = None if repo is None else repo.commits.get(commit, {}).get(path)
        if entry is None:
            self.reply(404, "no such bytes")
            return
        self.send_file(entry.content, entry.content.sha256, fault, {})
