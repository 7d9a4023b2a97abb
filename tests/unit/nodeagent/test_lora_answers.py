"""What vLLM's adapter routes answer, word for word, and what each answer means: every dialect has its cases here."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.drivers import lora_answers
from nodeagent.drivers.driver import AdapterDone, AdapterFault
from nodeagent.drivers.lora_answers import FOLDER, TABLES, TEXT_LENGTH, Call, Dialect, read
from schemas import codes
from schemas.slots import Whose

NAME = "sql@0123abcd"
PATH = "/srv/yard/files/sets/" + "c" * 64


def flat(status: int, kind: str, message: str) -> bytes:
    """The envelope of older Python front ends."""
    told = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return json.dumps(told).encode()


def nested(status: int, kind: str, message: str) -> bytes:
    """The envelope of newer Python front ends, as 0.32 was measured."""
    told = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": told}).encode()


def rust(status: int, message: str, param: str | None = None, code: str = "") -> bytes:
    """The envelope of the Rust front end: its codes are words."""
    kind = "server_error" if status == 500 else "invalid_request_error"
    told = {"message": message, "type": kind, "param": param, "code": code or kind}
    return json.dumps({"error": told}).encode()


def judged(status: int, body: bytes, call: Call = "load") -> AdapterDone | AdapterFault:
    return lora_answers.judged(status, body, call=call, name=NAME, paths=(PATH,))


def fault(status: int, body: bytes, call: Call = "load") -> AdapterFault:
    found = judged(status, body, call)
    assert isinstance(found, AdapterFault), found
    return found


def blame(found: AdapterFault) -> tuple[Whose, str, bool]:
    return found.whose, found.code, found.known


ALREADY = "The lora adapter 'sql@0123abcd' has already been loaded."
IN_PLACE = f"{ALREADY} If you want to load the adapter in place, set 'load_inplace' to True."
IN_PLACE_RUST = f"{ALREADY} If you want to load the adapter in place, set 'load_inplace' to true."
IN_PLACE_NEWER = (
    "LoRA adapter `sql@0123abcd` is already loaded. "
    "If you want to load the adapter in place, set 'load_inplace' to true."
)
WORKER = (
    "Call to add_lora method failed: Worker failed with error '{}', "
    "please check the stack trace above for the root cause"
)


@pytest.mark.parametrize("call", ["load", "unload"])
@pytest.mark.parametrize(
    "body", [b"Success: LoRA adapter 'sql@0123abcd' added successfully.", b"", b'{"odd": 1}']
)
def test_req_b48_only_200_is_success_whatever_its_text(call: Call, body: bytes) -> None:
    assert judged(200, body, call) == AdapterDone()
    for status in (201, 202, 204, 301):
        assert isinstance(judged(status, body, call), AdapterFault)


@pytest.mark.parametrize(
    "body",
    [
        flat(400, "InvalidUserInput", ALREADY),
        flat(400, "InvalidUserInput", IN_PLACE),
        nested(400, "InvalidUserInput", ALREADY),
        nested(400, "InvalidUserInput", IN_PLACE),
        nested(400, "InvalidUserInput", IN_PLACE.upper()),
        rust(400, IN_PLACE_RUST, "lora_name"),
        rust(400, IN_PLACE_NEWER, "lora_name"),
    ],
)
def test_req_b52_already_loaded_is_done_in_both_envelopes_and_spellings(body: bytes) -> None:
    assert judged(400, body) == AdapterDone(already=True)


ABSENT = "The lora adapter 'sql@0123abcd' cannot be found."


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, flat(404, "NotFoundError", ABSENT)),
        (400, flat(400, "InvalidUserInput", ABSENT)),
        (404, nested(404, "NotFoundError", ABSENT)),
        (
            404,
            rust(404, "The model `sql@0123abcd` does not exist.", "model", "model_not_found"),
        ),
        (404, nested(404, "NotFoundError", "The model `sql@0123abcd` does not exist.")),
    ],
)
def test_req_b49_an_unload_of_what_is_not_there_is_done(status: int, body: bytes) -> None:
    assert judged(status, body, "unload") == AdapterDone(already=True)


@pytest.mark.parametrize("call", ["load", "unload"])
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"detail":"Not Found"}'),
        (404, b""),
        (404, b"404 page not found"),
        (404, nested(404, "Not Found", "Not Found")),
        (404, b"Cannot POST /v1/unload_lora_adapter"),
        (405, b'{"detail":"Method Not Allowed"}'),
        (501, b""),
        (400, rust(400, "engine was not started with LoRA enabled")),
        (500, nested(500, "InternalServerError", WORKER.format("LoRA is not enabled."))),
    ],
)
def test_req_bugb7_routes_that_are_off_are_told_apart_from_an_adapter_that_is_not_there(
    call: Call, status: int, body: bytes
) -> None:
    assert blame(fault(status, body, call)) == ("replica", codes.ROUTE_OFF, True)


def test_routes_that_are_off_are_told_in_a_sentence_and_not_as_not_found() -> None:
    found = fault(404, b'{"detail":"Not Found"}', "load")
    assert found.text == f"{lora_answers.NO_ROUTES}: Not Found"


WORKER_SAYS = [
    ("LoRA rank 64 is greater than max_lora_rank 16.", codes.RANK_TOO_HIGH),
    ("vLLM only supports modules_to_save being None.", codes.UNSUPPORTED_ADAPTER),
    ("vLLM does not yet support DoRA.", codes.UNSUPPORTED_ADAPTER),
    ("Adapter bias is not supported.", codes.UNSUPPORTED_ADAPTER),
    (
        "Missing required configuration fields: {'lora_alpha', 'target_modules'}",
        codes.NOT_AN_ADAPTER,
    ),
    (
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight "
        "is unsupported LoRA weight",
        codes.UNSUPPORTED_ADAPTER,
    ),
    (
        f"While loading {PATH}, expected target modules in ['q_proj', 'v_proj'] "
        "but received ['lm_head']. Please verify that the loaded LoRA module is correct",
        codes.UNSUPPORTED_ADAPTER,
    ),
    (
        "LoRA added vocab size 512 is greater than lora_extra_vocab_size 256.",
        codes.UNSUPPORTED_ADAPTER,
    ),
]


@pytest.mark.parametrize(("said", "code"), WORKER_SAYS)
@pytest.mark.parametrize(
    ("status", "envelope"),
    [
        (400, lambda text: flat(400, "BadRequestError", text)),
        (500, lambda text: flat(500, "InternalServerError", WORKER.format(text))),
        (400, lambda text: nested(400, "BadRequestError", text)),
        (500, lambda text: nested(500, "InternalServerError", WORKER.format(text))),
        (500, lambda text: rust(500, f"failed to load LoRA adapter '{NAME}': {text}")),
    ],
)
def test_req_bugb6_what_the_engine_says_of_an_adapter_counts_whatever_the_status(
    status: int, envelope: Any, said: str, code: str
) -> None:
    found = fault(status, envelope(said))
    assert blame(found) == ("adapter", code, True)
    assert said.replace(PATH, FOLDER)[:60] in found.text


@pytest.mark.parametrize("status", [401, 403, 408, 415, 422, 429, 502, 503, 504])
@pytest.mark.parametrize("call", ["load", "unload"])
def test_req_b58_a_4xx_about_keys_limits_or_the_request_is_the_replica_s(
    status: int, call: Call
) -> None:
    for body in (b'{"error":"Unauthorized"}', b"", nested(status, "Whatever", "Slow down")):
        assert blame(fault(status, body, call)) == ("replica", codes.LOAD_FAILED, True)


NOT_THERE = f"No adapter found for {PATH}"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, nested(404, "NotFoundError", f"Loading lora {NAME} failed: {NOT_THERE}")),
        (
            404,
            nested(
                404,
                "NotFoundError",
                f"Call to add_lora method failed: Loading lora {NAME} failed: {NOT_THERE}",
            ),
        ),
        (404, flat(404, "NotFoundError", f"Loading lora {NAME} failed: {NOT_THERE}")),
        (500, rust(500, f"failed to load LoRA adapter '{NAME}': {NOT_THERE}")),
        (400, rust(400, "Local LoRA adapter path must exist and be accessible.", "lora_path")),
    ],
)
def test_files_that_are_not_where_the_node_said_are_the_replica_s(status: int, body: bytes) -> None:
    assert blame(fault(status, body)) == ("replica", codes.FILES_MISSING, True)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (
            400,
            "Local LoRA adapter paths require VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES "
            "to be configured.",
        ),
        (
            400,
            "Local LoRA adapter paths must be absolute and under one of the prefixes configured "
            "by VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES.",
        ),
        (400, "Local LoRA adapter path is outside the configured allowed prefixes."),
        (
            500,
            "configured VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES path prefix must exist and be "
            "accessible",
        ),
        (500, "Runtime LoRA path policy is unavailable; check the server configuration."),
        (400, "lora_name must not be empty"),
        (400, "lora_path must not be empty"),
        (400, "Both 'lora_name' and 'lora_path' must be provided."),
        (500, "LoRA state differs across engine ranks; restart the engine"),
    ],
)
def test_what_rust_says_of_its_own_settings_is_the_replica_s(status: int, text: str) -> None:
    assert blame(fault(status, rust(status, text))) == ("replica", codes.LOAD_FAILED, True)


@pytest.mark.parametrize("envelope", [flat, nested])
@pytest.mark.parametrize(
    ("call", "status", "text"),
    [
        ("load", 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("unload", 400, "either 'lora_name' and 'lora_int_id' needs to be provided."),
        ("unload", 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        ("unload", 500, f"Failed to remove lora adapter '{NAME}' from the engine."),
        ("load", 500, WORKER.format("No free lora slots")),
        ("load", 500, WORKER.format("CUDA out of memory. Tried to allocate 2.00 GiB")),
    ],
)
def test_what_python_says_of_itself_is_the_replica_s(
    envelope: Any, call: Call, status: int, text: str
) -> None:
    kind = "InvalidUserInput" if status == 400 else "InternalServerError"
    found = fault(status, envelope(status, kind, text), call)
    assert blame(found) == ("replica", codes.LOAD_FAILED, True)


@pytest.mark.parametrize(
    ("text", "status", "known"),
    [
        ("'lora_name' needs to be provided to unload a LoRA adapter.", 400, True),
        (
            f"The requested lora_int_id 3 does not match loaded adapter '{NAME}' with id 4.",
            400,
            True,
        ),
        (f"failed to unload LoRA adapter '{NAME}' with id 4", 500, False),
    ],
)
def test_an_unload_that_rust_refuses_is_no_success(text: str, status: int, known: bool) -> None:
    found = fault(status, rust(status, text, "lora_int_id"), "unload")
    assert blame(found) == ("replica", codes.LOAD_FAILED, known)


@pytest.mark.parametrize(
    "body",
    [
        flat(400, "BadRequestError", f"The lora adapter '{NAME}' conflicts with a served base model."),
        nested(400, "BadRequestError", f"The lora adapter '{NAME}' conflicts with a served base model."),
        rust(400, f"The lora adapter name '{NAME}' conflicts with a served base model.", "lora_name"),
        rust(400, f"LoRA adapter `{NAME}` conflicts with a served base model", "lora_name"),
    ],
)  # fmt: skip
def test_a_name_that_is_the_base_s_is_refused_everywhere(body: bytes) -> None:
    assert blame(fault(400, body)) == ("adapter", codes.LOAD_REFUSED, True)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, rust(500, f"failed to load LoRA adapter '{NAME}': engine rejected the adapter")),
        (500, rust(500, f"one or more engine ranks rejected LoRA adapter `{NAME}`")),
        (500, nested(500, "InternalServerError", "EngineCore encountered an issue.")),
        (500, flat(500, "InternalServerError", "something new")),
        (500, b"Internal Server Error"),
        (400, nested(400, "BadRequestError", "something new")),
        (404, nested(404, "NotFoundError", f"no LoRA {NAME}, sorry")),
        (418, b"<html>short and stout</html>"),
    ],
)
def test_req_bugb6_what_nobody_knows_is_the_replica_s_until_another_says_the_same(
    status: int, body: bytes
) -> None:
    assert blame(fault(status, body)) == ("replica", codes.LOAD_FAILED, False)


def test_an_answer_means_something_only_for_the_call_it_belongs_to() -> None:
    assert isinstance(judged(404, nested(404, "NotFoundError", ABSENT), "load"), AdapterFault)
    loaded = nested(400, "InvalidUserInput", ALREADY)
    assert isinstance(judged(400, loaded, "unload"), AdapterFault)
    # The status belongs to it as well.
    assert isinstance(judged(500, nested(500, "InvalidUserInput", ALREADY)), AdapterFault)
    # And where the envelope is the old one, its type.
    assert isinstance(judged(400, flat(400, "BadRequestError", ALREADY)), AdapterFault)


@pytest.mark.parametrize("envelope", [flat, nested, lambda status, _, text: rust(status, text)])
@pytest.mark.parametrize(
    "name",
    [
        "has already been loaded@0123abcd",
        "is already loaded@0123abcd",
        "greater than max_lora_rank@0123abcd",
        "expected target modules in@0123abcd",
        "no adapter found@0123abcd",
        "lora is not enabled@0123abcd",
    ],
)
def test_whoever_names_an_adapter_does_not_choose_what_an_answer_means(
    envelope: Any, name: str
) -> None:
    body = envelope(500, "InvalidUserInput", f"Loading '{name}' failed: odd")
    found = lora_answers.judged(500, body, call="load", name=name, paths=(PATH,))
    assert isinstance(found, AdapterFault)
    assert blame(found) == ("replica", codes.LOAD_FAILED, False)
    body = envelope(400, "InvalidUserInput", f"Loading '{name}' failed: odd")
    assert isinstance(lora_answers.judged(400, body, call="load", name=name), AdapterFault)
    body = envelope(404, "X", "Not Found")
    off = lora_answers.judged(404, body, call="unload", name="adapter@0123abcd")
    assert isinstance(off, AdapterFault)
    assert off.code == codes.ROUTE_OFF


def test_a_short_name_does_not_break_the_words_around_it() -> None:
    body = nested(400, "InvalidUserInput", "The lora adapter 'a' has already been loaded.")
    assert lora_answers.judged(400, body, call="load", name="a") == AdapterDone(already=True)


def test_two_replicas_that_say_the_same_are_heard_to_say_the_same() -> None:
    def said(folder: str) -> str:
        text = f"While loading {folder}: odd   \n tensor in {folder}/adapter_model.safetensors"
        body = nested(500, "InternalServerError", text)
        found = lora_answers.judged(500, body, call="load", name=NAME, paths=(folder,))
        assert isinstance(found, AdapterFault)
        return found.text

    one = said("/srv/one/files/sets/" + "c" * 64)
    assert one == said("/home/two/yard/files/sets/" + "d" * 64)
    assert one == f"While loading {FOLDER}: odd tensor in {FOLDER}/adapter_model.safetensors"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (nested(500, "X", "inner"), "inner"),
        (flat(500, "X", "outer"), "outer"),
        (b'{"detail":"why"}', "why"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b"  plain words \n", "plain words"),
        (b'{"error":{"code":500}}', '{"error":{"code":500}}'),
        (b'{"error":{"message":"cut of', '{"error":{"message":"cut of'),
        (b"\xff\xfe", "��"),
        (b"", "it answered 500 without a word"),
        (b"[]", "[]"),
    ],
)
def test_req_b57_the_engine_s_own_words_are_told(body: bytes, text: str) -> None:
    assert fault(500, body).text == text


def test_its_words_are_bounded_and_on_one_line() -> None:
    found = fault(500, nested(500, "X", "word\n" * 1000))
    assert len(found.text) == TEXT_LENGTH
    assert found.text.endswith("…")
    assert "\n" not in found.text


@pytest.mark.parametrize(
    ("body", "dialect"),
    [
        (flat(400, "InvalidUserInput", "x"), "flat"),
        (nested(400, "InvalidUserInput", "x"), "nested"),
        (rust(400, "x"), "rust"),
        (rust(500, "x"), "rust"),
        (b'{"error":{"message":"x","type":"server_error","param":null,"code":null}}', "rust"),
        (b'{"detail":"Not Found"}', "none"),
        (b'{"detail":[{"msg":"x"}]}', "none"),
        (b"null", "none"),
        (b"[" * 5000, "none"),
        (b'{"error":' + b"9" * 5000 + b"}", "none"),
    ],
)
def test_the_dialect_is_known_by_its_envelope(body: bytes, dialect: Dialect) -> None:
    assert read(400, body).dialect == dialect


@given(
    status=st.integers(100, 599),
    body=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=20),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["error", "message", "type", "code", "detail", "object"]), inner
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    call=st.sampled_from(["load", "unload"]),
)
def test_no_answer_breaks_it_and_none_blames_an_adapter_without_a_reason(
    status: int, body: bytes, call: Call
) -> None:
    found = lora_answers.judged(status, body, call=call, name=NAME, paths=(PATH,))
    if isinstance(found, AdapterFault):
        assert found.text
        assert len(found.text) <= TEXT_LENGTH
        assert found.whose == "replica"
    else:
        assert status == 200


def test_every_row_is_written_so_that_it_can_match() -> None:
    for table in TABLES.values():
        for row in table:
            assert row.text == row.text.lower()
            assert row.type == row.type.lower()
            assert 200 not in row.statuses
