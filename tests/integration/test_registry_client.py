"""The registry's reader against a hub on real sockets: every refusal has its code and its own sentence."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.domain.filesets import pick
from controlplane.registry import listing
from controlplane.registry.client import Registry
from controlplane.registry.faults import RegistryFault
from schemas.job import FileSet
from tests.hub.faults import Fault
from tests.hub.server import Hub
from tests.support.aio import run
from tests.support.registries import (
    BIG,
    PATH,
    SECRET,
    fault_of_head,
    fault_of_repo,
    fill,
    host,
    registry,
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def test_a_listing_has_paths_sizes_sums_and_the_commit(hub: Hub) -> None:
    commit = fill(hub, "owner/Model-GGUF")

    async def story() -> None:
        async with registry(hub) as asked:
            repo = await asked.repo("owner/Model-GGUF")
        assert (repo.id, repo.commit, repo.gated, repo.private) == (
            "owner/Model-GGUF",
            commit,
            None,
            False,
        )
        by_path = {file.path: file for file in repo.files}
        assert (by_path[PATH].bytes, by_path[PATH].sha256) == (BIG.size, BIG.sha256)
        # No sha256 is published for a file outside LFS.
        assert (by_path["README.md"].bytes, by_path["README.md"].sha256) == (10, None)
        assert isinstance(pick(repo, quant=None, file=None), FileSet)

    run(story())


def test_req_c20_the_suggested_name_comes_from_the_canonical_id(hub: Hub) -> None:
    fill(hub, "Owner/Old-Name-GGUF")
    hub.shelf.rename("Owner/Old-Name-GGUF", "Owner/New-Name-GGUF")

    async def story() -> None:
        async with registry(hub) as asked:
            for typed in ("Owner/Old-Name-GGUF", "owner/old-name-gguf", "owner/NEW-name-gguf"):
                repo = await asked.repo(typed)
                assert (repo.id, repo.suggested_name) == ("Owner/New-Name-GGUF", "new-name")

    run(story())


def test_req_c19_a_gated_repository_is_refused_without_a_token(hub: Hub) -> None:
    fill(hub, "owner/Gated", gated="manual")
    fault = run(fault_of_repo(hub, "owner/Gated"))
    assert fault.code == "needs_token"
    assert fault.sentence == (
        f"owner/Gated is gated: it needs a token; accept its licence at {hub.url}/owner/Gated, "
        "then set HF_TOKEN for the control plane"
    )


def test_req_c19_gated_is_told_by_a_word_or_by_true(hub: Hub) -> None:
    commit = fill(hub, "owner/Gated", gated="auto")
    hub.reader(SECRET, "owner/Gated")

    async def story() -> None:
        async with registry(hub, SECRET) as asked:
            assert (await asked.repo("owner/Gated")).gated == "auto"
            hub.fault(listed(id="owner/Gated", sha=commit, gated=True, siblings=[]))
            assert (await asked.repo("owner/Gated")).gated == "auto"

    run(story())


def test_scn_c8_gated_without_a_token_without_a_licence_and_missing_are_told_apart(
    hub: Hub,
) -> None:
    fill(hub, "owner/Gated", gated="auto")
    hub.reader(SECRET)
    hub.reader("hf_waiting", pending=("owner/Gated",))
    hub.reader("hf_granted", "owner/Gated")

    async def story() -> None:
        bare = await fault_of_repo(hub, "owner/Gated")
        refused = await fault_of_repo(hub, "owner/Gated", token=SECRET)
        waiting = await fault_of_repo(hub, "owner/Gated", token="hf_waiting")
        missing = await fault_of_repo(hub, "owner/Missing", token=SECRET)
        assert [bare.code, refused.code, waiting.code, missing.code] == [
            "needs_token",
            "licence_not_accepted",
            "licence_not_accepted",
            "repo_not_found",
        ]
        assert "needs a token" in bare.sentence
        assert refused.sentence == (
            "licence not accepted: the account of HF_TOKEN has no access to owner/Gated; ask for it "
            f"at {hub.url}/owner/Gated"
        )
        assert waiting.sentence == (
            "licence not accepted: access to owner/Gated was asked for, and its owners have not "
            "granted it yet"
        )
        async with registry(hub, "hf_granted") as asked:
            repo = await asked.repo("owner/Gated")
            assert repo.gated == "auto"
            assert await asked.head(repo.id, repo.commit, PATH, 0, 4) == b"GGUF"

    run(story())


def test_private_and_missing_are_not_told_apart_without_a_token_and_we_say_so(hub: Hub) -> None:
    fill(hub, "owner/Private", private=True)
    hub.reader(SECRET)
    hub.reader("hf_owner", "owner/Private")

    async def story() -> None:
        for repo_id in ("owner/Private", "owner/Missing"):
            bare = await fault_of_repo(hub, repo_id)
            assert bare.code == "repo_not_found"
            assert bare.sentence == (
                f"{host(hub)} has no repository {repo_id}, or it is private: without a token "
                "(HF_TOKEN) the registry does not tell these apart"
            )
            other = await fault_of_repo(hub, repo_id, token=SECRET)
            assert other.sentence == (
                f"{host(hub)} has no repository {repo_id} that the account of HF_TOKEN may see"
            )
        async with registry(hub, "hf_owner") as asked:
            assert (await asked.repo("owner/Private")).private

    run(story())


def test_a_token_that_the_registry_does_not_know_is_said_to_be_wrong(hub: Hub) -> None:
    fill(hub, "owner/Model")
    fault = run(fault_of_repo(hub, "owner/Model", token=SECRET))
    assert fault.code == "token_refused"
    assert fault.sentence.endswith("the token in HF_TOKEN: it is wrong, expired or revoked")


def test_a_text_that_is_no_token_is_refused_before_anything_is_asked(hub: Hub) -> None:
    for token in ("two words", "schlüssel", "a\nb"):
        fault = run(fault_of_repo(hub, "owner/Model", token=token))
        assert fault.code == "token_refused"
        assert token not in fault.sentence
    assert hub.counters.counts().requests == ()


def test_a_revision_that_is_not_there_is_named(hub: Hub) -> None:
    fill(hub, "owner/Model")
    fault = run(fault_of_repo(hub, "owner/Model", "v9/odd name"))
    assert (fault.code, fault.sentence) == (
        "revision_not_found",
        'owner/Model has no revision "v9/odd name"',
    )


def test_a_disabled_repository_is_said_to_be_disabled(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    repo = hub.shelf.find("owner/Model")
    assert repo is not None
    repo.disabled = True
    fault = run(fault_of_repo(hub, "owner/Model"))
    said = (fault.code, fault.sentence)
    assert said == ("repo_disabled", f"{host(hub)} has disabled owner/Model")
    repo.disabled = False
    hub.fault(listed(id="owner/Model", sha=commit, disabled=True, siblings=[]))
    assert run(fault_of_repo(hub, "owner/Model")).code == "repo_disabled"


def test_what_cannot_be_a_name_is_not_asked_for(hub: Hub) -> None:
    for name in (
        "owner/a--b",
        "owner/a..b",
        "owner/x.git",
        "a/b/c",
        "ow ner/x",
        "owner/" + "x" * 99,
    ):
        fault = run(fault_of_repo(hub, name))
        assert fault.code == "repo_not_found"
        assert "is not a name a repository can have" in fault.sentence
    assert hub.counters.counts().requests == ()


def test_a_rate_limit_says_how_long_to_wait(hub: Hub) -> None:
    fill(hub, "owner/Model")
    hub.fault(Fault(at="api", status=429, headers={"Retry-After": "77"}))

    async def story() -> None:
        async with registry(hub, retry_for_s=30.0) as asked:
            with pytest.raises(RegistryFault) as raised:
                await asked.repo("owner/Model")
        fault = raised.value
        assert (fault.code, fault.wait_s) == ("rate_limited", 77.0)
        assert "it asks to wait 77 s" in fault.sentence
        # A wait that is longer than all our tries may take is not begun.
        assert len(hub.counters.counts().requests) == 1

    run(story())


def test_a_short_rate_limit_is_waited_out(hub: Hub) -> None:
    fill(hub, "owner/Model")
    hub.fault(Fault(at="api", status=429, headers={"Retry-After": "0"}, times=1))

    async def story() -> None:
        async with registry(hub, retry_for_s=30.0) as asked:
            assert (await asked.repo("owner/Model")).id == "owner/Model"

    run(story())
    assert [request.status for request in hub.counters.counts().requests] == [429, 200]


def test_what_is_wrong_at_the_registrys_end_is_tried_again(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    hub.fault(Fault(at="api", status=503, times=1))
    hub.fault(Fault(at="cdn", cut_at=1, times=1))

    async def story() -> None:
        async with registry(hub, retry_for_s=30.0) as asked:
            assert (await asked.repo("owner/Model")).commit == commit
            assert await asked.head("owner/Model", commit, PATH, 0, 4) == b"GGUF"

    run(story())


def test_what_stays_wrong_says_how_often_it_was_tried(hub: Hub) -> None:
    fill(hub, "owner/Model")
    hub.fault(Fault(at="api", status=502))

    async def story() -> None:
        async with registry(hub, retry_for_s=0.6) as asked:
            with pytest.raises(RegistryFault) as raised:
                await asked.repo("owner/Model")
        assert raised.value.code == "registry_unreachable"
        assert raised.value.sentence == (
            f"{host(hub)} answered 502: something is wrong at its end (2 tries)"
        )

    run(story())


def test_a_registry_that_is_not_there_is_unreachable() -> None:
    with Hub() as gone:
        pass
    for fault in (run(fault_of_repo(gone, "o/m")), run(fault_of_head(gone, "o/m", "c" * 40))):
        assert fault.code == "registry_unreachable"
        assert fault.sentence.startswith(f"{host(gone)} could not be reached: ")


def test_a_registry_that_does_not_answer_is_unreachable(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    hub.fault(Fault(at="api", delay_s=60.0))
    hub.fault(Fault(at="cdn", stall_at=6))

    async def story() -> None:
        async with Registry(endpoint=hub.url, timeout_s=0.2, retry_for_s=0.0) as asked:
            with pytest.raises(RegistryFault, match=r"no answer within 0\.2 s"):
                await asked.repo("owner/Model")
            with pytest.raises(RegistryFault, match=r"failed: no byte within 0\.2 s"):
                await asked.head("owner/Model", commit, PATH, 0, 64)

    run(story())


def test_a_question_can_be_given_up_at_once(hub: Hub) -> None:
    fill(hub, "owner/Model")
    hub.fault(Fault(at="api", delay_s=60.0))

    async def story() -> None:
        async with registry(hub) as asked:
            question = asyncio.create_task(asked.repo("owner/Model"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(question, 0.1)

    # Nothing of it may hold up the end of the loop, either.
    run(story(), timeout_s=2.0)


@pytest.mark.parametrize("endpoint", ["ftp://hub", "hub.example", "http://", "http://h:port"])
def test_an_endpoint_that_is_no_address_is_said_to_be_none(endpoint: str) -> None:
    async def story() -> None:
        async with Registry(endpoint=endpoint) as asked:
            with pytest.raises(RegistryFault, match="which is no http address") as raised:
                await asked.repo("owner/Model")
            assert raised.value.code == "registry_unreachable"
            with pytest.raises(RegistryFault):
                await asked.head("owner/Model", "c" * 40, PATH, 0, 1)

    run(story())


def test_the_environment_names_the_registry_and_the_token(hub: Hub) -> None:
    fill(hub, "owner/Gated", gated="auto")
    hub.reader(SECRET, "owner/Gated")

    async def story() -> None:
        given = {"HF_ENDPOINT": f"{hub.url}/", "HF_TOKEN": f" {SECRET}\n"}
        async with Registry.from_environment(given) as asked:
            assert asked.has_token
            assert (await asked.repo("owner/Gated")).gated == "auto"
        async with Registry.from_environment({"HF_TOKEN": " "}) as bare:
            assert (bare.endpoint, bare.has_token) == ("https://huggingface.co", False)

    run(story())


def listed(**told: Any) -> Fault:
    """A listing of the test's own making, once."""
    return Fault(at="api", status=200, body=json.dumps(told), times=1)


