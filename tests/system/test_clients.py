"""What users of the openai and anthropic packages and of curl get from a gateway, every endpoint and every refusal."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.domain.answers import CODES
from gateway.domain.places import BY_ID, INFERENCE
from tests.clients import with_anthropic, with_openai
from tests.clients.asking import ask_all, complaints, table
from tests.clients.calls import ELSEWHERE, ON_SCRIPTED, RESPONSES
from tests.clients.judging import Reply, wrong
from tests.clients.steps import complaints as complaints_of_steps
from tests.clients.with_curl import Curl
from tests.clients.yard import clients_yard, spend
from tests.support.aio import run


# What openai says of its own translations.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
@pytest.mark.timeout(120)
def test_users_of_the_packages_and_of_curl_get_what_the_tables_say(tmp_path: Path) -> None:
    async def story() -> None:
        files = tmp_path / "files"
        files.mkdir()
        async with clients_yard(tmp_path / "yard") as yard:
            await spend(yard)
            asked, *taken = await asyncio.gather(
                ask_all(Curl(yard, files), yard),
                asyncio.to_thread(with_openai.run, yard),
                asyncio.to_thread(with_anthropic.run, yard),
            )
        found = [
            *complaints(asked),
            *(why for steps in taken for why in complaints_of_steps(steps)),
        ]
        assert not found, "\n".join(found)

    run(story(), 110)


def test_no_endpoint_and_no_code_is_missing_among_the_calls() -> None:
    calls = [call for _, call in table()]
    asked = {call.path for call in calls}
    by_id = {call.path for call in RESPONSES}
    assert asked >= {*INFERENCE}
    assert by_id == {*BY_ID}
    codes = {call.code for call in calls} - {""}
    assert not codes & ELSEWHERE.keys()
    assert codes | ELSEWHERE.keys() == {*CODES}


def test_a_wrong_answer_is_called_wrong() -> None:
    call = msgspec.structs.replace(ON_SCRIPTED[0], status=503, code="model_off", has=("x",))
    body = '{"error": {"message": "m", "code": "model_loading"}}'
    found = wrong(call, Reply(status=200, headers={}, text=body))
    assert [why.split(":")[0] for why in found] == [
        "status 200, not 503",
        "code 'model_loading', not 'model_off'",
        "no 'x'",
        "no header x-request-id",
        "no header x-yard-replica",
    ]
