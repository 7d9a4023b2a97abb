"""Which files of the mirrors an adapter needs and when, what is to be read of it, and what no other try mends."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain import filesets, work
from controlplane.domain.files import (
    FINAL,
    failed_for_good,
    mismatch,
    of_adapter,
)
from controlplane.domain.needs import keys_of_adapter, keys_of_set, needed_files, needs_of
from controlplane.domain.reports import AdapterConfig, AdapterRead
from schemas import codes
from schemas.adapter import AdapterFile, AdapterPhase
from schemas.commands import MirrorRemove
from schemas.file import Copy, File
from tests.support.adapter_yard import AdapterYard, adapter_yard
from tests.support.serving import COMMIT, sha_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FOLDER = "/srv/polite"
WEIGHTS = filesets.file_key(FOLDER, COMMIT, filesets.ADAPTER_WEIGHTS)
CONFIG = filesets.file_key(FOLDER, COMMIT, filesets.ADAPTER_CONFIG)


@pytest.fixture
def yard() -> AdapterYard:
    return adapter_yard()


def report() -> AdapterRead:
    return AdapterRead(
        adapter="polite",
        incarnation="i",
        repo=FOLDER,
        commit=COMMIT,
        config=AdapterConfig(r=8),
        files=(
            AdapterFile(key=WEIGHTS, name=filesets.ADAPTER_WEIGHTS, bytes=1000),
            AdapterFile(key=CONFIG, name=filesets.ADAPTER_CONFIG, bytes=10, sha256="AB" * 32),
        ),
    )


def copy(phase: str, code: str = "", mirror: str = "cp1") -> Copy:
    return Copy(mirror=mirror, phase=phase, since=NOW, code=code)  # type: ignore[arg-type]


# -- what is to be read


def test_an_adapter_is_read_while_it_is_reading_and_never_again(yard: AdapterYard) -> None:
    yard.add_adapter("sql", source="x/sql")
    yard.settle()
    incarnation = yard.adapter("sql").incarnation
    assert yard.tasks() == (
        work.ReadAdapter(adapter="sql", incarnation=incarnation, source="x/sql"),
    )
    yard.mirror = ""
    assert len(yard.tasks()) == 1, "reading takes no mirror"
    yard.mirror = "cp1"
    yard.run_workers()
    assert yard.tasks() == ()


def test_what_could_not_be_written_of_is_not_read(yard: AdapterYard) -> None:
    yard.add_adapter("sql", source="x/sql")
    yard.settle()
    subject = yard.world.subject("adapter", "sql")
    yard.world.heads[subject] = replace(yard.world.heads[subject], writable=False)
    assert yard.tasks() == ()


def test_adapters_are_read_in_order_of_their_names(yard: AdapterYard) -> None:
    for name in ("c", "a", "b"):
        yard.add_adapter(name)
    yard.settle()
    read = [task.adapter for task in yard.tasks() if isinstance(task, work.ReadAdapter)]
    assert read == ["a", "b", "c"]


# -- what is needed


@pytest.mark.parametrize(
    ("phase", "count"), [("reading", 0), ("fetching", 2), ("ready", 2), ("refused", 0)]
)
def test_an_adapter_needs_its_files_from_its_check_on(
    yard: AdapterYard, phase: AdapterPhase, count: int
) -> None:
    adapter = replace(yard.have("sql"), phase=phase)
    assert len(keys_of_adapter(adapter)) == count


def test_who_needs_a_file_is_told_models_first_then_adapters(yard: AdapterYard) -> None:
    found = yard.have("sql", source="x/same")
    yard.have("ask", source="x/same")
    key = found.files[0].key
    assert needed_files(yard.world)[key] == ("adapter 'ask'", "adapter 'sql'")
    assert needs_of(yard.world).is_wanted(key)
    assert yard.index is not None
    yard.settle()
    assert needs_of(yard.world).by_key == yard.index.needs.by_key, "kept up as it goes"


def test_the_weights_key_names_the_set(yard: AdapterYard) -> None:
    weights, config = yard.have("sql").files
    assert keys_of_set(yard.world, weights.key) == (weights.key, config.key)
    assert keys_of_set(yard.world, config.key) == (config.key,)


def test_an_adapter_added_again_does_not_wait_for_the_former_s_next_try(yard: AdapterYard) -> None:
    yard.fails["Fetch"] = (codes.NO_SUCH_FILE, "it is not there")
    refused = yard.have("sql")
    assert refused.phase == "refused"
    del yard.fails["Fetch"]
    yard.now += timedelta(seconds=1)
    assert yard.have("sql").phase == "ready", "at once, not after the minute of a retry"


def test_a_fetch_for_an_adapter_ends_with_it(yard: AdapterYard) -> None:
    yard.add_adapter("sql")
    yard.settle()
    yard.reports.extend(yard.perform(task) for task in yard.tasks())
    yard.settle()
    assert yard.copies() == ["fetching", "fetching"]
    yard.drop("sql")
    yard.settle()
    assert yard.tasks() == () or all(isinstance(t, work.Remove) for t in yard.tasks())
    yard.run_workers()
    assert yard.world.files == {}, "nobody has them and nobody needs them"


@pytest.mark.parametrize("source", ["/srv/polite", "https://h.test/polite"])
@pytest.mark.parametrize(
    ("behind", "count"), [("", 2), ("/", 2), ("/adapter_config.json", 1), ("/none", 0)]
)
def test_a_person_names_an_adapter_s_files_by_where_they_came_from(
    yard: AdapterYard, source: str, behind: str, count: int
) -> None:
    yard.have("sql", source=source)
    needed = yard.do(MirrorRemove(what=f"{source}{behind}"))
    assert needed.code == (codes.IN_USE if count else codes.NOT_FOUND)
    yard.drop("sql")
    outcome = yard.do(MirrorRemove(what=f"{source}{behind}"))
    assert outcome.code == (None if count else codes.NOT_FOUND)
    assert len(outcome.lines) == count


# -- files


def test_the_files_of_a_report_are_what_was_read() -> None:
    weights, config = of_adapter(report())
    assert weights == File(
        key=WEIGHTS,
        repo=FOLDER,
        commit=COMMIT,
        path=filesets.ADAPTER_WEIGHTS,
        published_bytes=1000,
    )
    assert config.published_sha256 == "ab" * 32


@pytest.mark.parametrize("code", sorted(FINAL))
def test_what_another_fetch_would_meet_again_is_final(code: str) -> None:
    file, _ = of_adapter(report())
    failed = replace(file, copies=(copy("failed", code),))
    assert failed_for_good(failed, "cp1") == copy("failed", code)
    assert failed_for_good(failed, "cp2") is None, "it is another mirror's"
    elsewhere = replace(file, copies=(copy("failed", code), copy("present", mirror="cp2")))
    assert failed_for_good(elsewhere, "cp1") is None, "it can be had from there"


@pytest.mark.parametrize(
    "code",
    [
        codes.REGISTRY_UNREACHABLE,
        codes.SOURCE_UNREACHABLE,
        codes.RATE_LIMITED,
        codes.DISK_FULL,
        codes.DISK_FAILED,
        codes.NO_PROGRESS,
        codes.INTERRUPTED,
        codes.TOKEN_REFUSED,
        "internal",
    ],
)
def test_what_may_pass_is_not_final(code: str) -> None:
    file, _ = of_adapter(report())
    assert failed_for_good(replace(file, copies=(copy("failed", code),)), "cp1") is None


@pytest.mark.parametrize("phase", ["fetching", "present", "verifying", "removing"])
def test_what_has_not_failed_is_not_final(phase: str) -> None:
    file, _ = of_adapter(report())
    assert failed_for_good(replace(file, copies=(copy(phase, codes.NO_SUCH_FILE),)), "cp1") is None


def test_other_bytes_than_were_read_are_told_as_that() -> None:
    weights, config = of_adapter(report())
    assert mismatch(weights, sha_of("x"), 1000) is None
    code, sentence = mismatch(weights, sha_of("x"), 7) or ("", "")
    assert code == codes.SIZE_MISMATCH
    assert sentence == "adapter_model.safetensors has 7 bytes, when it was added it had 1000"
    code, sentence = mismatch(config, sha_of("x"), 10) or ("", "")
    assert code == codes.CHECKSUM_MISMATCH
    assert "when it was added it had abababababab" in sentence


def test_a_file_s_event_says_that_its_sum_is_the_one_that_was_read(yard: AdapterYard) -> None:
    yard.have("sql", source=FOLDER)
    yard.have("ask", source="x/ask")
    said = {item.state.repo: item.reason for item in yard.log if isinstance(item.state, File)}
    assert said[FOLDER].endswith(("its checksum is what was read", "nothing to compare it with"))
    assert "registry" not in said[FOLDER].partition(",")[2]