def a_file(**told: Any) -> dict[str, Any]:
    return {"rfilename": "m.gguf", "size": 1, **told}


COMMIT = "c0ffee00" * 5


GARBAGE: list[Any] = [
    "<html>",
    "",
    "[]",
    "null",
    "7",
    '{"id": "o/m"',
    "[" * 50_000,
    {},
    {"id": 7, "sha": COMMIT, "siblings": []},
    {"id": "../../etc", "sha": COMMIT, "siblings": []},
    {"id": "o/m", "siblings": []},
    {"id": "o/m", "sha": "main", "siblings": []},
    {"id": "o/m", "sha": COMMIT},
    {"id": "o/m", "sha": COMMIT, "siblings": "many"},
    {"id": "o/m", "sha": COMMIT, "siblings": [7]},
    {"id": "o/m", "sha": COMMIT, "siblings": [{"size": 1}]},
    *(
        {"id": "o/m", "sha": COMMIT, "siblings": [a_file(**told)]}
        for told in (
            {"rfilename": "../m.gguf"},
            {"rfilename": "/etc/m.gguf"},
            {"rfilename": "a//m.gguf"},
            {"rfilename": "a\\m.gguf"},
            {"rfilename": "a\nm.gguf"},
            {"rfilename": "\ud800.gguf"},
            {"rfilename": "m" * 2000 + ".gguf"},
            {"size": None},
            {"size": -1},
            {"size": 1.5},
            {"size": True},
            {"size": 2**60},
            {"rfilename": "../m.gguf"},
            {"rfilename": "a/../m.gguf"},
            {"rfilename": "/m.gguf"},
            {"rfilename": "a\\m.gguf"},
            {"rfilename": "m\0.gguf"},
            {"rfilename": f"{'m' * 251}.gguf"},
            {"rfilename": f"{'a/' * 600}m.gguf"},
            {"rfilename": "\ud800.gguf"},
            {"lfs": {"sha256": "abc", "size": 1, "pointerSize": 1}},
            {"lfs": {"sha256": 7, "size": 1, "pointerSize": 1}},
            {"lfs": 7},
            {"rfilename": "adapter_model.safetensors", "size": None},
            {"rfilename": "adapter_config.json", "lfs": {"sha256": "abc", "size": 1}},
        )
    ),
]


