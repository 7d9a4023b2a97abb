"""What the control plane's OpenAPI document says is what it answers: held against each other, and by schemathesis.

Every answer that any test of the API gets through `controlplanes.api` is held against the document too.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from controlplane.api_guard import OPEN_ON_LOOPBACK
from controlplane.api_refusals import EVERYWHERE
from schemas.api import ErrorBody, ErrorDetail
from tests.fuzz.api import controlplane, fuzz
from tests.support.aio import run
from tests.support.controlplanes import described
from tests.support.openapi import Described, Undescribed, examples


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, item in described().document["paths"].items()
        for method, operation in item.items()
    ]


def test_the_document_is_openapi_3_1() -> None:
    document = described().document
    assert document["openapi"].startswith("3.1.")
    assert [e.message for e in OPENAPI_31_VALIDATOR.iter_errors(document)] == []


def test_every_operation_tells_every_refusal_in_the_one_body_there_is() -> None:
    for method, path, operation in operations():
        found = operation["responses"]
        for case in EVERYWHERE:
            assert case.code in found[str(case.status)]["content"]["application/json"]["examples"]
        for status, response in found.items():
            assert response["description"], (method, path, status)
            if int(status) >= 400 and (path, status) != ("/readyz", "503"):
                assert list(response["content"]) == ["application/json"]
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (method, path, status)
        assert ("404" in found) == ("{" in path or path in ("/v1/place", "/v1/plan"))
        assert operation.get("security") == (
            [{}, {"token": []}] if path in OPEN_ON_LOOPBACK else None
        )
    assert described().document["security"] == [{"token": []}]


def test_every_example_is_one() -> None:
    found = examples(described().document)
    assert len(found) > 200
    for where, schema, value in found:
        described().validate(schema, value, where)


@pytest.mark.parametrize(
    ("status", "kind", "body", "why"),
    [
        (200, "application/json", {"data": [], "applied_seq": 1}, ""),
        (200, "application/json", {"data": []}, "applied_seq"),
        (200, "text/plain", None, "text/plain"),
        (418, "application/json", {}, "are described"),
        (401, "application/json", {"detail": "no"}, "error"),
        (401, "application/json", "unauthorized", ""),
        (401, "application/json", "not_found", "have an example"),
    ],
)
def test_an_answer_the_document_does_not_allow_is_found(
    status: int, kind: str, body: Any, why: str
) -> None:
    if isinstance(body, str):
        body = json.loads(msgspec.json.encode(ErrorBody(error=ErrorDetail(code=body, sentence=""))))
    content = None if body is None else json.dumps(body).encode()
    if not why:
        described().check("GET", "/v1/models", status, {"content-type": kind}, content)
        return
    with pytest.raises(Undescribed, match=why):
        described().check("GET", "/v1/models", status, {"content-type": kind}, content)


def test_a_path_with_an_id_is_told_from_a_list() -> None:
    found: Described = described()
    assert found.operation("GET", "/v1/models")["operationId"] == "list_models"  # type: ignore[index]
    assert found.operation("GET", "/v1/cards/n/cpu")["operationId"] == "show_cards"  # type: ignore[index]
    assert found.operation("POST", "/v1/models") is None
    assert found.operation("GET", "/v1/nothing") is None


@pytest.mark.timeout(
    180
)  # seconds on a quiet machine; it works on one processor, and so does the door
def test_whatever_is_asked_the_answer_is_one_of_those_described(tmp_path: Path) -> None:
    # All states are asked for in the same way: three kinds are enough here, `make fuzz-api` asks for all.
    some = r"/v1/(models|keys|cards|usage|doctor|plan|place|registry)|/(healthz|readyz|metrics)"

    async def story() -> None:
        status, said = await fuzz(
            controlplane,
            tmp_path,
            *("--include-path-regex", some, "--phases", "coverage,fuzzing", "--max-examples", "3"),
        )
        assert status == 0, said
        assert " passed" in said, said

    run(story(), 150)
