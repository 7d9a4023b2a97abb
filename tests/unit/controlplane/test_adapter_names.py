"""One namespace: models, adapters, their aliases and the pairs BASE:NAME each have one meaning."""

from typing import Any

import pytest

from schemas import codes
from schemas.commands import CatalogApply, ModelAdd, Outcome
from tests.support.adapter_yard import AdapterYard, adapter_yard, base_model
from tests.support.serving import repo


def entry(name: str, **over: Any) -> dict[str, Any]:
    return {
        "name": name,
        "source": "/models/llama",
        "scaling": {"min": 0, "max": 1},
        "max_loaded_adapters": 4,
        "profiles": [{"name": "gpu", "engine": "vllm", "memory": "1GiB", "card": "gpu"}],
    } | over


def exists(outcome: Outcome, *told: str) -> None:
    assert outcome.status == "rejected"
    assert outcome.code == codes.EXISTS, outcome
    for text in told:
        assert text in outcome.sentence


@pytest.fixture
def yard() -> AdapterYard:
    made = adapter_yard(base_model(aliases=("big",)), base_model("qwen"))
    made.have("sql", aliases=["db"])
    return made


@pytest.mark.parametrize("name", ["llama", "big", "qwen", "sql", "db"])
def test_scn_d3_an_adapter_takes_no_name_that_has_a_meaning(yard: AdapterYard, name: str) -> None:
    exists(yard.add_adapter(name, "qwen"), repr(name))
    exists(yard.add_adapter("new", "qwen", aliases=[name]), repr(name))
    assert "new" not in yard.world.adapters


def test_an_adapter_may_be_added_to_its_base_by_an_alias(yard: AdapterYard) -> None:
    outcome = yard.add_adapter("new", "big")
    assert outcome.status == "accepted", outcome.sentence
    assert outcome.sentence.startswith("new added to llama, ")
    added = yard.adapter("new")
    assert (added.base, added.base_incarnation) == (
        "llama",
        yard.world.models["llama"].incarnation,
    )
    exists(yard.add_adapter("llama", "big"), "'llama'")
    unknown = yard.add_adapter("other", "bigg")
    assert (unknown.status, unknown.code) == ("rejected", codes.NOT_FOUND)


@pytest.mark.parametrize("name", ["sql", "db"])
def test_scn_d3_a_model_takes_no_name_of_an_adapter(yard: AdapterYard, name: str) -> None:
    exists(yard.do(ModelAdd(entry=entry(name))), repr(name))
    exists(yard.do(ModelAdd(entry=entry("new", aliases=[name]))), repr(name))
    exists(yard.do(CatalogApply(entries=[entry("llama", aliases=[name])])), repr(name))
    assert yard.world.models["llama"].aliases == ("big",)


@pytest.mark.parametrize("name", ["llama:sql", "big:sql", "llama:db", "big:db"])
def test_scn_d3_nothing_is_called_like_a_pair_of_base_and_adapter(
    yard: AdapterYard, name: str
) -> None:
    exists(yard.add_adapter(name, "qwen"), repr(name), "'sql'")
    exists(yard.do(ModelAdd(entry=entry(name))), repr(name), "'sql'")
    exists(yard.do(CatalogApply(entries=[entry("qwen", aliases=[name])])), repr(name), "'sql'")


def test_scn_d3_an_adapter_makes_no_pair_that_is_a_name_already(yard: AdapterYard) -> None:
    yard.add(base_model("qwen:poet"))
    exists(yard.add_adapter("poet", "qwen"), "'qwen:poet'", "model")
    exists(yard.add_adapter("new", "qwen", aliases=["poet"]), "'qwen:poet'")
    assert yard.add_adapter("poet", "llama").status == "accepted"


def test_scn_d3_an_adapter_makes_no_pair_that_another_one_has(yard: AdapterYard) -> None:
    """`llama:x:y` would be `x:y` of `llama` or `y` of `llama:x`."""
    yard.add(base_model("llama:x"))
    assert yard.add_adapter("y", "llama:x").status == "accepted"
    exists(yard.add_adapter("x:y", "llama"), "'llama:x:y'")


