"""An adapter in the catalog from `adapter add` to its removal, with a worker that reads and fetches."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.domain import adapters
from controlplane.domain.files import copy_on
from schemas import codes
from schemas.commands import AdapterPin, AdapterRemove, MirrorGc, MirrorRemove
from schemas.file import FileDeleted
from schemas.model import ModelDeleted
from schemas.slots import Slot, Slots, SlotsLoaded
from tests.support.adapter_yard import AdapterYard, adapter_yard, base_model, vllm
from tests.support.serving import COMMIT, sha_of


@pytest.fixture
def yard() -> AdapterYard:
    return adapter_yard(compares=True)


def test_an_adapter_is_read_fetched_and_ready(yard: AdapterYard) -> None:
    outcome = yard.add_adapter("sql", aliases=["db"])
    assert outcome.status == "accepted"
    assert outcome.refs == ("yard.evt.adapter.sql",)
    added = yard.adapter("sql")
    assert (added.phase, added.by, added.source, added.aliases) == (
        *("reading", "admin", "x/sql"),
        ("db",),
    )
    assert added.base_incarnation == yard.world.models["llama"].incarnation
    yard.run_workers()
    found = yard.adapter("sql")
    assert yard.events("adapter") == ["adapter.added", "adapter.checked", "adapter.ready"]
    assert (found.phase, found.rank, found.commit, found.trained_on) == (
        *("ready", 16, COMMIT),
        "x/llama",
    )
    assert found.target_modules == ("q_proj", "v_proj")
    assert found.incarnation == added.incarnation
    assert found.bytes == 1010
    assert found.version == adapters.version_of((f.name, f.sha256) for f in found.files)
    assert [f.name for f in found.files] == ["adapter_model.safetensors", "adapter_config.json"]
    assert [f.sha256 for f in found.files] == [sha_of(f.name) for f in found.files]


def test_each_event_says_what_happened(yard: AdapterYard) -> None:
    yard.have("sql")
    added, checked, ready = yard.reasons("sql")
    assert added == "added by admin"
    assert checked == "rank 16, 1010 B"
    assert yard.adapter("sql").version in ready


def test_its_files_are_told_with_it_in_one_batch_and_fetched_once(yard: AdapterYard) -> None:
    yard.have("sql")
    (batch,) = [d for d in yard.decisions if "adapter.checked" in d.what]
    assert [c.noun for c in batch.changes] == ["file", "file", "adapter"]
    assert len(yard.fetched) == 2
    yard.have("again", source="x/sql")
    assert len(yard.fetched) == 2, "the same files are one download"
    assert yard.adapter("again").version == yard.adapter("sql").version


def test_the_version_names_contents_in_any_order() -> None:
    one = adapters.version_of([("a", "1"), ("b", "2")])
    assert one == adapters.version_of([("b", "2"), ("a", "1")])
    assert one != adapters.version_of([("a", "2"), ("b", "1")])
    assert len(one) == 12


def test_an_adapter_without_a_mirror_waits(yard: AdapterYard) -> None:
    yard.mirror = ""
    yard.have("sql")
    assert yard.adapter("sql").phase == "fetching"
    yard.mirror = "cp1"
    yard.run_workers()
    assert yard.adapter("sql").phase == "ready"


def test_another_leader_goes_on_with_its_own_mirror(yard: AdapterYard) -> None:
    yard.add_adapter("sql")
    for _ in range(2):
        yard.reports.extend(yard.perform(task) for task in yard.tasks())
        yard.settle()
    assert yard.adapter("sql").phase == "ready"
    yard.mirror = "cp2"
    yard.run_workers()
    assert yard.copies("cp2") == ["present", "present"]
    assert yard.events("adapter").count("adapter.ready") == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"r": 513}, codes.RANK_TOO_HIGH),
        ({"use_dora": True}, codes.UNSUPPORTED_ADAPTER),
        ({"base_model_name_or_path": "x/other"}, codes.WRONG_BASE),
    ],
)
def test_scn_d9_one_that_does_not_fit_is_refused_before_a_byte_is_fetched(
    yard: AdapterYard, fields: dict[str, Any], code: str
) -> None:
    yard.lay("x/sql", **fields)
    found = yard.have("sql")
    assert (found.phase, found.code) == ("refused", code)
    assert found.reason
    assert not yard.fetched
    assert not yard.world.files


def test_one_that_cannot_be_read_is_refused_with_the_readers_words(yard: AdapterYard) -> None:
    yard.sources["x/sql"] = (codes.REPO_NOT_FOUND, "there is no repository x/sql")
    found = yard.have("sql")
    assert (found.phase, found.code) == ("refused", codes.REPO_NOT_FOUND)
    assert found.reason == "there is no repository x/sql"
    assert not yard.tasks()


def test_a_refused_one_is_replaced_by_adding_it_again(yard: AdapterYard) -> None:
    yard.lay("x/sql", use_dora=True)
    refused = yard.have("sql", aliases=["db"])
    yard.lay("x/sql2")
    found = yard.have("sql", source="x/sql2")
    assert found.phase == "ready"
    assert found.incarnation != refused.incarnation
    assert (found.code, found.reason, found.aliases) == ("", "", ())
    assert found.order == refused.order
    assert yard.add_adapter("db").status == "accepted", "its alias went with it"


def test_any_other_is_not_replaced(yard: AdapterYard) -> None:
    yard.have("sql")
    outcome = yard.add_adapter("sql", source="x/sql2")
    assert (outcome.status, outcome.code) == ("rejected", codes.EXISTS)
    assert "yardctl adapter rm" in outcome.sentence


def test_a_late_report_of_a_replaced_adapter_changes_nothing(yard: AdapterYard) -> None:
    yard.add_adapter("sql")
    (task,) = yard.tasks()
    late = yard.perform(task)
    yard.drop("sql")
    yard.lay("x/other", r=8)
    yard.add_adapter("sql", source="x/other")
    yard.reports.append(late)
    yard.settle()
    assert yard.adapter("sql").phase == "reading"
    yard.run_workers()
    assert yard.adapter("sql").rank == 8


# -- the rank engines are started for


def test_a_higher_rank_raises_what_engines_are_started_for(yard: AdapterYard) -> None:
    yard.lay("x/big", r=40)
    before = yard.world.models["llama"]
    yard.have("big")
    after = yard.world.models["llama"]
    assert (before.lora_rank, after.lora_rank) == (0, 64)
    assert after.incarnation == before.incarnation
    (batch,) = [d for d in yard.decisions if "adapter.checked" in d.what]
    (raised,) = [c for c in batch.changes if c.noun == "model"]
    assert "rank 40" in raised.reason
    assert "64" in raised.reason
    yard.lay("x/small", r=8)
    yard.have("small")
    assert yard.world.models["llama"].lora_rank == 64


def test_an_engine_started_for_less_is_replaced() -> None:
    yard = adapter_yard(base_model(maximum=1))
    yard.request("llama")
    yard.until(lambda: yard.ready("llama"), 30, "ready")
    (first,) = yard.ready("llama")
    (_, item) = yard.items("llama")[0]
    assert (item.launch.adapters, item.launch.lora_rank) == (4, 0)
    yard.have("sql")
    yard.advance(5)
    assert yard.ready("llama") == [first], "rank 16 is what it was started for"
    yard.lay("x/big", r=64)
    yard.have("big")
    yard.until(lambda: yard.ready("llama") not in ([first], []), 60, "replaced")
    (_, item) = yard.items("llama")[-1]
    assert item.launch.lora_rank == 64


def test_a_profile_that_says_its_rank_is_not_restarted() -> None:
    yard = adapter_yard(
        base_model(profiles=(vllm("--max-lora-rank", "64"), vllm(name="open", card=("nowhere/x",))))
    )
    yard.request("llama")
    yard.until(lambda: yard.ready("llama"), 30, "ready")
    first = yard.ready("llama")
    yard.lay("x/big", r=64)
    yard.have("big")
    assert yard.world.models["llama"].lora_rank == 64
    yard.advance(5)
    assert yard.ready("llama") == first


# -- files that fail


def test_a_file_that_fails_for_a_while_is_tried_again(yard: AdapterYard) -> None:
    yard.fails["Fetch"] = (codes.REGISTRY_UNREACHABLE, "no answer")
    yard.have("sql")
    assert yard.adapter("sql").phase == "fetching"
    del yard.fails["Fetch"]
    yard.until(lambda: yard.adapter("sql").phase == "ready", 120, "ready")


def test_a_file_that_fails_for_good_refuses_the_adapter(yard: AdapterYard) -> None:
    yard.fails["Fetch"] = (codes.CHECKSUM_MISMATCH, "it has another sha256")
    found = yard.have("sql")
    assert (found.phase, found.code) == ("refused", codes.CHECKSUM_MISMATCH)
    assert "it has another sha256" in found.reason
    assert "adapter_model.safetensors" in found.reason or "adapter_config.json" in found.reason
    assert not yard.tasks(), "nothing of it is fetched any more"


def test_what_failed_for_a_former_one_is_fetched_again(yard: AdapterYard) -> None:
    yard.fails["Fetch"] = (codes.CHECKSUM_MISMATCH, "it has another sha256")
    yard.have("sql")
    del yard.fails["Fetch"]
    assert yard.have("sql").phase == "ready"


def test_what_a_mirror_failed_at_before_it_led_refuses_nothing(yard: AdapterYard) -> None:
    yard.fails["Fetch"] = (codes.CHECKSUM_MISMATCH, "it has another sha256")
    yard.mirror = "cp2"
    yard.have("former", source="x/sql")
    yard.drop("former")
    yard.mirror = "cp1"
    yard.advance(5)
    yard.fails["Fetch"] = (codes.REGISTRY_UNREACHABLE, "no answer")
    yard.have("sql")
    yard.mirror = "cp2"
    yard.settle()
    assert yard.adapter("sql").phase == "fetching"
    del yard.fails["Fetch"]
    yard.until(lambda: yard.adapter("sql").phase == "ready", 4000, "ready")


def test_a_leader_whose_mirror_has_the_files_already_says_ready_at_once(yard: AdapterYard) -> None:
    yard.mirror = "cp2"
    yard.have("other", source="x/sql")
    yard.mirror = "cp1"
    yard.fails["Fetch"] = (codes.REGISTRY_UNREACHABLE, "no answer")
    yard.have("sql")
    assert yard.adapter("sql").phase == "fetching"
    yard.mirror = "cp2"
    yard.settle()
    assert yard.adapter("sql").phase == "ready"


def test_an_adapter_whose_files_the_log_lost_is_read_again(yard: AdapterYard) -> None:
    yard.fails["Fetch"] = (codes.REGISTRY_UNREACHABLE, "no answer")
    found = yard.have("sql")
    key = found.files[0].key
    yard.append("file", (key,), FileDeleted(), None)
    yard.settle()
    assert yard.adapter("sql").phase == "reading"
    del yard.fails["Fetch"]
    yard.until(lambda: yard.adapter("sql").phase == "ready", 120, "ready")


def test_an_adapter_whose_base_is_gone_is_refused(yard: AdapterYard) -> None:
    """Only a repair of the log removes a model with adapters."""
    yard.have("sql")
    yard.add_adapter("late")
    yard.append("model", ("llama",), ModelDeleted(), None)
    yard.settle()
    for name in ("sql", "late"):
        found = yard.adapter(name)
        assert (found.phase, found.code) == ("refused", codes.NOT_FOUND)
        assert "'llama'" in found.reason


def test_a_report_for_a_base_that_was_added_anew_is_not_believed(yard: AdapterYard) -> None:
    yard.add_adapter("sql")
    (task,) = yard.tasks()
    report = yard.perform(task)
    yard.add(base_model(incarnation="another"))
    yard.reports.append(report)
    yard.settle()
    assert yard.adapter("sql").code == codes.NOT_FOUND


# -- asking for what is not to be had


@pytest.mark.parametrize(
    ("fields", "code", "told"),
    [
        ({"base": "lama"}, codes.NOT_FOUND, "'llama'"),
        ({"base": "off"}, codes.NO_ADAPTERS, "max_loaded_adapters"),
        ({"source": "here"}, codes.INVALID, "OWNER/REPO"),
        ({"source": "./here"}, codes.INVALID, "source"),
        ({"source": "ftp://host/x"}, codes.INVALID, "source"),
        ({"source": "http://user:secret@host/x"}, codes.INVALID, "password"),
        ({"aliases": ["x" * 190 + str(n) for n in range(50)]}, codes.INVALID, "at most 3 KiB"),
    ],
)
def test_an_add_that_cannot_be_is_rejected(
    yard: AdapterYard, fields: dict[str, Any], code: str, told: str
) -> None:
    yard.add(base_model("off", max_loaded_adapters=0))
    outcome = yard.add_adapter("sql", **fields)
    assert (outcome.status, outcome.code) == ("rejected", code)
    assert told in outcome.sentence
    assert "secret" not in outcome.sentence
    assert not yard.world.adapters


@pytest.mark.parametrize(
    "source", ["/data/sql", "owner/sql", "owner/sql@v1.0", "https://host/a/sql", "http://host:80/x"]
)
def test_each_kind_of_source_is_taken(yard: AdapterYard, source: str) -> None:
    assert yard.have("sql", source=source).phase == "ready"


def test_an_alias_of_the_base_stands_for_it(yard: AdapterYard) -> None:
    yard.add(base_model("qwen", aliases=("q",)))
    assert yard.have("sql", "q", source="x/qwen-sql").base == "qwen"


def test_a_command_about_an_unknown_adapter_names_the_nearest(yard: AdapterYard) -> None:
    yard.have("sql-expert", aliases=["db"])
    for body in (AdapterRemove(adapter="sql-experts"), AdapterPin(adapter="sql-experts")):
        outcome = yard.do(body)
        assert outcome.code == codes.NOT_FOUND
        assert "'sql-expert'" in outcome.sentence
    assert "is an alias" in yard.drop("db").sentence
    assert "is called 'sql-expert'" in yard.drop("llama:sql-expert").sentence


# -- removing and pinning


def test_a_removed_adapter_ends_and_its_files_are_needed_no_more(yard: AdapterYard) -> None:
    found = yard.have("sql")
    slots = Slots(
        node="n1",
        replica="r-1",
        model="llama",
        epoch=1,
        limit=4,
        since=yard.now,
        loaded=(Slot(adapter="sql", version=found.version, since=yard.now),),
    )
    loaded = SlotsLoaded(adapter="sql", version=found.version)
    yard.append("slots", ("n1", "r-1"), loaded, slots)
    kept = yard.do(MirrorRemove(what=found.files[0].key))
    assert (kept.code, "adapter 'sql'" in kept.sentence) == (codes.IN_USE, True)
    outcome = yard.drop("sql")
    assert outcome.status == "accepted"
    assert outcome.lines == ("r-1 on n1 unloads it once no request uses it",)
    assert "sql" not in yard.world.adapters
    assert yard.events("adapter")[-1] == "adapter.deleted"
    yard.do(MirrorGc())
    yard.run_workers()
    assert all(copy_on(file, "cp1") is None for file in yard.world.files.values())


def test_who_ended_long_ago_is_not_said_to_unload_what_was_removed() -> None:
    yard = adapter_yard(base_model(minimum=1))
    found = yard.have("sql")
    yard.until(lambda: yard.ready("llama"), 60, "ready")
    (replica,) = yard.ready("llama")
    slots = Slots(
        node="n1",
        replica=replica,
        model="llama",
        epoch=1,
        limit=4,
        since=yard.now,
        loaded=(Slot(adapter="sql", version=found.version, since=yard.now),),
    )
    loaded = SlotsLoaded(adapter="sql", version=found.version)
    yard.append("slots", ("n1", replica), loaded, slots)
    yard.fail(replica)
    assert yard.drop("sql").lines == ()


def test_files_two_adapters_have_stay_until_both_are_removed(yard: AdapterYard) -> None:
    yard.have("one", source="x/same")
    found = yard.have("two", source="x/same")
    yard.drop("one")
    assert yard.do(MirrorRemove(what=found.files[0].key)).code == codes.IN_USE
    yard.drop("two")
    assert yard.do(MirrorRemove(what=found.files[0].key)).status == "accepted"


def test_a_re_added_name_is_another_adapter(yard: AdapterYard) -> None:
    first = yard.have("sql")
    yard.drop("sql")
    second = yard.have("sql")
    assert first.incarnation != second.incarnation
    assert first.version == second.version, "the same contents are the same version"


def test_pinning_is_one_event_and_asking_again_is_none(yard: AdapterYard) -> None:
    yard.have("sql")
    assert yard.pin("sql").sentence == "sql is pinned"
    assert yard.adapter("sql").pinned
    assert yard.events("adapter")[-1] == "adapter.changed"
    count = len(yard.log)
    assert "already" in yard.pin("sql").sentence
    assert yard.events("adapter").count("adapter.changed") == 1
    assert len(yard.log) == count + 1, "its outcome alone"
    assert yard.pin("sql", False).sentence == "sql is pinned no more"
    assert yard.pin("sql", False).sentence == "sql was not pinned"
    assert not yard.adapter("sql").pinned
    assert yard.adapter("sql").phase == "ready"


def test_a_refused_adapter_is_not_pinned(yard: AdapterYard) -> None:
    yard.lay("x/sql", use_dora=True)
    yard.have("sql")
    outcome = yard.pin("sql")
    assert outcome.code == codes.CONFLICT
    assert "DoRA" in outcome.sentence


def test_no_more_are_pinned_than_are_kept_loaded(yard: AdapterYard) -> None:
    for number in range(4):
        yard.have(f"a{number}", pinned=True)
    yard.have("b")
    for outcome in (yard.pin("b"), yard.add_adapter("c", pinned=True)):
        assert outcome.code == codes.CONFLICT
        assert "4 adapters" in outcome.sentence
        assert "keeps 4 loaded" in outcome.sentence
    yard.pin("a0", False)
    assert yard.pin("b").status == "accepted"


def test_what_an_adapter_tells_fits_its_event(yard: AdapterYard) -> None:
    """A configuration is anybody's: what it says is cut before it goes into every event."""
    source = yard.lay(
        "/x" * 500,
        target_modules=tuple(f"{n}{'m' * 400}" for n in range(4000)),
        base_model_name_or_path="x/" + "llama" * 90,
    )
    aliases = [f"{'ä' * 190}{n}" for n in range(4)]
    yard.have("sql", source=source, trust_base=True, aliases=aliases)
    yard.fails["Fetch"] = (codes.CHECKSUM_MISMATCH, "w" * 5000)
    yard.have("bad", source=yard.lay("/y" * 500), aliases=[a[1:] for a in aliases])
    assert yard.adapter("bad").phase == "refused"
    for name in ("sql", "bad"):
        assert len(msgspec.json.encode(yard.adapter(name))) < 8192


