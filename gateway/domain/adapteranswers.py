"""Says what a client is told when its adapter cannot be served now, and when to come back.

Pure: values of gateway/domain/answers.py. It must not decide where a request goes (adapters.py).
"""

from datetime import datetime

from gateway.domain.adaptertable import AdapterEntry
from gateway.domain.answers import Answer, answer
from schemas.adapter import Adapter
from schemas.model import Model


def not_served_now(
    entry: AdapterEntry, base: Model | None, name: str, now: datetime
) -> Answer | None:
    """The answer for an adapter that no replica may be asked for; None: it may.

    1. refused by the catalog, with its reason: for a client that is a name nobody serves
    2. its base is gone, or loads none
    3. its files are on their way: said at once, for no replica could do anything about it
    """
    adapter = entry.adapter
    if adapter.phase == "refused":  # 1
        return _unknown(f"The adapter {name!r} cannot be served: {_for_clients(adapter)}")
    if base is None:  # 2
        return _unknown(f"The adapter {name!r} has no base model {adapter.base!r} any more.")
    if base.max_loaded_adapters <= 0:
        return _unknown(
            f"The adapter {name!r} cannot be served: its base model {base.name!r} loads no adapters."
        )
    if adapter.phase != "ready":  # 3
        doing = "is being read" if adapter.phase == "reading" else "is being fetched"
        return answer(
            "model_loading",
            f"The adapter {name!r} {doing}; try again later.",
            retry_s=(now - adapter.since).total_seconds() / 4,
            param="model",
        )
    return None


def _for_clients(adapter: Adapter) -> str:
    """The catalog's reason without folders of the control plane's machine, which are nobody's affair outside."""
    reason = adapter.reason or adapter.code or "no reason was given"
    folder = adapter.source.rstrip("/")
    return reason.replace(folder, "its folder") if folder.startswith("/") else reason


def _unknown(message: str) -> Answer:
    return answer("model_not_found", message, param="model")


def loads_none_yet(base: str) -> Answer:
    """Its base runs, and none of those replicas was started to load adapters."""
    return answer(
        "model_loading",
        f"The model {base!r} runs, but none of its replicas loads adapters yet; try again later.",
        param="model",
    )


def at_fault(name: str, sentence: str) -> Answer:
    """Every engine would refuse it: the request can never be served as it is."""
    return answer(
        "invalid_request", f"The adapter {name!r} cannot be loaded: {sentence}", param="model"
    )


def not_loaded(name: str, sentence: str, *, until: datetime | None, now: datetime) -> Answer:
    """Each replica that was asked failed to load it; `until` is when the first may be tried again."""
    return answer(
        "start_failed",
        f"The adapter {name!r} could not be loaded: {sentence}",
        retry_s=None if until is None else (until - now).total_seconds(),
    )


def no_place(name: str, waited_s: float, why: str = "") -> Answer:
    """There was no place in any replica for as long as a request may wait; `why` is what the last one asked said, if
    it is another reason than that every place is in use."""
    return answer(
        "no_capacity",
        f"The adapter {name!r} waited {waited_s:.0f} s for a place: {why or 'every one is in use'}.",
        retry_s=waited_s / 4,
    )


def nobody_answers(name: str) -> Answer:
    """It is loaded nowhere that this gateway knows of, and no agent could be asked to load it."""
    return answer(
        "yard_unavailable",
        f"The adapter {name!r} is not known to be loaded and no agent can be asked to load it now; "
        "try again shortly.",
    )
