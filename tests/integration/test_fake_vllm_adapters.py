"""The fake vLLM loads, lists and unloads adapters as vLLM was measured to and as its sources say, in each dialect."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.aio import run, until
from tests.support.fake_vllm import FAKE, fake_vllm, lora, tell
from tests.support.lora import CONFIG, WEIGHTS, write_adapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
DIALECTS = ("python", "old", "rust")
SHORT_S = 0.4


def post(endpoint: str, path: str, body: Any = None, timeout: float = 5) -> httpx.Response:
    return httpx.post(f"{endpoint}{path}", json=body, timeout=timeout)


def load(endpoint: str, name: str, path: Path | str, **more: Any) -> httpx.Response:
    return post(endpoint, LOAD, {"lora_name": name, "lora_path": str(path), **more})


def unload(endpoint: str, name: str, **more: Any) -> httpx.Response:
    return post(endpoint, UNLOAD, {"lora_name": name, **more})


def says(endpoint: str, model: str) -> str:
    answer = post(endpoint, "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def listed(endpoint: str) -> dict[str, str]:
    cards = httpx.get(f"{endpoint}/v1/models").json()["data"]
    return {card["id"]: card["root"] for card in cards if card["parent"]}


def error(answer: httpx.Response, dialect: str) -> tuple[int, str, str]:
    """Status, type and message, out of this dialect's envelope and no other."""
    told = answer.json()
    if dialect == "old":
        assert told["object"] == "error"
    else:
        assert set(told) == {"error"}
        told = told["error"]
    assert told["code"] == answer.status_code
    return answer.status_code, told["type"], told["message"]


