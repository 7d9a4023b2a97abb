"""The registry's reader of files against a hub on real sockets: parts of a file, its refusals, whom it tells the token."""

import logging
import pickle
import traceback
from collections.abc import Iterator

import pytest

from controlplane.registry.credentials import Token, read_token
from controlplane.registry.faults import RegistryFault
from tests.hub.contents import MadeUp
from tests.hub.faults import Fault
from tests.hub.server import Hub
from tests.support.aio import run
from tests.support.registries import BIG, PATH, SECRET, fault_of_head, fill, host, registry


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def test_parts_of_a_file_are_what_was_asked_for(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")

    async def story() -> None:
        async with registry(hub) as asked:
            for start, length in ((0, 4), (1024**2 - 3, 9), (BIG.size - 5, 5), (BIG.size - 5, 99)):
                read = await asked.head("owner/Model", commit, PATH, start, length)
                assert read == BIG.read(start, length)
            assert await asked.head("owner/Model", commit, PATH, BIG.size, 4) == b""
            assert await asked.head("owner/Model", commit, "README.md", 2, 7) == b"a model"
            # Where ranges are not understood, the rest of the file is left where it is.
            hub.counters.reset()
            hub.fault(Fault(at="cdn", ignore_range=True))
            assert await asked.head("owner/Model", commit, PATH, 7, 4) == BIG.read(7, 4)

    run(story())
    assert hub.counters.bytes_of(f"owner/Model/{PATH}") < BIG.size


def test_a_file_read_bit_by_bit_comes_in_growing_chunks(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")

    async def story() -> None:
        async with registry(hub) as asked:
            file = asked.open("owner/Model", commit, PATH, BIG.size)
            assert bytes(await file.prefix(8)) == BIG.read(0, 1024**2)
            assert await file.read(1024**2 - 2, 5) == BIG.read(1024**2 - 2, 5)
            assert bytes(await file.prefix(2**30 // 8)) == BIG.read(0, BIG.size)

    run(story())
    ranges = [one.range for one in hub.counters.counts().requests if one.at == "cdn"]
    assert ranges == ["bytes=0-1048575", f"bytes=1048576-{BIG.size - 1}"]


def test_a_missing_file_is_named(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    fault = run(fault_of_head(hub, "owner/Model", commit, "other.gguf"))
    assert fault.code == "no_such_file"
    assert fault.sentence == f"owner/Model has no file other.gguf at {commit[:12]}"


def test_scn_c8_a_page_in_place_of_a_file_is_no_file(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    for where in ("resolve", "cdn"):
        hub.fault(Fault(at=where, html=True))
        fault = run(fault_of_head(hub, "owner/Model", commit))
        hub.faults.clear()
        assert fault.code == "registry_answer"
        assert "a page of HTML came instead of the file" in fault.sentence


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(at="resolve", redirect="ftp://elsewhere/x"), "an address that is not of the web"),
        (Fault(at="resolve", redirect="http://[/x"), "an address that is not of the web"),
        (Fault(at="cdn", status=206, body="GGUFGGUF"), "another part of the file came"),
        (
            Fault(at="cdn", status=206, body="x" * 8, headers={"Content-Range": "bytes 6-13/99"}),
            "another part of the file came",
        ),
        (Fault(at="cdn", status=416), "no bytes where the file has some"),
        (
            Fault(at="cdn", status=200, headers={"Content-Encoding": "gzip"}),
            "the bytes came packed",
        ),
        (Fault(at="resolve", status=418), "status 418"),
        (
            Fault(at="resolve", status=302, headers={"X-Repo-Commit": "f" * 40}),
            "the file of another commit",
        ),
    ],
)
def test_bytes_that_are_not_those_asked_for_are_refused(hub: Hub, fault: Fault, said: str) -> None:
    commit = fill(hub, "owner/Model")
    hub.fault(fault)
    found = run(fault_of_head(hub, "owner/Model", commit))
    assert found.code == "registry_answer"
    assert said in found.sentence


def test_a_store_that_fails_is_told_from_the_registry(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    store = hub.cdn_url.removeprefix("http://")
    for wrong in (Fault(at="cdn", status=403), Fault(at="cdn", cut_at=7)):
        hub.fault(wrong)
        fault = run(fault_of_head(hub, "owner/Model", commit))
        hub.faults.clear()
        assert fault.code == "registry_unreachable"
        assert fault.sentence.startswith(f"{store}, where {host(hub)} keeps the file, failed: ")


def test_an_address_that_has_expired_is_asked_for_anew(hub: Hub) -> None:
    commit = fill(hub, "owner/Model")
    hub.fault(Fault(at="cdn", status=403, times=1))

    async def story() -> None:
        async with registry(hub, retry_for_s=5.0) as asked:
            assert await asked.head("owner/Model", commit, PATH, 0, 4) == b"GGUF"

    run(story())
    assert [one.at for one in hub.counters.counts().requests] == ["resolve", "cdn"] * 2


def test_scn_c10_the_commit_is_pinned_when_main_moves(hub: Hub) -> None:
    first = fill(hub, "owner/Model")

    async def story() -> None:
        async with registry(hub) as asked:
            repo = await asked.repo("owner/Model")
            moved = hub.shelf.find("owner/Model")
            assert moved is not None
            second = moved.commit({PATH: MadeUp(BIG.size, seed=8)})
            assert repo.commit == first != second
            read = await asked.head(repo.id, repo.commit, PATH, 1024, 64)
            assert read == BIG.read(1024, 64)
            assert (await asked.repo("owner/Model")).commit == second
            assert (await asked.repo("owner/Model", first)).files == repo.files

    run(story())


def test_the_token_goes_to_the_registrys_own_origin_alone(hub: Hub) -> None:
    fill(hub, "owner/Gated", gated="auto")
    hub.reader(SECRET, "owner/Gated")

    async def story() -> None:
        async with registry(hub, SECRET) as asked:
            repo = await asked.repo("owner/Gated")
            assert await asked.head(repo.id, repo.commit, PATH, 0, 4) == b"GGUF"
            # Another host must not see it even when the registry sends us there with the listing, …
            away = f"{hub.cdn_url}/owner/Gated/{repo.commit}/{PATH}"
            hub.fault(Fault(at="api", redirect=away))
            with pytest.raises(RegistryFault):
                await asked.repo("owner/Gated")
            # … nor the registry itself, when another host sends us back there.
            hub.fault(Fault(at="cdn", redirect=f"{hub.url}/owner/Gated/resolve/main/{PATH}"))
            with pytest.raises(RegistryFault, match="status 401"):
                await asked.head(repo.id, repo.commit, PATH, 0, 4)

    run(story())
    requests = hub.counters.counts().requests
    assert [(one.at, one.authorized) for one in requests[-3:]] == [
        ("resolve", True),
        ("cdn", False),
        ("resolve", False),
    ]
    assert not [one for one in requests if one.at == "cdn" and one.authorized]


def test_the_token_shows_nowhere(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEBUG", "0")
    caplog.set_level(logging.DEBUG)
    commit = fill(hub, "owner/Gated", gated="auto")
    hub.reader(SECRET)
    wrong: list[Fault | None] = [
        None,
        Fault(at="api", status=401, body=SECRET, headers={"X-Error-Message": SECRET}),
        Fault(at="api", status=400, body=SECRET, headers={"X-Error-Message": SECRET}),
        Fault(at="api", status=500, body=SECRET, headers={"X-Error-Code": SECRET}),
        Fault(at="api", status=200, body=SECRET),
        Fault(at="api", redirect=f"http://127.0.0.1:1/{SECRET}"),
    ]

    async def story() -> None:
        async with registry(hub, SECRET) as asked:
            assert SECRET not in repr(asked) + repr(vars(asked))
            for fault in wrong:
                if fault is not None:
                    hub.fault(fault)
                with pytest.raises(RegistryFault) as raised:
                    await asked.repo("owner/Gated")
                hub.faults.clear()
                told = "".join(traceback.format_exception(raised.value))
                assert SECRET not in told + raised.value.sentence + repr(raised.value)
                assert raised.value.__cause__ is None
            hub.fault(Fault(at="resolve", redirect=f"http://127.0.0.1:1/{SECRET}"))
            with pytest.raises(RegistryFault) as raised:
                await asked.head("owner/Gated", commit, PATH, 0, 4)
            assert SECRET not in "".join(traceback.format_exception(raised.value))

    run(story())
    ours = [record for record in caplog.records if record.name.startswith(("control", "hugging"))]
    assert SECRET not in "".join(record.getMessage() for record in ours)


def test_a_token_is_written_nowhere() -> None:
    token = read_token(SECRET)
    assert token is not None
    assert SECRET not in f"{token} {token!r} {[token]}"
    with pytest.raises(TypeError):
        pickle.dumps(Token(SECRET))
    assert token.hide(f"a {SECRET} b") == "a *** b"
