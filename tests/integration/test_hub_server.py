"""The hub of the tests does what the Hub does, as far as readers depend on it, and goes wrong as it is told."""

import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from controlplane.registry import listing
from tests.hub.contents import PIECE, Content, Held, MadeUp, OnDisk
from tests.hub.faults import Fault
from tests.hub.repos import Entry
from tests.hub.server import Hub

ROOT = Path(__file__).resolve().parents[2]
PATH = "dir/model-Q4_K_M.gguf"
FILE = f"owner/Model/{PATH}"
BIG = MadeUp(2 * PIECE + 11, seed=3)
WAIT_S = 10.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        readme = Entry(content=Held(b"# a model\n"), lfs=False)
        hub.repo("owner/Model").commit({PATH: BIG, "README.md": readme})
        yield hub


class Answer:
    """One answer, read to its end or as far as it came."""

    def __init__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=WAIT_S)
        given = dict(headers or {})
        try:
            connection.request(method, f"{parts.path}?{parts.query}", body=body, headers=given)
            answer = connection.getresponse()
            self.status = answer.status
            self.headers = answer.headers
            self.cut = False
            try:
                self.body = answer.read()
            except http.client.IncompleteRead as short:
                self.body, self.cut = short.partial, True
        finally:
            connection.close()

    def json(self) -> Any:
        return json.loads(self.body)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def api(
    hub: Hub, repo_id: str = "owner/Model", behind: str = "?blobs=true", who: str = ""
) -> Answer:
    return Answer(f"{hub.url}/api/models/{repo_id}{behind}", headers=bearer(who))


def resolve(hub: Hub, path: str = PATH, method: str = "GET") -> Answer:
    return Answer(f"{hub.url}/owner/Model/resolve/main/{path}", method)


def bytes_from(hub: Hub, asked: str | None = None, **headers: str) -> Answer:
    """`asked` is a Range."""
    repo = hub.shelf.find("owner/Model")
    assert repo is not None
    if asked is not None:
        headers["Range"] = asked
    return Answer(hub.cdn_address("owner/Model", repo.main, PATH), headers=headers)


def test_the_hubs_own_client_library_lists_and_downloads_from_it(hub: Hub, tmp_path: Path) -> None:
    library = listing._load()
    info = library.HfApi(endpoint=hub.url, token=False).model_info(
        "owner/model", files_metadata=True
    )
    assert (info.id, info.gated, len(info.siblings)) == ("owner/Model", False, 2)
    for path, content in ((PATH, BIG), ("README.md", Held(b"# a model\n"))):
        # Whatever it asks for on the way is answered as the real one answers.
        where = library.hf_hub_download(
            "owner/model", path, endpoint=hub.url, token=False, cache_dir=tmp_path
        )
        read = Path(where).read_bytes()
        assert hashlib.sha256(read).hexdigest() == content.sha256


@pytest.mark.parametrize("content", [BIG, MadeUp(5), MadeUp(3 * PIECE, head=b"GGUF" * 400_000)])
def test_a_made_up_file_is_the_same_however_it_is_read(content: Content) -> None:
    whole = content.read(0, content.size + 9)
    assert len(whole) == content.size
    assert whole.startswith(b"GGUF")
    assert content.sha256 == hashlib.sha256(whole).hexdigest()
    for offset in (0, 1, PIECE - 3, PIECE, 2 * PIECE - 1, content.size - 1, content.size, 2**40):
        for length in (0, 1, 7, PIECE + 5):
            assert content.read(offset, length) == whole[offset : offset + length]


def test_made_up_files_of_other_seeds_and_other_blocks_differ() -> None:
    assert MadeUp(BIG.size, seed=3).sha256 == BIG.sha256 != MadeUp(BIG.size, seed=4).sha256
    long = MadeUp(6 * PIECE)
    assert len({long.read(PIECE * index + 64, 64) for index in range(6)}) == 6


def test_a_listing_tells_sizes_and_sums_when_asked_for_them(hub: Hub) -> None:
    told = api(hub).json()
    assert (told["id"], told["gated"], told["private"]) == ("owner/Model", False, False)
    readme, model = told["siblings"]
    assert (readme["rfilename"], readme["size"], "lfs" in readme) == ("README.md", 10, False)
    assert model["lfs"] == {"sha256": BIG.sha256, "size": BIG.size, "pointerSize": 135}
    bare = api(hub, behind="").json()["siblings"]
    assert bare == [{"rfilename": "README.md"}, {"rfilename": PATH}]
    assert api(hub, behind=f"/revision/{told['sha']}").json()["sha"] == told["sha"]