def running(dialect: str, folder: Path, *flags: str, **script: Any):
    allowed = {"VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(folder)}
    return fake_vllm(*flags, adapters=True, dialect=dialect, environment=allowed, **script)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_loads_lists_answers_as_and_unloads_an_adapter(dialect: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0", "the marker")
    with running(dialect, tmp_path) as endpoint:
        assert says(endpoint, "smollm2") == "[base] w0 "
        done = load(endpoint, "a0", folder)
        assert (done.status_code, done.text) == (
            200,
            "Success: LoRA adapter 'a0' added successfully.",
        )
        assert done.headers["content-type"].startswith("text/plain")
        assert says(endpoint, "a0") == "[the marker] w0 "
        assert says(endpoint, "smollm2") == "[base] w0 "
        base, card = httpx.get(f"{endpoint}/v1/models").json()["data"]
        assert (base["parent"], base["root"]) == (None, "/models/smollm2")
        assert (card["id"], card["parent"], card["root"]) == ("a0", "smollm2", str(folder))
        gone = unload(endpoint, "a0")
        assert (gone.status_code, gone.text) == (
            200,
            "Success: LoRA adapter 'a0' removed successfully.",
        )
        assert listed(endpoint) == {}
        asked = post(endpoint, "/v1/completions", {"model": "a0", "prompt": "x"})
        status, kind, message = error(asked, dialect)
        assert (status, kind) == (404, "NotFoundError")
        assert message.startswith("The model `a0` does not exist.")
        told = lora(endpoint)
        # The Python front ends only forget the name: the copy stays until others push it out.
        assert told["resident"] == ([] if dialect == "rust" else ["a0"])
        assert (told["loads"], told["unloads"], told["asked_gone"]) == (1, 1, 1)
        assert told["answered"] == {"the marker": 1}


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (
            "python",
            "The lora adapter 'a0' has already been loaded. If you want to load the adapter in"
            " place, set 'load_inplace' to True.",
        ),
        ("old", "The lora adapter 'a0' has already been loaded."),
        (
            "rust",
            "The lora adapter 'a0' has already been loaded. If you want to load the adapter in"
            " place, set 'load_inplace' to true.",
        ),
    ],
)
def test_it_says_that_a_name_is_loaded_already(dialect: str, text: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")
    with running(dialect, tmp_path) as endpoint:
        load(endpoint, "a0", folder)
        status, _, message = error(load(endpoint, "a0", folder), dialect)
        assert (status, message) == (400, text)
        inplace = load(endpoint, "a0", folder, load_inplace=True)
        assert inplace.status_code == (400 if dialect == "old" else 200)


@pytest.mark.parametrize(
    ("dialect", "told"),
    [
        (
            "python",
            (
                500,
                "InternalServerError",
                "Call to add_lora method failed: Worker failed with error 'LoRA rank 64 is greater"
                " than max_lora_rank 16.', please check the stack trace above for the root cause",
            ),
        ),
        ("old", (400, "BadRequestError", "LoRA rank 64 is greater than max_lora_rank 16.")),
        (
            "rust",
            (
                500,
                "InternalServerError",
                "failed to load LoRA adapter 'a0': engine rejected the adapter",
            ),
        ),
    ],
)
@pytest.mark.parametrize("fields", [{"rank": 64}, {"rank": 8, "rank_pattern": {"q_proj": 64}}])
def test_it_refuses_a_rank_above_its_own(
    dialect: str, told: tuple[int, str, str], fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a0", **fields)
    with running(dialect, tmp_path) as endpoint:
        assert error(load(endpoint, "a0", folder), dialect) == told
        assert listed(endpoint) == {}
        assert lora(endpoint)["failed_loads"] == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"modules_to_save": ["lm_head"]}, "vLLM only supports modules_to_save being None."),
        ({"use_dora": True}, "vLLM does not yet support DoRA."),
        ({"bias": "all"}, "is unsupported LoRA weight"),
        ({"target_modules": ("q_proj", "experts")}, "but received ['experts']"),
    ],
)
def test_it_refuses_what_vllm_cannot_do(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0", **fields)
    with running("old", tmp_path) as endpoint:
        status, kind, message = error(load(endpoint, "a0", folder), "old")
        assert (status, kind) == (400, "BadRequestError")
        assert text in message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("lacks", ["all", CONFIG, WEIGHTS, "bytes"])
def test_it_finds_no_adapter_where_none_is(dialect: str, lacks: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")
    match lacks:
        case "all":
            folder = tmp_path / "none"
        case "bytes":
            (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])
        case _:
            (folder / lacks).unlink()
    with running(dialect, tmp_path) as endpoint:
        status, kind, message = error(load(endpoint, "ax", folder), dialect)
        text = f"Loading lora ax failed: No adapter found for {folder}"
        if dialect != "rust":
            assert (status, kind, message) == (404, "NotFoundError", text)
        elif lacks == "all":
            assert (status, message) == (
                400,
                "Local LoRA adapter path must exist and be accessible.",
            )
        else:
            assert (status, message) == (500, f"failed to load LoRA adapter 'ax': {text}")


@pytest.mark.parametrize(
    ("dialect", "status", "text"),
    [
        ("python", 400, "The lora adapter 'smollm2' conflicts with a served base model."),
        ("old", 200, ""),
        ("rust", 400, "The lora adapter name 'smollm2' conflicts with a served base model."),
    ],
)
def test_it_refuses_its_bases_name_or_lets_it_be_shadowed(
    dialect: str, status: int, text: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a0")
    with running(dialect, tmp_path) as endpoint:
        answer = load(endpoint, "smollm2", folder)
        assert answer.status_code == status
        assert says(endpoint, "smollm2") == ("[base] w0 " if text else "[a0] w0 ")
        if text:
            assert error(answer, dialect)[2] == text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_wants_names_and_paths_and_json(dialect: str, tmp_path: Path) -> None:
    with running(dialect, tmp_path) as endpoint:
        status, _, message = error(post(endpoint, LOAD, {}), dialect)
        missing = "lora_name must not be empty"
        assert status == 400
        assert message == (
            missing if dialect == "rust" else "Both 'lora_name' and 'lora_path' must be provided."
        )
        status, _, message = error(post(endpoint, UNLOAD, {}), dialect)
        assert status == 400
        assert message.endswith("needs to be provided to unload a LoRA adapter.") or (
            dialect == "old"
            and message == "either 'lora_name' and 'lora_int_id' needs to be provided."
        )
        plain = httpx.post(f"{endpoint}{LOAD}", content=b"{}")
        assert plain.status_code == 400
        status, _, message = error(unload(endpoint, "zzz"), dialect)
        assert status == 404
        assert message == (
            "The model `zzz` does not exist."
            if dialect == "rust"
            else "The lora adapter 'zzz' cannot be found."
        )


def test_its_routes_are_there_with_the_environment_alone(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")
    off = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    with fake_vllm(adapters=True, environment=off) as endpoint:
        for path in (LOAD, UNLOAD):
            absent = post(endpoint, path, {})
            assert (absent.status_code, absent.json()) == (404, {"detail": "Not Found"})
    on = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with fake_vllm(environment=on) as endpoint:
        assert load(endpoint, "a0", folder).status_code == 500  # no --enable-lora
        assert unload(endpoint, "a0").status_code == 404
        assert says(endpoint, "smollm2") == "w0 "


def test_its_routes_ask_for_the_key(tmp_path: Path) -> None:
    with fake_vllm(adapters=True, key="ek") as endpoint:
        assert load(endpoint, "a0", tmp_path).status_code == 401
        assert unload(endpoint, "a0").status_code == 401


def test_the_rust_front_end_reads_below_its_prefixes_alone(tmp_path: Path) -> None:
    inside = write_adapter(tmp_path / "sets" / "a0")
    outside = write_adapter(tmp_path / "other" / "a1")
    (tmp_path / "sets" / "link").symlink_to(outside)
    prefix = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"

    def refusal(told: str, path: Path | str) -> tuple[int, str]:
        with fake_vllm(adapters=True, dialect="rust", environment={prefix: told}) as endpoint:
            answer = load(endpoint, "a0", path)
            return answer.status_code, "" if answer.is_success else error(answer, "rust")[2]

    sets = str(tmp_path / "sets")
    assert refusal(sets, inside) == (200, "")
    assert refusal("", inside) == (
        400,
        f"Local LoRA adapter paths require {prefix} to be configured.",
    )
    status, text = refusal(sets, outside)
    assert status == 400
    assert "must be absolute and under one of the prefixes" in text
    status, text = refusal(sets, tmp_path / "sets" / ".." / "other" / "a1")
    assert "must be absolute and under one of the prefixes" in text
    status, text = refusal(sets, tmp_path / "sets" / "link")
    assert (status, text.partition(" is ")[2]) == (
        400,
        "outside the configured allowed prefixes.",
    )
    assert refusal(str(tmp_path / "none"), inside)[0] == 500
    assert refusal(sets, "owner/name")[0] == 500  # passes the list; the engine finds nothing


def test_the_rust_front_end_compares_numbers(tmp_path: Path) -> None:
    with running("rust", tmp_path) as endpoint:
        load(endpoint, "a0", write_adapter(tmp_path / "a0"))
        status, _, message = error(unload(endpoint, "a0", lora_int_id=7), "rust")
        assert (status, message) == (
            400,
            "The requested lora_int_id 7 does not match loaded adapter 'a0' with id 1.",
        )
        assert unload(endpoint, "a0", lora_int_id=1).status_code == 200


def test_its_cache_pushes_out_the_least_recently_used_and_reads_it_again(tmp_path: Path) -> None:
    with running("python", tmp_path) as endpoint:
        for n in range(4):
            load(endpoint, f"a{n}", write_adapter(tmp_path / f"a{n}"))
        says(endpoint, "a0")
        load(endpoint, "a4", write_adapter(tmp_path / "a4"))
        assert lora(endpoint)["resident"] == ["a2", "a3", "a0", "a4"]
        assert sorted(listed(endpoint)) == ["a0", "a1", "a2", "a3", "a4"]
        assert says(endpoint, "a1") == "[a1] w0 "
        told = lora(endpoint)
        assert (told["reloads"], told["resident"]) == (1, ["a3", "a0", "a4", "a1"])
        # Unloaded and loaded again: two copies, since an unload only forgets the name.
        unload(endpoint, "a1")
        load(endpoint, "a1", tmp_path / "a1")
        assert lora(endpoint)["resident"] == ["a0", "a4", "a1", "a1"]


def test_two_loads_of_a_name_exclude_each_other_but_in_the_old_one(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")

    async def both(endpoint: str) -> list[int]:
        async with httpx.AsyncClient(timeout=5) as client:
            body = {"lora_name": "a0", "lora_path": str(folder)}
            answers = await asyncio.gather(
                *(client.post(f"{endpoint}{LOAD}", json=body) for _ in range(2))
            )
        return sorted(answer.status_code for answer in answers)

    for dialect, statuses in (("python", [200, 400]), ("old", [200, 200]), ("rust", [200, 400])):
        with running(dialect, tmp_path, lora_load_s=0.3) as endpoint:
            assert run(both(endpoint)) == statuses
            assert lora(endpoint)["most_loading"] == (2 if dialect == "old" else 1)


def test_it_tells_running_and_waiting_adapters_and_unloads_in_use(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def story() -> None:
        flags = ("--max-loras", "1")
        with running("python", tmp_path, *flags, tokens=50, pace_s=0.01, lora_log=log) as endpoint:
            for name in ("a0", "a1"):
                load(endpoint, name, write_adapter(tmp_path / name))
            async with httpx.AsyncClient(timeout=20) as client:
                asked = [
                    asyncio.create_task(
                        client.post(
                            f"{endpoint}/v1/completions", json={"model": name, "prompt": "x"}
                        )
                    )
                    for name in ("a0", "a1")
                ]
                both = {"a0", "a1"}

                def busy() -> bool:
                    newest = newest_info(endpoint)
                    return {newest[0], newest[1]} == both

                await until(busy, "one adapter running and one waiting")
                first = newest_info(endpoint)[0]
                assert unload(endpoint, first).status_code == 200
                texts = [(await answer).json()["choices"][0]["text"] for answer in asked]
                assert [text.split()[0] for text in texts] == ["[a0]", "[a1]"]
                await until(lambda: newest_info(endpoint) == ("", ""), "nothing to run")
            told = lora(endpoint)
            assert told["evicted_in_use"] == [first]
            assert told["answered"] == {"a0": 1, "a1": 1}

    run(story())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["do"] for line in lines][:2] == ["load", "load"]
    assert sorted(line["do"] for line in lines[2:]) == ["begin", "begin", "end", "end", "unload"]
    assert next(line for line in lines if line["do"] == "unload")["running"] == 1


def newest_info(endpoint: str) -> tuple[str, str]:
    """Running and waiting adapters, by the newest of the gauge's label sets: old ones stay."""
    found = re.findall(
        r'^vllm:lora_requests_info\{max_lora="\d+",running_lora_adapters="(.*?)",'
        r'waiting_lora_adapters="(.*?)"\} (\S+)$',
        httpx.get(f"{endpoint}/metrics").text,
        re.MULTILINE,
    )
    running, waiting, _ = max(found, key=lambda one: float(one[2]), default=("", "", "0"))
    return running, waiting


def test_an_adapter_that_meets_none_of_the_target_modules_answers_as_the_base(
    tmp_path: Path,
) -> None:
    flags = ("--lora-target-modules", "o_proj", "k_proj")
    with running("python", tmp_path, *flags) as endpoint:
        assert load(endpoint, "a0", write_adapter(tmp_path / "a0")).status_code == 200
        assert says(endpoint, "a0") == "[base] w0 "
        o = write_adapter(tmp_path / "o", target_modules=("o_proj",))
        load(endpoint, "o", o)
        assert says(endpoint, "o") == "[o] w0 "


def test_its_processes_have_lists_of_their_own(tmp_path: Path) -> None:
    with running("python", tmp_path, processes=2) as endpoint:
        load(endpoint, "a0", write_adapter(tmp_path / "a0"))
        # Each of these is a connection of its own.
        assert sorted(len(listed(endpoint)) for _ in range(4)) == [0, 0, 1, 1]
        body = {"model": "a0", "prompt": "x"}
        statuses = {post(endpoint, "/v1/completions", body).status_code for _ in range(2)}
        assert statuses == {200, 404}


def test_it_forgets_and_lists_what_nobody_loaded(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")
    with running("python", tmp_path) as endpoint:
        load(endpoint, "a0", folder)
        tell(endpoint, "register", name="b", path=str(folder))
        assert listed(endpoint) == {"a0": str(folder), "b": str(folder)}
        assert says(endpoint, "b") == "[a0] w0 "
        tell(endpoint, "forget", name="b")
        assert list(listed(endpoint)) == ["a0"]
        tell(endpoint, "forget")
        assert listed(endpoint) == {}
        assert post(endpoint, "/v1/completions", {"model": "a0"}).status_code == 404


def test_faults_strike_the_adapter_and_as_often_as_told(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")
    with running("python", tmp_path, faults="lora-as-base") as endpoint:
        load(endpoint, "a0", folder)
        assert says(endpoint, "a0") == "[base] w0 "
        tell(endpoint, "clear")
        tell(endpoint, "fault", fault="lora-500", adapter="b*", times=1)
        assert load(endpoint, "a1", folder).status_code == 200
        assert load(endpoint, "b1", folder).status_code == 500
        assert load(endpoint, "b1", folder).status_code == 200
        tell(endpoint, "fault", fault="lora-answer", status=429, body={"error": "slow down"})
        refused = load(endpoint, "c", folder)
        assert (refused.status_code, refused.json()) == (429, {"error": "slow down"})
        tell(endpoint, "clear")
        tell(endpoint, "fault", fault="lora-wrong-root")
        load(endpoint, "d", folder)
        assert listed(endpoint)["d"] == "/elsewhere/a0"
        tell(endpoint, "fault", fault="lora-lost")
        assert load(endpoint, "e", folder).status_code == 200
        assert "e" not in listed(endpoint)
        tell(endpoint, "fault", fault="unload-keeps", adapter="d")
        assert unload(endpoint, "d").status_code == 200
        assert "d" in listed(endpoint)
        tell(endpoint, "fault", fault="unload-500", times=1)
        assert unload(endpoint, "a1").status_code == 500
        tell(endpoint, "fault", fault="unload-answer", status=408, times=1)
        assert unload(endpoint, "a1").status_code == 408
        tell(endpoint, "fault", fault="list-500", times=1)
        assert httpx.get(f"{endpoint}/v1/models").status_code == 500
        tell(endpoint, "fault", fault="list-garbage", times=1)
        with pytest.raises(ValueError, match="Expecting value"):
            httpx.get(f"{endpoint}/v1/models").json()
        tell(endpoint, "fault", fault="lora-route-off")
        assert load(endpoint, "f", folder).json() == {"detail": "Not Found"}
        assert unload(endpoint, "a1").json() == {"detail": "Not Found"}


def test_some_faults_are_silence(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")
    with running("python", tmp_path) as endpoint:
        for fault, path in (("lora-hangs", LOAD), ("unload-hangs", UNLOAD)):
            tell(endpoint, "fault", fault=fault, times=1)
            body = {"lora_name": "a0", "lora_path": str(folder)}
            with pytest.raises(httpx.ReadTimeout):
                post(endpoint, path, body, timeout=SHORT_S)
        tell(endpoint, "fault", fault="list-hangs", times=1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{endpoint}/v1/models", timeout=SHORT_S)
        # A load whose client went away is done all the same.
        tell(endpoint, "script", lora_load_s=0.6)
        with pytest.raises(httpx.ReadTimeout):
            post(endpoint, LOAD, {"lora_name": "s", "lora_path": str(folder)}, timeout=0.2)

        async def story() -> None:
            await until(lambda: "s" in listed(endpoint), "the load to be done")

        run(story())


def test_it_registers_early_and_dies_in_a_load_as_told(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a0")

    async def story() -> None:
        with running("python", tmp_path, lora_load_s=1) as endpoint:
            tell(endpoint, "fault", fault="lora-early", adapter="early")
            tell(endpoint, "fault", fault="lora-dies", adapter="last")
            async with httpx.AsyncClient(timeout=10) as client:
                body = {"lora_name": "early", "lora_path": str(folder)}
                loading = asyncio.create_task(client.post(f"{endpoint}{LOAD}", json=body))
                await until(lambda: "early" in listed(endpoint), "the name to be listed")
                assert not loading.done()
                assert (await loading).status_code == 200
            tell(endpoint, "script", lora_load_s=0)
            with pytest.raises(httpx.RemoteProtocolError):
                load(endpoint, "last", folder)
            with pytest.raises(httpx.ConnectError):
                listed(endpoint)

    run(story())


def test_it_streams_who_answers_in_the_first_frame(tmp_path: Path) -> None:
    with running("python", tmp_path) as endpoint:
        load(endpoint, "a0", write_adapter(tmp_path / "a0"))
        asked = {"model": "a0", "stream": True, "messages": [{"role": "user", "content": "a"}]}
        with httpx.stream("POST", f"{endpoint}/v1/chat/completions", json=asked) as answer:
            frames = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        words = [json.loads(f)["choices"][0]["delta"].get("content", "") for f in frames[:-1]]
        assert words[:2] == ["[a0] w0 ", "w1 "]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--max-loras", "4", "--max-cpu-loras", "2"),
            "max_cpu_loras (2) must be >= max_loras (4)",
        ),
        (("--max-lora-rank", "24"), "max_lora_rank (24) must be one of"),
    ],
)
def test_it_does_not_start_with_limits_that_contradict(flags: tuple[str, ...], text: str) -> None:
    argv = (sys.executable, "-I", "-S", str(FAKE), "serve", "m", "--enable-lora", *flags)
    ended = subprocess.run(argv, capture_output=True, check=False)
    assert ended.returncode == 1
    assert text in ended.stderr.decode()
