"""What reading an adapter's source yields, whatever kind of place that is, and why it may yield nothing."""

from msgspec import Struct


class Found(Struct, frozen=True, kw_only=True):
    """The configuration's bytes, and what is known of the weights; `sha256` empty: nobody published one.

    `repo` and `commit` go into the keys of the files.
    """

    repo: str
    commit: str
    config: bytes
    weights_bytes: int
    weights_sha256: str = ""


class Unreadable(Exception):
    """The source gives no adapter. `code` is of schemas/codes.py, `sentence` for a person."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
