"""What a mirror tells nodes over HTTP: the files of a set, each by its content.

`GET /mirror/sets/<key>` (the key of the set's first file) answers a Manifest; `GET /mirror/files/<key>` the
bytes, with Range, ETag = the sha256 and If-Range. Both want `Authorization: Bearer <mirror token>`.
"""

from msgspec import Struct


class ManifestFile(Struct, frozen=True, kw_only=True):
    """`name` is the last element of its path: what the file is called on disk beside its shards."""

    key: str
    name: str
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """Every file of a set, in order of shards; only told once all of them are present."""

    key: str
    files: tuple[ManifestFile, ...]
