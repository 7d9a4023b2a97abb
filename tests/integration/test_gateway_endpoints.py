"""Every endpoint through a real gateway to the scripted engine: what arrives there, and what comes back."""

import asyncio
import gzip
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import RunningGateway
from gateway.domain.places import BY_ID, ENGINE_PATHS, INFERENCE
from schemas.key import KeyCreated
from tests.support.aio import run
from tests.support.gateway_keys import a_key, text_of
from tests.support.gateway_yard import Yard, memory_yard
from tests.support.http_wire import connected
from tests.support.scripted import ask, scripted

PATHS = (*ENGINE_PATHS, *BY_ID)
MIB = 1 << 20
NOT_SCRIPTED = {"/completion", "/embedding", "/infill", "/apply-template", "/pooling"}


@dataclass
class Served:
    """A gateway with the model `m` (alias `an alias`) on scripted engines; `endpoints` are theirs."""

    yard: Yard
    client: httpx.AsyncClient
    endpoints: list[str]
    gateway: RunningGateway

    @property
    def port(self) -> int:
        return self.gateway.port

    def seen(self, at: int = 0) -> list[dict[str, Any]]:
        """What that engine was asked to work on."""
        return ask(self.endpoints[at], "/script/requests")


@contextmanager
def engines(count: int, **script: Any) -> Iterator[list[str]]:
    with scripted(model="m", **script) as first:
        if count == 1:
            yield [first]
        else:
            with scripted(model="m", **script) as second:
                yield [first, second]


@asynccontextmanager
async def served(
    data: Path,
    replicas: int = 1,
    paths: tuple[str, ...] = PATHS,
    body_limit_bytes: int = 64 * MIB,
    **script: Any,
) -> AsyncIterator[Served]:
    with engines(replicas, **script) as endpoints:
        async with memory_yard(data) as yard:
            await yard.model(aliases=("an alias", "org/m"))
            for at, endpoint in enumerate(endpoints):
                await yard.replica(None, f"r-{at}", endpoint=endpoint, paths=paths)
            gateway = await yard.gateway(body_limit_bytes=body_limit_bytes)
            async with yard.client(gateway) as client:
                yield Served(yard, client, endpoints, gateway)


def form(boundary: str, *parts: tuple[str, bytes]) -> bytes:
    """The parts as they stand: a head without `Content-Disposition: form-data; ` and a content."""
    lines = [
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n"
        % (boundary.encode(), head.encode(), content)
        for head, content in parts
    ]
    return b"".join(lines) + b"--%b--\r\n" % boundary.encode()


FORM = {"content-type": 'multipart/form-data; boundary="b0und"'}
ASKED: dict[str, Any] = {
    "model": "m",
    "input": "a b",
    "messages": [{"role": "user", "content": "hi"}],
    "documents": ["a", "bbb"],
    "query": "q",
    "max_tokens": 2,
}


def test_every_endpoint_reaches_the_engine_as_it_was_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            content = json.dumps(ASKED).encode()
            for path in INFERENCE:
                for asked in (path, f"{path}/?a=%20b", f"/engines/m{path}"):
                    answer = await it.client.post(asked, content=content)
                    assert answer.status_code == 200, (asked, answer.text)
                    assert answer.headers["x-yard-waited-ms"] == "0"
                    last = it.seen()[-1]
                    assert (last["path"], last["body"]) == (path, ASKED)
                    assert last["headers"]["content-length"] == str(len(content))
                    assert last["headers"]["content-type"] == "application/json"
            # Of those that only stand below a model's engine.
            assert (await it.client.post("/engines/m/classify", json={})).status_code == 200
            for path in NOT_SCRIPTED:
                # The engine's own 404: the request came there.
                assert (await it.client.post(f"/engines/m{path}", json={})).status_code == 404

    run(story(), 60)


