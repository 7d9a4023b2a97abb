"""What a method and a path mean, whatever their spelling."""

import re
from pathlib import Path

import pytest

from gateway.domain.names import LONGEST_KEPT, decode_model_id, place_of
from gateway.domain.places import BY_ID, ENGINE_PATHS, INFERENCE, RESPONSE


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
        "/v1/chat/completions//",
        "/v1/chat/completions/x",
        "/v1/responses/../slots",
        "/v1/responses/a%2Fb",
        "/v1/responses/resp_1/slots",
        "/v1/messages/batches",
        "/models/load",
        "/engines",
        "/engines/",
        "/engines/m",
        "/engines/m/",
        "/engines/m/slots",
        "/engines/m/v1/models",
        "/engines/m/v1/load_lora_adapter",
        "/engines/m//v1/chat/completions",
        "/engines//v1/chat/completions",
        "/engines/a/b/v1/chat/completions",
        "/engines/m/engines/m/v1/chat/completions",
        "/engines/m/metrics",
        "/infill",
        "/pooling",
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
        assert place.kind == "models"
    elif name is None:
        assert place.kind == "bad_model_id"
    else:
        assert (place.kind, place.model) == ("model", name)


def test_a_model_is_not_deleted_through_here() -> None:
    assert place_of("DELETE", "/v1/models/m").kind == "method_not_allowed"


@pytest.mark.parametrize("path", INFERENCE)
def test_a_slash_at_the_end_of_a_path_makes_no_other_path(path: str) -> None:
    assert place_of("POST", f"{path}/") == place_of("POST", path)
    assert place_of("GET", f"{path}/").kind == "method_not_allowed"
    assert place_of("POST", f"{path}//").kind in ("route_not_forwarded", "not_found")


def test_lists_of_models_are_where_clients_look_for_them() -> None:
    for path in ("/v1/models", "/v1/models/", "/models", "/models/"):
        for method in ("GET", "HEAD"):
            assert place_of(method, path).kind == "models"
        assert place_of("POST", path).kind == "method_not_allowed"
    assert place_of("GET", "/v1/models/org/m/").model == "org/m"


def test_a_response_is_asked_for_by_its_id() -> None:
    place = place_of("GET", "/v1/responses/resp_0123-aB")
    assert (place.kind, place.path, place.response) == ("inference", RESPONSE, "resp_0123-aB")
    assert place.target == "/v1/responses/resp_0123-aB"
    assert place_of("DELETE", "/v1/responses/resp_1/").path == RESPONSE
    assert place_of("POST", "/v1/responses/resp_1/cancel").response == "resp_1"
    refused = place_of("POST", "/v1/responses/resp_1")
    assert (refused.kind, refused.allow) == ("method_not_allowed", "GET, DELETE")
    assert place_of("HEAD", "/v1/responses/resp_1").kind == "method_not_allowed"
    # An endpoint of its own, whatever it looks like.
    assert place_of("POST", "/v1/responses/input_tokens").response == ""


@pytest.mark.parametrize("path", ENGINE_PATHS)
def test_below_a_models_engine_there_is_every_inference_path_and_its_name(path: str) -> None:
    for base in ("/engines/org%2Fm", "/cards/n/gpu0/engines/org%2Fm"):
        place = place_of("POST", base + path)
        assert (place.kind, place.model, place.path) == ("inference", "org/m", path)
        assert (place.on is not None) == base.startswith("/cards/")
        assert place_of("GET", base + path).kind == "method_not_allowed"
    assert place_of("POST", f"/engines/%FF{path}").kind == "bad_model_id"
    long = "m" * LONGEST_KEPT
    assert place_of("POST", f"/engines/{long}{path}").model == long


def test_errors_at_and_below_messages_are_anthropics() -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        for method in ("POST", "GET"):
            for base in ("", "/cards/n/gpu0", "/engines/m"):
                assert place_of(method, base + path).envelope == "anthropic", (method, base + path)
    for path in ("/v1/messagesx", "/v1/chat/completions", "/messages"):
        assert place_of("POST", path).envelope == "openai"


def test_inv_2_what_an_engine_is_sent_stands_in_a_table() -> None:
    for path in (*ENGINE_PATHS, *BY_ID):
        first = path.strip("/").split("/")
        assert not {"slots", "metrics", "sleep", "props"} & set(first)


def test_the_page_about_endpoints_names_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "endpoints.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(/[a-z0-9_/-]+)`", page))
    # Those below an engine's address alone stand there with it.
    for path in ENGINE_PATHS:
        assert path in named or f"`POST /engines/<model>{path}`" in page, path
