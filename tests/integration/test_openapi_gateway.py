"""What the gateway's OpenAPI document says is what it answers: made of its tables, served by it, asked by schemathesis.

Every answer that any test gets through `gateway_yard.Yard.client` is held against the document too.
"""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from gateway.adapterdesk import HOW
from gateway.domain import names
from gateway.domain.answers import CODES
from gateway.domain.cors import answer_headers
from gateway.domain.envelopes import anthropic_type, envelope
from gateway.domain.names import place_of
from gateway.domain.openapi import document
from gateway.domain.openapi_parts import HEADERS
from gateway.domain.openapi_refusals import CODES_OF
from gateway.domain.places import BY_ID, ENDPOINTS, envelope_of
from gateway.domain.requestshapes import SHAPES
from schemas.key import KeyCreated
from tests.fuzz.api import fuzz, gateway
from tests.support.aio import run
from tests.support.gateway_keys import a_key
from tests.support.gateway_yard import described, memory_yard
from tests.support.openapi import examples

METHODS = ("get", "post", "delete")


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, item[method])
        for path, item in described().document["paths"].items()
        for method in METHODS
        if method in item
    ]


def test_the_document_is_openapi_3_1_and_names_each_operation_once() -> None:
    found = described().document
    assert [e.message for e in OPENAPI_31_VALIDATOR.iter_errors(found)] == []
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids) > 50


def test_it_has_every_place_and_no_other() -> None:
    wanted = {("get", path) for path in names._OWN} | {("get", "/v1/models/{model}")}
    for endpoint in ENDPOINTS:
        wanted.add(("post", f"/engines/{{model}}{endpoint.path}"))
        if endpoint.own:
            wanted.add(("post", endpoint.path))
    for path, methods in BY_ID.items():
        for method in methods:
            wanted |= {(method.lower(), path), (method.lower(), f"/engines/{{model}}{path}")}
    assert {(method, path) for method, path, _ in operations()} == wanted
    assert set(SHAPES) == {*(e.path for e in ENDPOINTS), *BY_ID}
    for method, path, _ in operations():
        spelled = path.replace("{model}", "m").replace("{id}", "resp_1")
        assert place_of(method.upper(), spelled).kind not in ("method_not_allowed", "not_found")


def test_every_code_stands_at_its_status_in_the_form_of_its_place() -> None:
    assert {code for group in CODES_OF.values() for code in group} == set(CODES)
    for _, path, operation in operations():
        inner = path.removeprefix("/engines/{model}")
        form = "AnthropicError" if envelope_of(inner) == "anthropic" else "ErrorBody"
        for status, reference in operation["responses"].items():
            response = described().resolved(reference)
            assert response is not None
            assert response["description"]
            if status[0] in "45" and "XX" not in status and (path, status) != ("/readyz", "503"):
                media = response["content"]["application/json"]
                assert f'schemas/{form}"' in json.dumps(media["schema"]), (path, status)
                for code in media["examples"]:
                    assert (
                        code not in CODES
                        or CODES[code].status == int(status)
                        or status
                        in (
                            "417",
                            "431",
                            "505",
                        )
                    )


def test_every_example_is_one() -> None:
    found = examples(described().document)
    assert len(found) > 100
    for where, schema, value in found:
        described().validate(schema, value, where)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413, 429, 500, 503, 504, 529])
def test_errors_of_both_forms_are_those_described(status: int) -> None:
    for form, name in (("openai", "ErrorBody"), ("anthropic", "AnthropicError")):
        body = json.loads(envelope(form, "id").body(status, "a_code", "A sentence."))
        described().validate({"$ref": f"#/components/schemas/{name}"}, body, name)
    types = described().document["components"]["schemas"]["AnthropicError"]["properties"]["error"]
    assert anthropic_type(status) in types["properties"]["type"]["enum"]


def test_headers_are_those_a_page_may_read_and_their_words_those_there_are() -> None:
    exposed = dict(answer_headers(b"http://a.example", ["*"]))[b"access-control-expose-headers"]
    pages = set(exposed.decode().split(", "))
    assert pages == {n for n in HEADERS if n.startswith(("x-", "request-id", "retry-after"))}
    assert HEADERS["x-yard-adapter"]["schema"]["enum"] == list(get_args(HOW))


def test_it_is_served_to_everybody(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            key = a_key()
            await yard.put("key", (key.id,), KeyCreated(by="anna"), key)
            running = await yard.gateway()
            async with yard.client(running) as client:
                assert (await client.get("/v1/models")).status_code == 401
                answer = await client.get("/openapi.json")
                assert answer.status_code == 200
                assert answer.headers["content-type"] == "application/json"
                served = answer.json()
                assert served == json.loads(json.dumps(document(served["info"]["version"])))
                head = await client.head("/openapi.json/")
                assert (head.status_code, head.content) == (200, b"")
                refused = await client.post("/openapi.json")
                assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
                assert (await client.get("/cards/n1/gpu0/openapi.json")).status_code == 404

    run(story())


@pytest.mark.timeout(
    180
)  # seconds on a quiet machine; it works on one processor, and so does the door
def test_whatever_is_asked_the_answer_is_one_of_those_described(tmp_path: Path) -> None:
    # Endpoints that are passed on alike are represented by some; `make fuzz-api` asks for all.
    some = (
        r"^/v1/(chat/completions|messages|responses/\{id\}|audio/transcriptions|models.*)$"
        r"|^/(tokenize|healthz|readyz|metrics|openapi.json|yard/timeline)$"
        r"|^/engines/\{model\}/(v1/rerank|v1/images/edits)$"
    )

    async def story() -> None:
        status, said = await fuzz(
            gateway,
            tmp_path,
            *("--include-path-regex", some, "--phases", "coverage,fuzzing", "--max-examples", "4"),
        )
        assert status == 0, said
        assert " passed" in said, said

    run(story(), 150)