@pytest.mark.parametrize("answer", GARBAGE, ids=range(len(GARBAGE)))
def test_an_answer_that_is_no_listing_is_refused(hub: Hub, answer: Any) -> None:
    body = answer if isinstance(answer, str) else json.dumps(answer)
    hub.fault(Fault(at="api", status=200, body=body))
    fault = run(fault_of_repo(hub, "o/m"))
    assert fault.code == "registry_answer"
    assert fault.sentence.startswith(f"{host(hub)} did not answer properly about o/m: ")


def test_a_file_that_nobody_wants_may_have_any_name(hub: Hub) -> None:
    odd = ("odd\nname.txt", "a\n/adapter_config.json")
    siblings = [a_file(), *({"rfilename": name, "size": 1} for name in odd)]
    hub.fault(listed(id="o/m", sha=COMMIT, siblings=siblings))

    async def story() -> None:
        async with registry(hub) as asked:
            assert [file.path for file in (await asked.repo("o/m")).files] == ["m.gguf"]

    run(story())


def test_a_sum_is_read_in_any_case(hub: Hub) -> None:
    lfs = {"sha256": "AB" * 32, "size": 1, "pointerSize": 1}
    hub.fault(listed(id="o/m", sha=COMMIT, siblings=[a_file(size=None, lfs=lfs)]))

    async def story() -> None:
        async with registry(hub) as asked:
            (file,) = (await asked.repo("o/m")).files
            assert (file.bytes, file.sha256) == (1, "ab" * 32)

    run(story())