def test_a_file_is_an_address_at_another_host(hub: Hub) -> None:
    for method in ("HEAD", "GET"):
        answer = resolve(hub, method=method)
        assert answer.status == 302
        assert answer.headers["Location"].startswith(f"{hub.cdn_url}/")
        assert answer.headers["X-Linked-Size"] == str(BIG.size)
        assert answer.headers["X-Linked-ETag"] == answer.headers["ETag"] == f'"{BIG.sha256}"'
        assert answer.headers["X-Repo-Commit"] == api(hub).json()["sha"]
    plain = resolve(hub, "README.md")
    assert (plain.status, plain.body) == (200, b"# a model\n")
    assert len(plain.headers["ETag"].strip('"')) == 40


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        (None, 200, 0, BIG.size),
        ("bytes=0-", 206, 0, BIG.size),
        ("bytes=5-9", 206, 5, 10),
        ("bytes=1048570-1048585", 206, 1048570, 1048586),
        ("bytes=7-99999999", 206, 7, BIG.size),
        ("bytes=-5", 206, BIG.size - 5, BIG.size),
        ("bytes=9-5", 416, 0, 0),
        (f"bytes={BIG.size}-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("lines=1-2", 200, 0, BIG.size),
        ("bytes=0-1,4-5", 200, 0, BIG.size),
    ],
)
def test_ranges(hub: Hub, asked: str | None, status: int, start: int, end: int) -> None:
    answer = bytes_from(hub, asked)
    assert answer.status == status
    assert answer.body == BIG.read(start, end - start)
    told = {
        200: None,
        206: f"bytes {start}-{end - 1}/{BIG.size}",
        416: f"bytes */{BIG.size}",
    }
    assert answer.headers["Content-Range"] == told[status]


def test_a_part_is_sent_only_of_the_file_the_reader_has(hub: Hub) -> None:
    same = bytes_from(hub, "bytes=5-9", **{"If-Range": f'"{BIG.sha256}"'})
    other = bytes_from(hub, "bytes=5-9", **{"If-Range": '"another"'})
    assert (same.status, other.status) == (206, 200)


def test_the_other_host_refuses_tokens_and_addresses_that_expired(hub: Hub) -> None:
    assert bytes_from(hub, Authorization="Bearer x").status == 400
    address = resolve(hub).headers["Location"]
    assert Answer(address, "HEAD").status == 200
    hub.expire()
    assert Answer(address).status == 403
    assert Answer(f"{hub.cdn_url}/owner/Model/nothing").status == 404


@pytest.mark.parametrize(
    ("who", "repo", "status", "code"),
    [
        ("", "owner/Missing", 401, "RepoNotFound"),
        ("hf_other", "owner/Missing", 404, "RepoNotFound"),
        ("", "owner/Private", 401, "RepoNotFound"),
        ("hf_other", "owner/Private", 404, "RepoNotFound"),
        ("hf_granted", "owner/Private", 200, None),
        ("", "owner/Gated", 200, None),
        ("hf_unknown", "owner/Model", 401, None),
        ("", "owner/Old", 307, None),
        ("", "OWNER/model", 307, None),
    ],
)
def test_who_may_list_what(hub: Hub, who: str, repo: str, status: int, code: str | None) -> None:
    for name in ("Private", "Gated", "Old"):
        private, gated = name == "Private", "auto" if name == "Gated" else None
        hub.repo(f"owner/{name}", private=private, gated=gated).commit({PATH: BIG})
    hub.shelf.rename("owner/Old", "owner/New")
    hub.reader("hf_granted", "owner/Private", "owner/Gated")
    hub.reader("hf_other")
    answer = api(hub, repo, who=who)
    assert (answer.status, answer.headers["X-Error-Code"]) == (status, code)
    if status == 307:
        assert answer.headers["Location"].endswith(
            ("/owner/New?blobs=true", "/owner/Model?blobs=true")
        )


def test_a_gated_file_needs_a_token_with_access(hub: Hub) -> None:
    hub.repo("owner/Gated", gated="manual").commit({PATH: BIG})
    hub.reader("hf_granted", "owner/Gated")
    hub.reader("hf_other")
    url = f"{hub.url}/owner/Gated/resolve/main/{PATH}"
    statuses = [
        Answer(url).status,
        Answer(url, headers=bearer("hf_other")).status,
        Answer(url, headers=bearer("hf_granted")).status,
    ]
    assert statuses == [401, 403, 302]
    assert Answer(url).headers["X-Error-Code"] == "GatedRepo"


