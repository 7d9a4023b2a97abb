"""The step of a serve job that writes the entry of the catalog."""

import pytest

from schemas import codes
from schemas.commands import ModelAdd
from schemas.job import Job
from tests.support.serving import llamacpp, serve_yard, shape


def test_req_c46_the_entry_is_the_one_a_person_would_write() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    y.serve(name="m", aliases=["a"], description="d", replicas=3)
    y.run_workers()
    entry = y.world.models["m"]
    assert (entry.aliases, entry.description) == (("a",), "d")
    assert (entry.context_length, entry.max_output) == (4096, 1024)
    assert (entry.scaling.min, entry.scaling.max) == (3, 3)
    [profile] = entry.profiles
    assert (profile.name, profile.engine, profile.card) == ("cpu", "llamacpp", ("cpu",))
    assert (profile.weight, profile.priority) == (1, 100)
    assert profile.args[:2] == ("--ctx-size", "16384")
    [added] = [item for item in y.log if item.type == "model.added"]
    [step] = [
        item
        for item in y.log
        if item.noun == "job" and item.seq == added.seq + 1 and isinstance(item.state, Job)
    ]
    assert step.state is not None
    assert y.steps()[4] == ("catalog", "done"), "in the same batch"


def test_weights_the_processor_gets_in_another_order_are_read_and_not_mapped() -> None:
    engines = (llamacpp("llama", kinds=("cpu", "gpu")),)
    mapped, read = (
        serve_yard(engines=engines, gpu_gib=24, header=shape(repacked=share)) for share in (0, 0.9)
    )
    for y in (mapped, read):
        y.serve()
        y.advance(10)
    cpu, gpu = read.world.models["model"].profiles
    assert cpu.args[-2:] == ("--load-mode", "none")
    assert "--load-mode" not in (*gpu.args, *mapped.world.models["model"].profiles[0].args)
    [job] = read.world.jobs.values()
    assert job.estimate is not None
    assert job.estimate.repacked_bytes == 0, "one copy is all there is"


def test_req_c50_a_gpu_that_llamacpp_can_use_gets_a_profile_that_comes_first() -> None:
    engines = (llamacpp("llama", kinds=("cpu", "gpu")),)
    y = serve_yard(engines=engines, gpu_gib=24)
    y.serve()
    y.advance(10)
    cpu, gpu = y.world.models["model"].profiles
    assert gpu.card == ("gpu",)
    assert gpu.priority > cpu.priority
    assert gpu.args == (*cpu.args, "--n-gpu-layers", "999")
    [(_, item)] = y.items("model")
    assert item.cards == ("gpu0",)


def test_req_c50_a_gpu_no_engine_can_use_gets_none() -> None:
    y = serve_yard(engines=(llamacpp("llama"),), gpu_gib=24)
    y.serve(replicas=0)
    y.run_workers()
    assert [p.name for p in y.world.models["model"].profiles] == ["cpu"]


def test_req_c12_who_asked_is_in_the_catalog() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    [added] = [item for item in y.log if item.type == "model.added"]
    assert getattr(added.event, "by", None) == "admin"


def test_req_c47_a_name_taken_during_the_download_fails_the_job() -> None:
    y = serve_yard()
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    entry = {
        "name": "model",
        "source": "/m.gguf",
        "scaling": {"min": 0, "max": 1},
        "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "1GiB"}],
    }
    y.do(ModelAdd(entry=entry))
    y.run_workers()
    assert y.steps()[-1] == ("catalog", "failed")
    assert y.job().code == codes.EXISTS
    assert y.world.models["model"].source == "/m.gguf", "and the other one is left alone"


def test_the_very_same_entry_is_no_hindrance() -> None:
    y = serve_yard()
    y.serve()
    y.advance(10)
    y.serve()
    y.advance(10)
    second = y.job("j-0002")
    assert second.state == "done"
    assert second.steps[4].detail == "model is in the catalog already, 1 replica kept running"
    assert y.started("model") == 1
    assert y.events("model").count("model.added") == 1


def test_an_entry_with_other_options_is_not_the_same() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    y.serve(replicas=0, aliases=["new"], ctx_pool=8192)
    y.run_workers()
    second = y.job("j-0002")
    assert second.code == codes.EXISTS
    assert "aliases, ctx_pool" in second.error


def test_req_c48_on_demand_the_job_is_done_with_its_entry() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    job = y.job()
    assert job.state == "done"
    assert job.steps[4].detail == "added on demand: it loads when first asked for"
    scaling = y.world.models["model"].scaling
    assert (scaling.min, scaling.max) == (0, 1)
    assert y.items() == []


def test_req_c7_on_demand_placement_and_smoke_test_are_skipped() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    assert y.steps()[4:] == [
        ("catalog", "done"),
        ("placement", "skipped"),
        ("smoke test", "skipped"),
    ]


@pytest.mark.parametrize(("replicas", "said"), [(1, "1 replica"), (2, "2 replicas")])
def test_req_c49_the_catalog_step_ends_with_the_name_and_how_many(replicas: int, said: str) -> None:
    y = serve_yard()
    y.serve(replicas=replicas)
    y.run_workers()
    assert y.job().steps[4].detail == f"model added, {said}"
