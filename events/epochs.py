"""Decides whether an event was written by somebody who had already been replaced.

Pure and incremental: one `Epochs` per reader, shown every event in stream order. An agent's events carry
the epoch of its node (the sequence of its `node.started`), the control plane's carry its leader's term.
It only judges; what to do with a stale event is the follower's affair.
"""

from events.log import Recorded
from schemas.messages import NOUNS

CONTROL_SOURCE = "/cp/"
"""How the source of every control plane begins."""


class Epochs:
    """What one reader knows of epochs so far.

    1 `node.started` begins epoch = its own sequence, whatever it carries itself.
    2 A later event of that node with a smaller epoch is stale. A reader that does not follow `node`
      knows the epoch from the events it does follow.
    3 A control noun's event with a smaller epoch than the last one on its subject is stale.
      `leader.elected` is exempt: it begins a term, its own sequence, and its expectation guards it.
    4 A tombstone that the control plane wrote for an agent's subject (a removed node) carries a term
      and is not measured against the node.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._subjects: dict[str, int] = {}

    def is_stale(self, item: Recorded) -> bool:
        """Whether `item` is stale by what was shown before; shows nothing itself."""
        spec = NOUNS.get(item.noun)
        if spec is None:
            return False
        if spec.writer == "control":
            known = self._subjects.get(item.subject, 0)
            return item.type != "leader.elected" and item.epoch < known  # 3
        if item.type == "node.started" or _ended_by_control(item):  # 1, 4
            return False
        known = self._nodes.get(item.key[0], 0)
        # Stored before that epoch began: the state an earlier run left, not a late write.
        return item.seq > known and item.epoch < known  # 2

    def show(self, item: Recorded) -> None:
        """Takes note of a valid event."""
        spec = NOUNS.get(item.noun)
        if spec is None:
            return
        if spec.writer == "control":
            if item.type.endswith(".deleted"):
                self._subjects.pop(item.subject, None)
            elif item.epoch > 0:
                self._subjects[item.subject] = item.epoch
            return
        if _ended_by_control(item):
            return
        epoch = item.seq if item.type == "node.started" else item.epoch
        if epoch > self._nodes.get(item.key[0], 0):
            self._nodes[item.key[0]] = epoch

    def forget(self) -> None:
        """The history was replaced."""
        self._nodes.clear()
        self._subjects.clear()


def _ended_by_control(item: Recorded) -> bool:
    return item.type.endswith(".deleted") and item.source.startswith(CONTROL_SOURCE)
