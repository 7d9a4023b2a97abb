"""Demand as sentences: nobody waits without somebody having been asked, or being told in time."""

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.demand import Asked, GiveUp, Hold, Send, decide, is_pending, is_refused
from gateway.domain.table import ActivationEntry
from tests.support.gateway_world import NOW, an_activation

NO_DECISION_S = 5.0
RESEND_S = 2.0

PHASES = ["wanted", "placing", "waiting", "loading", "ready", "refused", "idle", None]


@st.composite
def entries(draw: st.DrawFn) -> ActivationEntry:
    phase = draw(st.sampled_from(PHASES))
    retry_s = draw(st.sampled_from([-10, 0, 10, 100]))
    activation = None
    if phase is not None:
        activation = an_activation(
            phase,
            code="start_failed" if phase == "refused" else None,
            retry_at=NOW + timedelta(seconds=retry_s) if phase == "refused" else None,
        )
    return ActivationEntry(activation=activation, rev=draw(st.integers(0, 3)), seq=5)


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(
        st.tuples(
            entries(),
            st.sampled_from([0.1, 1.0, 2.0, 4.9, 31.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_whoever_waits_is_asked_for_or_answered_in_time(
    steps: list[tuple[ActivationEntry, float, bool]],
) -> None:
    """Walks through phases and time; somebody waits all along, and a new one as soon as he was answered."""
    now_s = 100.0
    asked: Asked | None = None
    oldest_s = now_s
    sent: set[tuple[int, str]] = set()
    for entry, step_s, reached in steps:
        now_s += step_s
        now = NOW + timedelta(seconds=now_s - 100.0)
        refused = is_refused(entry, now)
        while True:
            found = decide(
                entry,
                asked,
                model="m",
                scope="any",
                oldest_joined_s=oldest_s,
                refused=refused,
                reached=reached,
                now_s=now_s,
                now=now,
                resend_s=RESEND_S,
                no_decision_s=NO_DECISION_S,
            )
            match found:
                case Send(message_id=message_id, asked=remembered):
                    assert not is_pending(entry), "never while it is decided"
                    assert not refused, "never against a standing refusal"
                    assert reached, "never for a model that is ready"
                    assert remembered.rev == entry.rev, "a wish names the revision that was seen"
                    sent.add((entry.rev, message_id))
                    asked = remembered
                    continue
                case GiveUp(joined_until_s=until_s):
                    assert oldest_s <= until_s, "giving up takes at least one out"
                    assert now_s - until_s >= NO_DECISION_S, "and nobody before his time"
                    oldest_s = now_s
                    continue
                case Hold(until_s=None):
                    assert is_pending(entry) or refused, "without a timer only when it is decided"
                case Hold(until_s=at_s):
                    assert at_s is not None
                    assert now_s < at_s <= now_s + NO_DECISION_S, "looked at again in time"
            asked = found.asked
            break
    # However often it was repeated: one message for each revision and window.
    windows = {m.rsplit("-", 1)[1] for _, m in sent}
    assert len(sent) <= 4 * len(windows)