def test_one_that_cannot_be_written_is_left_alone_and_others_go_on(yard: AdapterYard) -> None:
    """Its last event is of a newer version: nobody may write over it."""
    for name in ("sql", "poet"):
        yard.add_adapter(name)
    yard.reports.extend(yard.perform(task) for task in yard.tasks())
    yard.settle()
    subject = yard.world.subject("adapter", "sql")
    yard.world.heads[subject] = replace(
        yard.world.heads[subject], writable=False, problem="of a newer version"
    )
    yard.run_workers()
    assert (yard.adapter("sql").phase, yard.adapter("poet").phase) == ("fetching", "ready")
    outcome = yard.pin("sql")
    assert outcome.code == codes.UPGRADE_REQUIRED


def test_a_new_leader_without_memory_decides_the_same(yard: AdapterYard) -> None:
    """`compares` asks one at each step; here the world is read anew as well."""
    yard.add_adapter("sql")
    yard.reports.extend(yard.perform(task) for task in yard.tasks())
    yard.settle()
    yard.index = None
    yard.run_workers()
    assert yard.adapter("sql").phase == "ready"


def test_adding_two_hundred_is_no_trouble() -> None:
    yard = adapter_yard()
    for number in range(200):
        yard.add_adapter(f"a{number:03}")
    yard.run_workers(bound=1000)
    assert {one.phase for one in yard.world.adapters.values()} == {"ready"}
    assert [one.order for one in yard.world.adapters.values()] == list(range(200))
