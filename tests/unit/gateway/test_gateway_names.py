"""What a method and a path mean, whatever their spelling."""

import pytest

from gateway.domain.names import INFERENCE, decode_model_id, place_of


@pytest.mark.parametrize("path", INFERENCE)
def test_inference_is_posted(path: str) -> None:
    assert place_of("POST", path).kind == "inference"
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        place = place_of(method, path)
        assert (place.kind, place.allow) == ("method_not_allowed", "POST")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/collective_rpc",
        "/slots",
        "/slots/0",
        "/props",
        "/invocations",
        "/lora-adapters",
        "/reset_prefix_cache",
        "/SLOTS",
        "//slots",
        "/v1",
        "/v1/",
        "/v1/files",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/../slots",
        "/completion",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_inv_2_management_routes_are_not_forwarded_in_any_spelling(path: str, method: str) -> None:
    assert place_of(method, path).kind == "route_not_forwarded"


@pytest.mark.parametrize("path", ["/", "/index.html", "/%73lots", "/favicon.ico", "*"])
def test_anything_else_is_not_there(path: str) -> None:
    assert place_of("GET", path).kind == "not_found"


@pytest.mark.parametrize("kind", ["healthz", "readyz", "metrics"])
def test_its_own_routes_are_read_only(kind: str) -> None:
    assert place_of("GET", f"/{kind}").kind == kind
    assert place_of("HEAD", f"/{kind}").kind == kind
    assert place_of("POST", f"/{kind}").kind == "method_not_allowed"


def test_a_preflight_is_answered_on_any_path() -> None:
    assert place_of("OPTIONS", "/v1/chat/completions").kind == "preflight"
    assert place_of("OPTIONS", "/whatever").kind == "preflight"


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("qwen2.5-7b", "qwen2.5-7b"),
        ("org/model", "org/model"),
        ("org%2Fmodel", "org/model"),
        ("org%2fmodel", "org/model"),
        ("m%3A7b", "m:7b"),
        ("m:7b", "m:7b"),
        ("my%20model", "my model"),
        ("%E6%A8%A1%E5%9E%8B", "模型"),
        ("%252F", "%2F"),
        ("a+b", "a+b"),
        ("%FF", None),
        ("", None),
    ],
)
def test_a_path_spells_a_model_id_once_decoded(raw: str, name: str | None) -> None:
    assert decode_model_id(raw) == name
    place = place_of("GET", f"/v1/models/{raw}")
    if raw == "":
        assert place.kind == "route_not_forwarded"
    elif name is None:
        assert place.kind == "bad_model_id"
    else:
        assert (place.kind, place.model) == ("model", name)


def test_a_model_is_not_deleted_through_here() -> None:
    assert place_of("DELETE", "/v1/models/m").kind == "method_not_allowed"
