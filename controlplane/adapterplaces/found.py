"""What reading an adapter's source yields, whatever kind of place that is, and why it may yield nothing."""

from msgspec import Struct

from controlplane.domain.adapterconfig import CONFIG_BYTES
from controlplane.domain.filesets import ADAPTER_CONFIG
from schemas.codes import NOT_AN_ADAPTER


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


def check_config(raw: bytes, where: str) -> None:
    """Raises Unreadable unless the configuration read at `where` has the length of one."""
    if not 0 < len(raw) <= CONFIG_BYTES:
        what = "is empty" if not raw else f"has more than {CONFIG_BYTES} bytes"
        raise Unreadable(NOT_AN_ADAPTER, f"{where}/{ADAPTER_CONFIG} {what}")
