"""What a path below a card's base URL means, whatever its spelling."""

import pytest

from gateway.domain.cards import CardRef
from gateway.domain.names import MANAGEMENT, place_of
from gateway.domain.places import INFERENCE


def on(node: str, card: str) -> CardRef:
    return CardRef(node=node, card=card)


@pytest.mark.parametrize("path", INFERENCE)
def test_req_d2_each_card_has_a_base_url_of_its_own(path: str) -> None:
    place = place_of("POST", f"/cards/local/gpu0{path}")
    assert (place.kind, place.path, place.on) == ("inference", path, on("local", "gpu0"))
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        refused = place_of(method, f"/cards/local/gpu0{path}")
        assert (refused.kind, refused.allow) == ("method_not_allowed", "POST")
    # Without one no card is named, and the path is the same.
    plain = place_of("POST", path)
    assert (plain.kind, plain.path, plain.on) == ("inference", path, None)


def test_a_card_has_a_model_list_of_its_own() -> None:
    place = place_of("GET", "/cards/local/gpu0/v1/models")
    assert (place.kind, place.on) == ("models", on("local", "gpu0"))
    place = place_of("HEAD", "/cards/local/gpu0/v1/models/org%2Fmodel")
    assert (place.kind, place.model, place.on) == ("model", "org/model", on("local", "gpu0"))
    assert place_of("GET", "/cards/local/gpu0/v1/models/%FF").kind == "bad_model_id"
    assert place_of("DELETE", "/cards/local/gpu0/v1/models/m").kind == "method_not_allowed"
    assert place_of("POST", "/cards/local/gpu0/v1/models").kind == "method_not_allowed"


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("gpu0", "gpu0"),
        ("gpu%30", "gpu0"),
        ("a%2Fb", "a/b"),
        ("a%2fb", "a/b"),
        ("a.b:c", "a.b:c"),
        ("my%20card", "my card"),
        ("a+b", "a+b"),
        ("a~b", "a~b"),
        ("%252F", "%2F"),
        ("%E6%A8%A1", "模"),
        ("..", ".."),
        ("%2e%2e", ".."),
        ("*", "*"),
        ("%3E", ">"),
        ("%00", "\0"),
    ],
)
def test_scn_b7_a_node_and_a_card_are_one_segment_each_decoded_once(raw: str, name: str) -> None:
    assert place_of("POST", f"/cards/{raw}/c/v1/completions").on == on(name, "c")
    assert place_of("POST", f"/cards/n/{raw}/v1/completions").on == on("n", name)
    assert place_of("GET", f"/cards/{raw}/{raw}/v1/models").on == on(name, name)


def test_a_name_that_is_no_utf_8_is_told_so() -> None:
    assert place_of("POST", "/cards/%FF/gpu0/v1/completions").kind == "bad_card_name"
    assert place_of("GET", "/cards/n/%C3/v1/models").kind == "bad_card_name"


@pytest.mark.parametrize(
    "inner",
    [
        *(f"/{name}" for name in sorted(MANAGEMENT - {"models"})),
        "/v1",
        "/v1/",
        "/models/load",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/files",
        "/v1//chat/completions",
        "/v1/chat/completions//",
        "/v1/%63hat/completions",
        "/v1/../slots",
        "//slots",
        "/slots/0",
        "/SLEEP",
        "//v1/chat/completions",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_inv_2_management_routes_are_not_forwarded_below_a_card_either(
    inner: str, method: str
) -> None:
    place = place_of(method, f"/cards/local/gpu0{inner}")
    assert place.kind == "route_not_forwarded"
    assert not place.path


@pytest.mark.parametrize(
    "path",
    [
        "/cards",
        "/cards/",
        "/cards/local",
        "/cards/local/gpu0",
        "/cards/local/gpu0/",
        "/cards//gpu0/v1/chat/completions",
        "/cards/local//v1/chat/completions",
        "/cards/local/v1/chat/completions",
        "/cards/local/gpu0/chat/completions",
        "/cards/local/gpu0/%76%31/chat/completions",
        "/cards/local/gpu0%2Fv1/chat/completions",
        "/cards/local/gpu0/%73lots",
        "/cards/local/gpu0/cards/local/gpu0/v1/chat/completions",
        "/cards/local/gpu0/healthz",
        "/cards/local/gpu0/readyz",
        "/cards/local/gpu0/metrics",
        "/cards/local/gpu0/yard/timeline",
        "/CARDS/local/gpu0/v1/chat/completions",
        "//cards/local/gpu0/v1/chat/completions",
        "/cards%2Flocal/gpu0/v1/chat/completions",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_anything_else_below_cards_is_not_there(path: str, method: str) -> None:
    place = place_of(method, path)
    assert place.kind == "not_found"
    assert not place.path


def test_only_a_path_engines_may_be_asked_is_ever_an_inference_path() -> None:
    """Whatever stands before it: what goes to an engine is one of a table, never the client's text."""
    for path in (*INFERENCE, *(f"/cards/a%2F..%2Fslots/b{p}" for p in INFERENCE)):
        assert place_of("POST", path).path in INFERENCE


def test_a_preflight_below_a_card_is_answered() -> None:
    assert place_of("OPTIONS", "/cards/local/gpu0/v1/chat/completions").kind == "preflight"