def test_an_endpoint_no_replica_publishes_is_not_supported_and_not_to_be_repeated(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with served(tmp_path, paths=("/v1/chat/completions",)) as it:
            answer = await it.client.post("/v1/rerank", json=ASKED)
            assert answer.status_code == 501
            assert answer.json()["error"]["code"] == "endpoint_not_supported"
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers
            answer = await it.client.post("/v1/messages", json=ASKED)
            assert answer.status_code == 501
            assert answer.json()["error"]["type"] == "api_error"
            answer = await it.client.get("/v1/responses/resp_1?model=m")
            assert answer.status_code == 501
            other = await it.client.post("/engines/m/infill", json={})
            assert other.status_code == 403
            assert other.json()["error"]["code"] == "route_not_forwarded"
            assert it.seen() == []

    run(story())


def test_scn_b2_a_name_is_the_engines_wherever_it_stands(tmp_path: Path) -> None:
    """JSON, a form, an address and a query; each with its right length, and the answer names what was asked for."""

    async def story() -> None:
        async with served(tmp_path) as it:
            for name in ("an alias", "org/m"):
                body = {**ASKED, "model": name}
                answer = await it.client.post("/v1/responses", json=body)
                assert answer.json()["model"] == name
                assert it.seen()[-1]["body"]["model"] == "m"
                spelled = httpx.URL(f"http://h/{name}").raw_path[1:].decode().replace("/", "%2F")
                base = f"/engines/{spelled}"
                answer = await it.client.post(f"{base}/tokenize", json={"prompt": "ab"})
                assert answer.json()["tokens"] == [97, 98]
                assert it.seen()[-1]["body"] == {"model": "m", "prompt": "ab"}
                answer = await it.client.post(f"{base}/detokenize", content=b" { } ")
                assert it.seen()[-1]["body"] == {"model": "m"}
                parts = [("name=model", name.encode()), ('name="file"; filename="ü"', b"x" * 9)]
                for ordered in (parts, parts[::-1]):
                    content = form("b0und", *ordered)
                    answer = await it.client.post(
                        "/v1/audio/transcriptions", content=content, headers=FORM
                    )
                    assert answer.status_code == 200, answer.text
                    last = it.seen()[-1]
                    sent = len(content) - len(name.encode()) + 1
                    assert last["headers"]["content-length"] == str(sent)
                    assert last["headers"]["content-type"] == FORM["content-type"]
                    assert last["body"]["model"] == "m"
                    assert last["body"]["file"]["sha256"] == hashlib.sha256(b"x" * 9).hexdigest()
                # A form below an engine's address need not name the model; then it is told.
                content = form("b0und", ("name=prompt", b"p"))
                await it.client.post(f"{base}/v1/images/edits", content=content, headers=FORM)
                assert it.seen()[-1]["body"] == {"model": "m", "prompt": "p"}
            other = await it.client.post("/engines/m/tokenize", json={"model": "x"})
            assert other.status_code == 400
            assert "two different models" in other.json()["error"]["message"]
            nameless = await it.client.post("/engines/m/tokenize", json={"model": None})
            assert nameless.status_code == 400
            assert nameless.json()["error"]["param"] == "model"

    run(story(), 60)


def test_what_stands_beside_the_model_is_for_the_engine_to_judge(tmp_path: Path) -> None:
    """A name below an engine's address that is no text is passed on as it is, as everywhere else."""

    async def story() -> None:
        async with served(tmp_path) as it:
            for base, body in (("/engines/m", b'{"\xff":1}'), ("", b'{"model":"m","\xff":1}')):
                answer = await it.client.post(f"{base}/tokenize", content=body)
                assert answer.status_code == 400, answer.text
                assert answer.headers["x-yard-model"] == "m", "the engine said so"

    run(story(), 60)


def test_scn_b2_streams_of_whole_answers_name_the_alias_too(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            for path, inner in (("/v1/responses", "response"), ("/v1/messages", "message")):
                body = {**ASKED, "model": "an alias", "stream": True}
                answer = await it.client.post(path, json=body)
                lines = [x[6:] for x in answer.text.splitlines() if x.startswith("data: ")]
                whole = [e[inner]["model"] for e in map(json.loads, lines) if inner in e]
                assert whole
                assert set(whole) == {"an alias"}

    run(story())


def test_what_is_no_text_is_untouched_under_an_alias(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            for name in ("m", "an alias"):
                answer = await it.client.post("/v1/audio/speech", json={**ASKED, "model": name})
                assert answer.headers["content-type"] == "audio/mpeg"
                assert answer.content == b'\xff\xfb\x90\x00{"model":"scripted"}\x00' * 2

    run(story())


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", ["m", "an alias"])
def test_scn_b10_a_forms_file_of_40_mib_before_its_model_arrives_byte_for_byte(
    tmp_path: Path, name: str
) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            block = bytes(range(256)) * 256  # 64 KiB with every byte and no boundary
            digest = hashlib.sha256()
            most = 0
            before = _rss_bytes()

            async def content() -> AsyncIterator[bytes]:
                nonlocal most
                yield (
                    b"--b0und\r\nContent-Disposition: form-data; name=file; "
                    b'filename="\xe6\xa8\xa1\xe5\x9e\x8b 1.wav"\r\nContent-Type: audio/wav\r\n\r\n'
                )
                for _ in range(40 * 16):
                    digest.update(block)
                    yield block
                    most = max(most, _rss_bytes() - before)
                yield b"\r\n" + form("b0und", ('name="model"', name.encode()))

            task = asyncio.create_task(
                it.client.post("/v1/audio/transcriptions", content=content(), headers=FORM)
            )
            while not task.done():
                await asyncio.sleep(0.01)
                most = max(most, _rss_bytes() - before)
            answer = task.result()
            assert answer.status_code == 200, answer.text
            file = it.seen()[-1]["body"]["file"]
            assert file["size"] == 40 * MIB
            assert file["sha256"] == digest.hexdigest()
            assert file["filename"] == "模型 1.wav"
            assert it.seen()[-1]["body"]["model"] == "m"
            assert answer.json()["text"].startswith("模型 1.wav")
            # The client, the gateway and all it keeps are this process; the file is 40 MiB.
            assert most < 20 * MIB, f"{most / MIB:.1f} MiB"

    run(story(), 90)


def test_a_form_that_cannot_be_read_for_certain_reaches_no_engine(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            path = "/v1/audio/transcriptions"
            cases: list[tuple[dict[str, str], bytes, int, str]] = [
                (FORM, form("b0und", ("name=file", b"x")), 400, "provide a model"),
                (FORM, form("b0und", ("name=model", b"m"))[:-6], 400, "last boundary"),
                (FORM, form("other", ("name=model", b"m")), 400, "begin with its boundary"),
                ({"content-type": "multipart/form-data"}, b"", 400, "boundary"),
                ({"content-type": "audio/wav"}, b"RIFF", 415, "audio/wav"),
                (FORM, form("b0und", *[("name=model", b"m")] * 2), 400, "more than one"),
            ]
            for headers, content, status, said in cases:
                answer = await it.client.post(path, content=content, headers=headers)
                assert answer.status_code == status, answer.text
                assert said in answer.json()["error"]["message"]
            content = form("b0und", ("name=model", b"m"))
            answer = await it.client.post("/v1/chat/completions", content=content, headers=FORM)
            assert answer.status_code == 415
            assert it.seen() == []

    run(story())


def test_scn_b13_no_model_anywhere_is_400_and_a_query_names_one_where_there_is_no_body(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            for path in INFERENCE:
                answer = await it.client.post(path, json={"input": "x"})
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert "provide a model" in error["message"]
                assert (await it.client.post(path)).status_code == 400
                # A body that is there must name it itself.
                answer = await it.client.post(f"{path}?model=m", json={"input": "x"})
                assert answer.status_code == 400
            for query in ("model=a&model=b", "model=", "model=%FF"):
                assert (await it.client.post(f"/tokenize?{query}")).status_code == 400
            assert it.seen() == []
            # The engine's own 400: an empty body came there, under its own name.
            answer = await it.client.post("/tokenize?a=b&model=an+alias&c=")
            assert answer.status_code == 400
            assert "bad request" in answer.json()["error"]["message"]

    run(story())


def test_a_response_is_asked_for_where_it_was_given(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, replicas=2) as it:

            async def give(at: int) -> dict[str, Any]:
                name = "an alias" if at % 2 else "m"
                body = {"model": name, "input": f"{at}", "stream": at > 3}
                # All at once and slowly, so that both replicas have some.
                body["script"] = {"first_byte_s": 0.5}
                answer = await it.client.post("/v1/responses", json=body)
                assert answer.status_code == 200
                if at <= 3:
                    return answer.json()
                line = next(x for x in answer.text.splitlines() if x.startswith("data: "))
                return {**json.loads(line[6:])["response"], "model": name}

            given = await asyncio.gather(*(give(at) for at in range(6)))
            # Either engine has some of them, and knows none of the other's.
            assert all(it.seen(at) for at in (0, 1))
            for response in given:
                url = f"/v1/responses/{response['id']}"
                found = await it.client.get(url)
                assert found.status_code == 200, found.text
                assert found.json()["model"] == response["model"]
            one = f"/v1/responses/{given[-1]['id']}"
            assert (await it.client.post(f"{one}/cancel")).json()["status"] == "cancelled"
            assert (await it.client.get(f"{one}/input_items")).json()["data"] == []
            assert (await it.client.delete(one)).json()["deleted"]
            gone = await it.client.get(one)
            assert gone.status_code == 404
            assert "not found" in gone.json()["error"]["message"]

    run(story(), 60)


def test_a_response_nobody_remembers_is_404_and_starts_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            unknown = await it.client.get("/v1/responses/resp_77")
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "response_not_found"
            assert "?model=" in unknown.json()["error"]["message"]
            # Who names the model may ask one of its engines.
            asked = await it.client.get("/v1/responses/resp_77?model=an%20alias")
            assert asked.status_code == 404
            assert "resp_77" in asked.json()["error"]["message"]
            for base in ("/engines/m", "/engines/an%20alias"):
                asked = await it.client.get(f"{base}/v1/responses/resp_77")
                assert "resp_77" in asked.json()["error"]["message"]
                asked = await it.client.get(f"{base}/v1/responses/resp_77?model=other")
                assert asked.status_code == 400
            answer = await it.client.post("/v1/responses", json={"model": "m", "input": "x"})
            url = f"/v1/responses/{answer.json()['id']}"
            assert (await it.client.get(f"{url}?model=m")).status_code == 200
            await it.yard.model("cold")
            seq = await it.yard.replica(None, "r-0", "stopped")
            await it.yard.applied(await it.yard.gateway("other"), seq)
            for path in (url, f"{url}?model=m", "/v1/responses/resp_77?model=cold"):
                gone = await it.client.get(path)
                assert gone.status_code == 404
                assert gone.json()["error"]["code"] == "response_not_found"
            assert await it.yard.activates() == []

    run(story(), 60)


def test_scn_b11_at_messages_every_refusal_has_anthropics_form(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, tokens=3, body_limit_bytes=4 * MIB) as it:
            refusals: list[tuple[int, str, dict[str, Any]]] = [
                (404, "not_found_error", {"json": {**ASKED, "model": "x"}}),
                (400, "invalid_request_error", {"json": {"messages": []}}),
                (400, "invalid_request_error", {"content": b"{"}),
                (413, "request_too_large", {"content": b" " * (5 * MIB)}),
                (415, "invalid_request_error", {"content": b"", "headers": FORM}),
                (500, "api_error", {"json": {**ASKED, "script": {"status": 500}}}),
                (502, "api_error", {"json": {**ASKED, "script": {"html_502": 1}}}),
                (429, "rate_limit_error", {"json": {**ASKED, "script": {"status": 429}}}),
            ]
            for path in ("/v1/messages", "/v1/messages/count_tokens", "/engines/m/v1/messages"):
                for status, kind, asked in refusals:
                    # Below an engine's address the body need not name the model, and may name no other.
                    if path != "/v1/messages" and (
                        status == 413 or ("engines" in path and status < 405)
                    ):
                        continue
                    answer = await it.client.post(path, **asked)
                    assert answer.status_code == status, (path, answer.text)
                    told = answer.json()
                    assert (told["type"], told["error"]["type"]) == ("error", kind), told
                    assert isinstance(told["error"]["message"], str)
                    assert told["request_id"] == answer.headers["request-id"]
                    assert answer.headers["request-id"] == answer.headers["x-request-id"]
            wrong = await it.client.get("/v1/messages")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
            assert wrong.json()["type"] == "error"
            batches = await it.client.post("/v1/messages/batches", json={})
            assert batches.status_code == 403
            assert batches.json()["error"]["type"] == "permission_error"
            whole = await it.client.post("/v1/messages", json=ASKED)
            assert whole.json()["content"][0]["text"] == "w0 w1 "
            assert whole.headers["request-id"]

    run(story(), 60)


def test_scn_b9_a_stream_of_messages_that_breaks_ends_with_anthropics_event(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, tokens=9) as it:
            asked = {**ASKED, "max_tokens": 9, "stream": True}
            broken = {**asked, "script": {"cut_after_tokens": 3}}
            answer = await it.client.post("/v1/messages", json=broken)
            assert answer.status_code == 200
            events = answer.text.strip().split("\n\n")
            name, data = events[-1].split("\n")
            assert name == "event: error"
            told = json.loads(data.removeprefix("data: "))
            assert told["type"] == "error"
            assert told["error"]["type"] == "api_error"
            assert told["error"]["code"] == "engine_error"
            assert "message_stop" not in answer.text

    run(story())


def test_a_compressed_body_is_unpacked_for_the_engine(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, body_limit_bytes=4 * MIB) as it:
            plain = json.dumps({**ASKED, "model": "an alias"}).encode()
            for packed in (gzip.compress(plain), gzip.compress(plain + b" " * MIB)):
                answer = await it.client.post(
                    "/v1/chat/completions", content=packed, headers={"content-encoding": "gzip"}
                )
                assert answer.status_code == 200, answer.text
                last = it.seen()[-1]
                assert last["body"] == ASKED
                assert "content-encoding" not in last["headers"]
            content = form("b0und", ('name="file"; filename=f', b"x" * MIB), ("name=model", b"m"))
            answer = await it.client.post(
                "/v1/audio/translations",
                content=gzip.compress(content),
                headers={**FORM, "content-encoding": "x-gzip"},
            )
            assert answer.status_code == 200
            assert it.seen()[-1]["headers"]["content-length"] == str(len(content))
            count = len(it.seen())
            refused: list[tuple[bytes, str, int, str]] = [
                (b"x", "br", 415, "unsupported_media_type"),
                (b"x", "gzip, gzip", 415, "unsupported_media_type"),
                (b"x", "gzip", 400, "invalid_request"),
                (gzip.compress(bytes(5 * MIB)), "gzip", 413, "request_too_large"),
            ]
            for content, encoding, status, code in refused:
                answer = await it.client.post(
                    "/v1/chat/completions", content=content, headers={"content-encoding": encoding}
                )
                assert answer.status_code == status
                assert answer.json()["error"]["code"] == code
                if status == 415:
                    assert answer.headers["accept-encoding"] == "gzip, deflate"
            assert len(it.seen()) == count

    run(story(), 60)


def test_the_connection_serves_on_after_each_refusal(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it, connected(it.port) as peer:
            head = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n%b\r\n%b"
            for path, body, more, status in (
                (b"/v1/chat/completions", b"{}", b"", b"400"),
                (b"/v1/chat/completions", b'{"model":"x"}', b"", b"404"),
                (b"/v1/messages", b"{}", b"", b"400"),
                (b"/v1/rerank", b"x", b"content-encoding: br\r\n", b"415"),
                (b"/v1/rerank", b"x", b"content-encoding: gzip\r\n", b"400"),
                (b"/v1/responses/resp_1/cancel", b"{}", b"", b"404"),
                (b"/slots", b"{}", b"", b"403"),
                (b"/v1/completions/", b'{"model":"m"}', b"", b"200"),
            ):
                await peer.send(head % (path, len(body), more, body))
                answered, _ = await peer.message()
                assert answered.split(b" ", 2)[1] == status, answered
                assert b"connection: close" not in answered.lower()
            await peer.send(b"HEAD /v1/models HTTP/1.1\r\nhost: h\r\n\r\n")
            answered = await peer.until(b"\r\n\r\n")
            assert b"200 OK" in answered
            assert b"content-length: 0" not in answered
            await peer.send(b"OPTIONS /v1/rerank/ HTTP/1.1\r\nhost: h\r\n\r\n")
            assert b" 204 " in await peer.until(b"\r\n\r\n")
            asked = b'{"model":"m"}'
            await peer.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\n"
                b"content-length: %d\r\n\r\n" % len(asked)
            )
            assert b" 100 " in await peer.until(b"\r\n\r\n")
            await peer.send(asked)
            answered, _ = await peer.message()
            assert b" 200 " in answered
            await peer.send(
                b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b"
                % (len(asked), asked)
            )
            last = await peer.rest()
            assert last.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in last.lower()

    run(story())


def test_a_response_is_unknown_to_any_other_key_than_the_one_that_made_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as it:
            other = "otherkey2345"
            for key in (a_key(), a_key(id=other, name="other")):
                seq = await it.yard.put("key", (key.id,), KeyCreated(by="test"), key)
            await it.yard.applied(it.gateway, seq)
            mine, theirs = (
                {"authorization": f"Bearer {text}"} for text in (text_of(), text_of(other))
            )
            body = {"model": "m", "input": "x"}
            made = await it.client.post("/v1/responses", json=body, headers=mine)
            url = f"/v1/responses/{made.json()['id']}"
            assert (await it.client.get(url, headers=mine)).status_code == 200
            assert (await it.client.get(url)).status_code == 401
            unknown = await it.client.get(url, headers=theirs)
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "response_not_found"

    run(story())
