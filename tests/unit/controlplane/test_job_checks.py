"""What is checked of a serve job before anything is fetched: engines, memory, disks, context."""

from controlplane.domain import filesets
from controlplane.domain.work import ReadHeader
from schemas import codes
from tests.support.serving import COMMIT, SHARDS, join, llamacpp, repo, serve_yard, shape
from tests.support.worlds import GIB


def test_req_c41_an_architecture_no_engine_loads_fails_before_the_download() -> None:
    y = serve_yard(engines=(llamacpp("llama", "qwen2", version="b6000"),))
    y.header = shape(architecture="mamba9")
    y.serve()
    y.run_workers()
    job = y.job()
    assert job.code == codes.ARCHITECTURE_UNKNOWN
    assert job.error == (
        "llama.cpp b6000 on the nodes cannot run this: it does not know the architecture 'mamba9'"
    )
    assert y.steps() == [("registry", "done"), ("check", "failed")]
    assert y.fetched == []


def test_req_c41_one_node_whose_engine_loads_it_is_enough() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    join(y, "n2", engines=(llamacpp("llama", "mamba9"),))
    y.settle()
    y.header = shape(architecture="mamba9")
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().state == "done"


def test_req_c45_a_header_without_an_architecture_is_said_and_not_held_against_it() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    y.header, y.header_why = None, "version 7"
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().state == "done"
    assert y.job().steps[1].detail.startswith("architecture not read (version 7)")


def test_req_c43_the_estimate_says_its_parts() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    detail = y.job().steps[3].detail
    assert detail.startswith("llama, weights 1.0 GiB + KV cache ")
    assert "for 16384 tokens" in detail
    assert "engine" in detail
    made = y.job().estimate
    assert made is not None
    assert made.basis == "header"
    [profile] = y.world.models["model"].profiles
    assert profile.memory_bytes == -(-made.total_bytes // GIB) * GIB


def test_req_c44_without_a_shape_memory_follows_from_the_size_and_says_so() -> None:
    y = serve_yard(repo(size=3 * GIB))
    y.header = None
    y.serve(replicas=0)
    y.run_workers()
    made = y.job().estimate
    assert made is not None
    assert (made.basis, made.total_bytes) == ("size", 6 * GIB)
    assert "by the size of the files alone" in y.job().steps[1].detail


def test_req_c42_of_a_set_of_shards_the_first_is_read() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.header = shape(split_count=3)
    y.serve("o/m", quant="Q8_0", replicas=0)
    paths: list[tuple[str, bool]] = []
    for _ in range(20):
        for task in y.tasks():
            if isinstance(task, ReadHeader):
                paths.append((task.path, task.mirrored))
            y.reports.append(y.perform(task))
        y.settle()
    assert paths == [(SHARDS[0], False), (SHARDS[0], True)]
    assert y.job().state == "done"
    made = y.job().estimate
    assert made is not None
    assert made.basis == "header"
    assert made.weights_bytes == 3 * GIB, "of all shards"


def test_a_file_that_is_a_shard_of_something_else_is_told() -> None:
    y = serve_yard()
    y.header = shape(split_count=4)
    y.serve()
    y.run_workers()
    assert y.job().code == codes.SHARD_MISSING
    assert "4 shards" in y.job().error


def test_scn_c7_a_disk_smaller_than_the_files_is_refused_before_the_download() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.free_bytes = 2 * GIB
    y.serve("o/m", quant="Q8_0")
    y.run_workers()
    assert y.job().code == codes.DISK_FULL
    assert y.job().error == (
        "the mirror's disk has 2 GiB free, and 3 GiB of 3 GiB are still to be fetched; "
        "`yardctl mirror gc` removes what nothing needs, or give the mirror more disk"
    )
    assert y.fetched == []


def test_scn_c7_what_is_there_already_needs_no_room() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    y.free_bytes = 0
    y.serve("o/m", quant="Q8_0", replicas=0, name="again")
    y.run_workers()
    assert y.job("j-0002").state == "done"
    assert len(y.fetched) == 3


def test_scn_c7_what_a_fetch_has_reserved_needs_no_room_again() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.free_bytes = 2 * GIB
    y.reserved = {filesets.file_key("o/m", COMMIT, SHARDS[0]): GIB}
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    assert y.job().state == "done"


def test_scn_c7_the_same_bytes_at_another_commit_need_no_room() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    y.hub["o/m"] = repo("o/m", *SHARDS, commit="f" * 40)
    y.free_bytes = 0
    y.serve("o/m", quant="Q8_0", replicas=0, name="again")
    y.run_workers()
    assert y.job("j-0002").state == "done"


def test_scn_c12_a_context_longer_than_the_models_names_both_numbers() -> None:
    y = serve_yard()
    y.header = shape(trained_context=2048)
    y.serve(context_length=4096)
    y.run_workers()
    assert y.job().code == codes.CONTEXT_TOO_LONG
    assert "4096" in y.job().error
    assert "2048" in y.job().error
    assert y.fetched == []


def test_scn_c12_the_number_used_is_the_number_passed_and_shown() -> None:
    y = serve_yard()
    y.header = shape(trained_context=512)
    y.serve(replicas=0)
    y.run_workers()
    job, entry = y.job(), y.world.models["model"]
    assert job.context_length == entry.context_length == 512
    assert "context 512 tokens" in job.steps[1].detail
    assert entry.max_output == 512, "an answer is no longer than the context"
    y.header = shape(trained_context=8192)
    y.serve(replicas=0, name="b", context_length=8000)
    y.run_workers()
    assert y.world.models["b"].context_length == 8000
    # Two slots of 8192 leave each request what it was promised; four would not.
    assert y.world.models["b"].profiles[0].args == ("--ctx-size", "16384", "--parallel", "2")


def test_req_c51_a_model_that_fits_on_no_node_fails_before_the_download_with_the_report() -> None:
    y = serve_yard(repo(size=40 * GIB))
    y.serve()
    y.run_workers()
    assert y.job().code == codes.NO_CAPACITY
    assert y.job().error.startswith("no node can host it: n1/cpu: needs ")
    assert "has 16.0 GiB" in y.job().error
    assert y.fetched == []


def test_a_yard_without_nodes_says_so() -> None:
    y = serve_yard(gib=0)
    y.serve()
    y.run_workers()
    assert (y.job().code, y.job().error) == (codes.NO_CAPACITY, "no node has joined this yard")


def test_a_yard_whose_nodes_are_all_away_says_so() -> None:
    y = serve_yard()
    y.stop_agent("n1")
    y.serve()
    y.run_workers()
    assert (y.job().code, y.job().error) == (codes.NO_CAPACITY, "no node is reachable")


def test_a_model_that_fits_only_when_others_leave_is_not_refused() -> None:
    y = serve_yard(gib=3)
    y.serve(name="one")
    y.advance(10)
    y.serve(name="two", replicas=0)
    y.run_workers()
    assert y.job("j-0002").state == "done"
    assert "others must leave first" in y.job("j-0002").steps[1].detail
