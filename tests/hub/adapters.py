"""Makes the files of an adapter's repository: weights in LFS, its configuration outside, as peft pushes them."""

import json
from typing import Any

from tests.hub.contents import Content, Held
from tests.hub.repos import Entry
from tests.support import lora


def adapter(
    marker: str, *, rank: int = 8, padding: int = 0, **more: Any
) -> dict[str, Content | Entry]:
    """The files of one that answers as `marker`; `more` are fields of its configuration.

    hub.repo("owner/name").commit(adapter("polite", base="owner/base"))
    """
    config = json.dumps(lora.config_of(rank=rank, **more), indent=2).encode()
    weights = lora.weights_of(marker, rank=rank, padding=padding)
    return {
        lora.WEIGHTS: Held(weights),
        lora.CONFIG: Entry(content=Held(config), lfs=False),
        "README.md": Entry(content=Held(b"# An adapter\n"), lfs=False),
    }
