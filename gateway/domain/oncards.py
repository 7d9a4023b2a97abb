"""Decides whether a request under a card's base URL can mean anything, and what it is told when it cannot.

Pure. It must not decide about replicas or waits (admission.py): only whether there is such a card and
whether the model may ever run on it.
"""

from gateway.domain.answers import Answer, answer
from gateway.domain.cards import CardRef, listed, serves
from gateway.domain.table import Table
from schemas.cardnames import ANY_SCOPE
from schemas.model import Model


def missing_card(table: Table, on: CardRef, *, synced: bool) -> Answer | None:
    """The answer when there is no such card; None: there is one, or no agent has reported any yet."""
    if table.card(on) is not None or not table.nodes:
        return None
    if not synced:
        return answer(
            "yard_unavailable",
            f"The card {on.card!r} of node {on.node!r} is not among those this gateway remembers, and "
            "the yard's log cannot be read now; try again shortly.",
        )
    here = [k.ref.card for k in table.cards().values() if k.ref.node == on.node]
    if here:
        text = f"The node {on.node!r} has no card {on.card!r}; it has {listed(here)}."
    else:
        text = f"There is no node {on.node!r} with a card {on.card!r} in this yard."
    return answer("card_not_found", text)


def no_card_of(scope: str) -> Answer:
    """Said to those who waited for a card that went away."""
    return answer("card_not_found", f"There is no card {scope.replace('~', '/')!r} in this yard.")


def is_served(table: Table, model: Model, scope: str) -> bool:
    """Whether the model may ever run in the scope: some profile is for that card, or no card is known."""
    if scope == ANY_SCOPE:
        return True
    known = table.cards().get(scope)
    return known is None or serves(model, known)


def not_served(model: str, scope: str) -> Answer:
    """The catalog has the model, and this card will never answer for it."""
    where = scope.replace("~", "/")
    return answer(
        "model_not_found",
        f"The model {model!r} has no profile for the card {where}.",
        param="model",
    )


def no_cards_yet(model: str, scope: str) -> Answer:
    """Nobody could be asked: which cards there are is not known."""
    where = scope.replace("~", "/")
    return answer(
        "yard_unavailable",
        f"The model {model!r} is not running and no node has told its cards yet, so nothing could be "
        f"asked of {where}; try again shortly.",
    )
