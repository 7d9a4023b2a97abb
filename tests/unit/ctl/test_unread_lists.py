"""What a newer version wrote is in every list of yardctl, and named when it is asked for; nothing breaks on it."""

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from controlplane.ctl import adapterreads, cardreads, keyreads, reads, serving
from controlplane.ctl.connect import Api
from controlplane.ctl.failures import CtlError
from tests.support.aio import run

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOUNS = {
    "models": "model",
    "adapters": "adapter",
    "replicas": "replica",
    "slots": "slots",
    "nodes": "node",
    "cards": "card",
    "activations": "activation",
    "jobs": "job",
    "files": "file",
    "keys": "key",
}
Work = Callable[[Api], Awaitable[None]]

LISTS: dict[str, Callable[[Api, str], Awaitable[None]]] = {
    "models": reads.list_models,
    "adapters": lambda api, output: adapterreads.list_adapters(api, output, NOW),
    "replicas": lambda api, output: reads.list_replicas(api, output, NOW, False),
    "nodes": lambda api, output: reads.list_nodes(api, output, NOW),
    "cards": cardreads.list_cards,
    "jobs": lambda api, output: serving.list_jobs(api, output, NOW),
    "files": lambda api, output: serving.list_files(api, output, NOW),
    "keys": lambda api, output: keyreads.list_keys(api, output, NOW),
}


def unread(kind: str) -> dict[str, Any]:
    noun = NOUNS[kind]
    event = {
        "subject": f"yard.evt.{noun}.x",
        "seq": 9,
        "type": f"{noun}.changed",
        "problem": f"version 9 of {noun}",
    }
    return {"name": "x", "event": event}


def answer(request: httpx.Request) -> httpx.Response:
    """A yard in which everything was written by a newer version."""
    path = request.url.path
    if path == "/v1/doctor":
        return httpx.Response(200, json={"log_seq": 1, "leader": None, "findings": []})
    kind = path.removeprefix("/v1/")
    if kind in NOUNS:
        body = {"data": [], "unread": [unread(kind)], "applied_seq": 9}
        return httpx.Response(200, json=body)
    error = {"code": "upgrade_required", "sentence": "x was written by a newer version"}
    return httpx.Response(409, json={"error": error})


def said(work: Work, capsys: pytest.CaptureFixture[str]) -> str:
    async def story() -> None:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            await work(Api(client, "http://yard"))

    run(story())
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", sorted(LISTS))
def test_a_list_names_what_a_newer_version_wrote(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    noun = NOUNS[kind]
    table = said(lambda api: LISTS[kind](api, "table"), capsys)
    assert table == (
        f"{noun} x: written by a newer version (version 9 of {noun}), which this control plane cannot read\n"
    )
    assert json.loads(said(lambda api: LISTS[kind](api, "json"), capsys)) == [unread(kind)]


def test_leases_name_the_cards_nobody_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(lambda api: cardreads.list_leases(api, "table", NOW), capsys).startswith("card x: ")


def test_the_status_names_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    told = said(lambda api: reads.show_status(api, "table", NOW), capsys)
    for noun in ("node", "card", "model", "replica", "activation", "adapter"):
        assert f"{noun} x: written by a newer version" in told
    assert "none has registered" not in told
    found = json.loads(said(lambda api: reads.show_status(api, "json", NOW), capsys))
    assert found["models"] == [unread("models")]


@pytest.mark.parametrize(
    "work",
    [
        lambda api: reads.show_model(api, "x", "table"),
        lambda api: reads.show_one(api, "replicas", "x", "table"),
        lambda api: adapterreads.show_adapter(api, "x", "table", NOW),
        lambda api: adapterreads.list_adapters(api, "table", NOW, "x"),
        lambda api: keyreads.show_key(api, "x", "table", NOW),
        lambda api: serving.show_job(api, "x", "table"),
        lambda api: serving.show_file(api, "x", "table"),
    ],
)
def test_one_that_is_asked_for_is_said_to_be_there(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CtlError, match=r"x\b.* written by a newer version"):
        said(work, capsys)


def test_one_with_an_earlier_state_is_shown_so_and_said_to_be_old(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"name": "m", "event": {"subject": "yard.evt.model.m", "problem": "version 9 of model"}}

    async def story() -> None:
        transport = httpx.MockTransport(
            lambda request: httpx.Response(
                200, json={"data": [row] if request.url.path == "/v1/models" else []}
            )
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            await reads.list_models(Api(client, "http://yard"), "table")

    run(story())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["m", "off"]
    assert lines[2] == (
        "model m: shown as it was before its last event, which this control plane cannot read (version 9 of model)"
    )