def test_what_is_not_there_is_said_by_its_code(hub: Hub) -> None:
    assert resolve(hub, "other.gguf").headers["X-Error-Code"] == "EntryNotFound"
    assert api(hub, behind="/revision/v9").headers["X-Error-Code"] == "RevisionNotFound"
    assert Answer(f"{hub.url}/").status == 404


def test_main_moves_and_commits_stay(hub: Hub) -> None:
    before = api(hub).json()["sha"]
    repo = hub.shelf.find("owner/Model")
    assert repo is not None
    after = repo.commit({PATH: MadeUp(99)})
    assert api(hub).json()["sha"] == after != before
    assert api(hub, behind=f"/revision/{before}?blobs=1").json()["siblings"][1]["size"] == BIG.size


def test_a_connection_is_cut_at_the_byte(hub: Hub) -> None:
    hub.fault(Fault(at="cdn", cut_at=PIECE + 5, skip=1, times=1))
    assert not bytes_from(hub).cut
    cut = bytes_from(hub, "bytes=9-")
    assert (cut.cut, cut.body) == (True, BIG.read(9, PIECE - 4))
    assert not bytes_from(hub).cut


def test_an_answer_stands_still_until_the_fault_is_cleared(hub: Hub) -> None:
    fault = hub.fault(Fault(at="cdn", stall_at=PIECE))
    answers: list[Answer] = []
    reader = threading.Thread(target=lambda: answers.append(bytes_from(hub)))
    reader.start()
    assert hub.counters.wait_bytes(FILE, PIECE, WAIT_S)
    assert not hub.faults.wait_cleared(fault, 0.05)
    assert hub.counters.bytes_of(FILE) == PIECE
    hub.faults.clear()
    reader.join(WAIT_S)
    assert answers[0].body == BIG.read(0, BIG.size)


def test_wrong_bytes_short_files_pages_and_whole_files(hub: Hub) -> None:
    hub.fault(Fault(at="cdn", wrong_at=PIECE + 1, times=1))
    hub.fault(Fault(at="cdn", short_at=PIECE, skip=1, times=1))
    hub.fault(Fault(at="cdn", html=True, skip=2, times=1))
    hub.fault(Fault(at="cdn", ignore_range=True, skip=3, times=1))
    hub.fault(Fault(at="cdn", lie_range=True, skip=4, times=1))
    wrong = bytes_from(hub).body
    right = BIG.read(0, BIG.size)
    pairs = enumerate(zip(wrong, right, strict=True))
    assert [index for index, (sent, meant) in pairs if sent != meant] == [PIECE + 1]
    short = bytes_from(hub)
    assert (short.cut, short.body) == (False, BIG.read(0, PIECE))
    page = bytes_from(hub)
    assert (page.status, page.headers.get_content_type()) == (200, "text/html")
    whole = bytes_from(hub, "bytes=5-9")
    assert (whole.status, len(whole.body)) == (200, BIG.size)
    lie = bytes_from(hub, "bytes=5-9")
    assert (lie.headers["Content-Range"], lie.body) == (f"bytes 5-9/{BIG.size}", BIG.read(0, 5))


def test_a_status_of_the_tests_own(hub: Hub) -> None:
    hub.fault(Fault(at="api", path="owner/Model", status=429, headers={"Retry-After": "3"}))
    hub.fault(Fault(at="resolve", path=PATH, redirect="http://elsewhere.invalid/"))
    assert (api(hub).status, api(hub).headers["Retry-After"]) == (429, "3")
    assert api(hub, "owner/Missing").status == 401
    assert resolve(hub).headers["Location"] == "http://elsewhere.invalid/"
    assert resolve(hub, "README.md").status == 200


