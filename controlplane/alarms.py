"""Holds the faults an operator must know of, one sentence per code, until they are over.

Raising one logs it once; readiness and doctor read them. It never acts on them.
"""

import logging

log = logging.getLogger(__name__)


class Alarms:
    """Present alarms by code."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}

    def up(self, code: str, sentence: str) -> None:
        """Raises the alarm, or replaces its sentence."""
        if code not in self._present:
            log.error("alarm", extra={"code": code, "sentence": sentence})
        self._present[code] = sentence

    def down(self, *codes: str) -> None:
        for code in codes:
            if self._present.pop(code, None) is not None:
                log.info("alarm over", extra={"code": code})

    def present(self) -> dict[str, str]:
        return dict(self._present)
