"""A card's base URL as sentences: every name has one, and none of them leads past the list of paths."""

from urllib.parse import quote

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.domain.cards import CardRef
from gateway.domain.names import LONGEST_KEPT, place_of
from gateway.domain.places import BY_ID, ENGINE_PATHS, INFERENCE

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
PIECES = st.sampled_from(
    [
        "/",
        "//",
        "cards",
        "local",
        "gpu0",
        "v1",
        "chat",
        "completions",
        "models",
        "sleep",
        "slots",
        "..",
        ".",
        "%2F",
        "%2e",
        "%00",
        "%73lots",
        "%FF",
        "%",
        "~",
        ";",
        "embeddings",
        "responses",
        "resp_1",
        "cancel",
        "engines",
        "tokenize",
        "m",
        "é",
    ]
)
PATHS = st.lists(PIECES, max_size=14).map("".join)


@settings(deadline=None, max_examples=100)
@given(node=NAMES, card=NAMES, path=st.sampled_from(INFERENCE))
@example(node="a/b", card="../../slots", path=INFERENCE[0])
@example(node="n" * LONGEST_KEPT, card="c", path=INFERENCE[0])
def test_scn_b7_every_card_has_a_base_url_and_it_spells_that_card(
    node: str, card: str, path: str
) -> None:
    base = f"/cards/{quote(node, safe='')}/{quote(card, safe='')}"
    for _ in range(2):  # read, and remembered
        place = place_of("POST", base + path)
        assert (place.kind, place.path, place.on) == (
            "inference",
            path,
            CardRef(node=node, card=card),
        )
    listed = place_of("GET", f"{base}/v1/models")
    assert (listed.kind, listed.on) == ("models", CardRef(node=node, card=card))


@settings(deadline=None, max_examples=200)
@given(path=PATHS, below=st.booleans(), method=st.sampled_from(["GET", "POST"]))
def test_inv_2_whatever_is_typed_an_engine_is_asked_for_a_path_of_the_table(
    path: str, below: bool, method: str
) -> None:
    asked = f"/cards/local/gpu0/{path}" if below else f"/{path}"
    place = place_of(method, asked)
    if place.kind == "inference":
        assert place.path in BY_ID or place.path in ENGINE_PATHS
        sent = place.target or place.path
        assert asked.removesuffix("/").endswith(sent)
        plain = asked.removesuffix("/") == sent
        assert (place.on is not None or place.model != "") == (not plain)
    else:
        assert not place.path
    if place.on is not None:
        assert place.kind in ("inference", "models", "model")
        assert asked.startswith("/cards/")