def test_bytes_go_out_no_faster_than_told(hub: Hub) -> None:
    hub.pace.set(4 * BIG.size)
    began = time.monotonic()
    readers = [threading.Thread(target=bytes_from, args=(hub,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(WAIT_S)
    # Two files at four files a second, less what may go out at the first moment.
    assert time.monotonic() - began > 0.4
    assert hub.counters.bytes_of(FILE) == 2 * BIG.size


def test_every_byte_and_every_request_is_counted(hub: Hub) -> None:
    api(hub)
    bytes_from(hub, "bytes=0-9")
    bytes_from(hub, "bytes=5-14")
    counts = hub.counters.counts()
    assert counts.bytes == {FILE: 20}
    assert [(one.at, one.status, one.range, one.sent) for one in counts.requests] == [
        ("api", 200, "", 0),
        ("cdn", 206, "bytes=0-9", 10),
        ("cdn", 206, "bytes=5-14", 10),
    ]
    hub.counters.reset()
    assert hub.counters.counts().bytes == {}


def test_open_connections_can_be_cut_and_end_with_the_hub() -> None:
    hub = Hub()
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=WAIT_S)
    for end in (hub.cut, hub.close):
        connection.request("GET", "/")
        connection.getresponse().read()
        assert connection.sock is not None
        socket = connection.sock
        end()
        assert socket.recv(1) == b""
        connection.close()


class Program:
    """`python -m tests.hub` with these arguments."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.url = self.output.readline().strip()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    file = tmp_path / "small-Q4_1.gguf"
    file.write_bytes(b"GGUF on disk")
    with Program(
        *("--file", str(file), "--file", f"sub/other.gguf={file}", "--made-up", "big.gguf:1MiB:7"),
        *("--repo", "o/m", "--rate", "512KiB", "--gated", "auto", "--token", "hf_x"),
    ) as program:
        yield program


def test_the_program_serves_adapters_of_their_own_repositories() -> None:
    with Program("--adapter", "o/polite:16", "--adapter", "o/rude", "--base", "o/base") as program:
        told = Answer(f"{program.url}/api/models/o/polite?blobs=1").json()
        assert [one["rfilename"] for one in told["siblings"]] == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        config = Answer(f"{program.url}/o/polite/resolve/main/adapter_config.json").json()
        assert (config["r"], config["base_model_name_or_path"]) == (16, "o/base")
        config = Answer(f"{program.url}/o/rude/resolve/main/adapter_config.json").json()
        assert config["r"] == 8


def test_the_program_serves_files_and_ends_when_told(program: Program) -> None:
    told = Answer(f"{program.url}/api/models/o/m?blobs=1").json()
    assert [(one["rfilename"], one["size"]) for one in told["siblings"]] == [
        ("README.md", 30),
        ("big.gguf", 1024**2),
        ("small-Q4_1.gguf", 12),
        ("sub/other.gguf", 12),
    ]
    assert told["siblings"][1]["lfs"]["sha256"] == MadeUp(1024**2, seed=7).sha256
    assert told["gated"] == "auto"
    url = f"{program.url}/o/m/resolve/main/sub/other.gguf"
    assert Answer(url).status == 401
    address = Answer(url, headers=bearer("hf_x")).headers["Location"]
    assert Answer(address).body == b"GGUF on disk"
    program.process.send_signal(signal.SIGTERM)
    assert program.process.wait(WAIT_S) == 0


def test_the_program_is_steered_over_http(program: Program) -> None:
    control = f"{program.url}/-"
    listed = f"{program.url}/api/models/o/m"

    def post(name: str, **body: Any) -> Answer:
        return Answer(f"{control}/{name}", "POST", json.dumps(body).encode())

    assert post("faults", at="api", status=503).status == 204
    assert Answer(listed).status == 503
    assert Answer(f"{control}/faults", "DELETE").status == 204
    assert Answer(listed).status == 200
    assert post("faults", at="nowhere").status == 400
    assert post("rate", bytes_per_s=0).status == 204
    commit = post("commit", repo="o/m", made_up={"more.gguf": 7}, text={"a.txt": "b"}).json()
    told = Answer(listed).json()
    assert told["sha"] == commit["commit"]
    assert len(told["siblings"]) == 6
    counts = Answer(f"{control}/counts").json()
    assert [one["status"] for one in counts["requests"] if one["path"] == "o/m"] == [503, 200, 200]
    assert Answer(f"{control}/counts", "DELETE").status == 204
    assert Answer(f"{control}/nothing").status == 404


def test_the_program_ends_when_its_reader_is_gone() -> None:
    with Program("--made-up", "m.gguf:1K") as program:
        program.output.close()
        assert program.process.wait(WAIT_S) == 0


def test_the_program_needs_nothing_that_only_tests_need() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import sys, tests.hub.__main__; print(*sorted(sys.modules))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in said.stdout.split()}
    assert not loaded & {"pytest", "hypothesis", "httpx", "gguf", "numpy", "huggingface_hub"}


def test_a_file_on_disk_is_served_as_it_is(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(BIG.read(0, BIG.size))
    assert OnDisk(path).sha256 == BIG.sha256
    hub.repo("owner/Model").commit({PATH: OnDisk(path)})
    assert bytes_from(hub, "bytes=1000-1099").body == BIG.read(1000, 100)