def test_scn_d3_a_base_gets_no_alias_that_makes_such_a_pair(yard: AdapterYard) -> None:
    yard.add(base_model("tiny:sql"))
    answer = yard.do(CatalogApply(entries=[entry("llama", aliases=["big", "tiny"])]))
    exists(answer, "'tiny:sql'")
    assert answer.problems[0].path == "[0].aliases[1]"
    other = yard.do(CatalogApply(entries=[entry("llama", aliases=["big", "small"])]))
    assert other.status == "accepted", other


def test_a_base_gets_no_alias_that_makes_one_pair_of_two_of_its_adapters(yard: AdapterYard) -> None:
    """`llama:x:y` asks for `x:y`; with the alias `llama:x` it would ask for `y` as well."""
    yard.have("x:y")
    yard.have("y")
    exists(
        yard.do(CatalogApply(entries=[entry("llama", aliases=["llama:x"])])), "'llama:x:y'", "'y'"
    )
    yard.drop("x:y")
    free = yard.do(CatalogApply(entries=[entry("llama", aliases=["llama:x"])]))
    assert free.status == "accepted", free


def test_the_same_pair_of_one_adapter_is_no_clash(yard: AdapterYard) -> None:
    assert yard.do(CatalogApply(entries=[entry("llama", aliases=["big"])])).status == "accepted"


def test_a_name_is_free_again_once_its_adapter_is_removed(yard: AdapterYard) -> None:
    assert yard.drop("sql").status == "accepted"
    assert yard.do(ModelAdd(entry=entry("sql"))).status == "accepted"
    assert yard.add_adapter("db").status == "accepted"


def test_an_adapter_takes_no_name_that_a_running_job_is_about_to_add(yard: AdapterYard) -> None:
    yard.hub["owner/model-gguf"] = repo()
    yard.serve(name="smol", aliases=["tiny", "llama:poet"])
    yard.reports.extend(yard.perform(task) for task in yard.tasks())
    yard.settle()
    exists(yard.add_adapter("smol"), "job j-0001")
    exists(yard.add_adapter("tiny"), "job j-0001")
    exists(yard.add_adapter("poet"), "job j-0001", "'llama:poet'")
    assert yard.add_adapter("poet", "qwen").status == "accepted"


def test_a_serve_job_takes_no_name_of_an_adapter() -> None:
    from tests.support.serving import repo

    yard = adapter_yard()
    yard.hub["owner/model-gguf"] = repo()
    yard.have("sql")
    yard.serve(name="sql")
    yard.run_workers()
    assert yard.job().state == "failed"
    assert yard.job().code == codes.EXISTS
    assert "adapter" in yard.job().error
    assert yard.steps() == [("registry", "failed")], "before anything is downloaded"


@pytest.mark.parametrize(
    ("fields", "path", "told"),
    [
        ({"name": ""}, "name", "1 to 200"),
        ({"name": " a"}, "name", "spaces"),
        ({"name": "a\nb"}, "name", "control"),
        ({"name": "sql@0123abcd"}, "name", "version"),
        ({"name": "sql@0123abcd.2"}, "name", "version"),
        ({"name": "a", "aliases": ["a"]}, "aliases[0]", "twice"),
        ({"name": "a", "aliases": ["b", "b"]}, "aliases[1]", "twice"),
        ({"name": "a", "aliases": ["x" * 201]}, "aliases[0]", "201"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(
    yard: AdapterYard, fields: dict[str, Any], path: str, told: str
) -> None:
    answer = yard.add_adapter(**{"source": "x/y", **fields})
    assert answer.status == "rejected"
    assert answer.code == codes.INVALID
    assert [p.path for p in answer.problems] == [path]
    assert told in answer.problems[0].sentence


def test_a_name_with_an_at_sign_that_is_no_version_is_fine(yard: AdapterYard) -> None:
    assert yard.add_adapter("sql@home").status == "accepted"


def test_scn_d3_an_adapter_is_never_told_to_an_engine_by_the_name_of_its_base() -> None:
    """vLLM would answer for the base with the adapter from then on."""
    yard = adapter_yard(base_model("sql@0123abcd"))
    exists(yard.add_adapter("sql", "sql@0123abcd"), "'sql@0123abcd'")
    assert yard.add_adapter("sq", "sql@0123abcd", aliases=["sql"]).status == "accepted"
