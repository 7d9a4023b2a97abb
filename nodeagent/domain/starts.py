"""Decides how often a loading engine is asked whether it is ready, and when it took too long.

Pure arithmetic on ages in seconds; the asking itself and the clock belong to the supervisor.
"""

EAGER_S = 2.0
EAGER_PROBE_S = 0.02
PATIENT_PROBE_S = 0.25


def probe_delay_s(age_s: float) -> float:
    """Seconds until the next question. Quick engines are noticed at once; slow ones are not pestered."""
    return EAGER_PROBE_S if age_s < EAGER_S else PATIENT_PROBE_S


def overdue(silent_s: float, start_timeout_s: float) -> bool:
    """Whether a load counts as stuck: `silent_s` seconds passed since its start or its last sign of
    progress (a growing log). A timeout of 0 or less never ends a load."""
    return start_timeout_s > 0 and silent_s >= start_timeout_s