def test_a_listing_without_end_is_not_taken_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LISTING_BYTES", 1024**2)
    hub.fault(Fault(at="api", status=200, body=" " * 2 * 1024**2))
    fault = run(fault_of_repo(hub, "owner/Model"))
    assert fault.code == "registry_answer"
    assert "a listing of more than 1 MiB" in fault.sentence


def test_a_packed_listing_is_not_unpacked(hub: Hub) -> None:
    """A few KiB may unpack to more than there is memory."""
    hub.fault(Fault(at="api", status=200, headers={"Content-Encoding": "gzip"}, body="x" * 100))
    fault = run(fault_of_repo(hub, "owner/Model"))
    assert fault.code == "registry_answer"
    assert "the listing came packed" in fault.sentence


def test_a_listing_that_drips_lets_its_thread_go(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LISTING_S", -1.0)
    fill(hub, "owner/Model")
    assert run(fault_of_repo(hub, "owner/Model")).code == "registry_unreachable"


def test_going_round_in_circles_ends(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    hub.fault(Fault(at="api", redirect=f"{hub.url}/api/models/owner/Model"))
    hub.fault(Fault(at="resolve", redirect=f"{hub.url}/owner/Model/resolve/{commit}/{PATH}"))
    assert "round in circles" in run(fault_of_repo(hub, "owner/Model")).sentence
    assert "round in circles" in run(fault_of_head(hub, "owner/Model", commit)).sentence
