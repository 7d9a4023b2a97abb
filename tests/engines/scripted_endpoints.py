"""What the scripted engine answers besides chat, completions and embeddings: one function an endpoint.

Loaded by scripted.py itself from beside it; the standard library only, and nothing of the project.
"""

import json
import os
import time

RESPONSE = "/v1/responses/"


def respond(peer, script, asked: dict) -> None:
    """OpenAI's responses, kept until deleted; `store` false keeps none."""
    created = int(time.time())
    head = {
        "id": f"resp_{os.getpid()}-{peer.engine.count('responses')}",
        "object": "response",
        "created_at": created,
        "model": script.model,
    }

    def whole(status: str, text: str, count: int) -> dict:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": status}
        used = {"input_tokens": 3, "output_tokens": count, "total_tokens": 3 + count}
        output = [{**message, "content": content}] if text else []
        return {**head, "status": status, "output": output, "usage": used}

    kept = peer.engine.responses
    text, count = "", 0
    if not asked.get("stream"):
        for word in peer.tokens(script, asked):
            text, count = text + word, count + 1
        body = whole("completed", text, count)
        if asked.get("store", True):
            kept[head["id"]] = body
        peer.send(200, body)
        return
    peer.head(200, "text/event-stream", "Transfer-Encoding: chunked")
    numbers = iter(range(1 << 30))

    def event(kind: str, **fields: object) -> None:
        body = {"type": kind, **fields, "sequence_number": next(numbers)}
        peer.chunk(f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode())

    if asked.get("store", True):
        kept[head["id"]] = whole("in_progress", "", 0)
    event("response.created", response=whole("in_progress", "", 0))
    for word in peer.tokens(script, asked):
        text, count = text + word, count + 1
        place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        event("response.output_text.delta", **place, delta=word, logprobs=[])
    body = whole("completed", text, count)
    if asked.get("store", True):
        kept[head["id"]] = body
    event("response.completed", response=body)
    peer.chunk(b"")


def by_id(peer, method: str, path: str) -> None:
    """GET and DELETE of a response that is kept, POST …/cancel of it."""
    name, _, rest = path.removeprefix(RESPONSE).partition("/")
    kept = peer.engine.responses
    wanted = {"": ("GET", "DELETE"), "cancel": ("POST",), "input_items": ("GET",)}.get(rest, ())
    if not wanted:
        peer.error(404, f"no route {method} {path}", "not_found_error")
    elif method not in wanted:
        peer.error(405, "Method Not Allowed", "invalid_request_error")
    elif name not in kept:
        peer.error(404, f"Response with id '{name}' not found.", "invalid_request_error")
    elif method == "DELETE":
        del kept[name]
        peer.send(200, {"id": name, "object": "response", "deleted": True})
    elif rest == "cancel":
        kept[name] = {**kept[name], "status": "cancelled"}
        peer.send(200, kept[name])
    elif rest:
        peer.send(200, {"object": "list", "data": []})
    else:
        peer.send(200, kept[name])


def count_input(peer, script, asked: dict) -> None:
    peer.send(200, {"object": "response.input_tokens", "input_tokens": words(asked.get("input"))})


def message(peer, script, asked: dict) -> None:
    """Anthropic's messages, whole or as their events."""
    used = {"input_tokens": words(asked.get("messages")), "output_tokens": 0}
    body = {
        "id": f"msg_{peer.number}",
        "type": "message",
        "role": "assistant",
        "model": script.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": used,
    }
    text, count = "", 0
    if not asked.get("stream"):
        for word in peer.tokens(script, asked):
            text, count = text + word, count + 1
        content = [{"type": "text", "text": text}]
        usage = {**used, "output_tokens": count}
        peer.send(200, {**body, "content": content, "stop_reason": "end_turn", "usage": usage})
        return
    peer.head(200, "text/event-stream", "Transfer-Encoding: chunked")

    def event(kind: str, **fields: object) -> None:
        said = {"type": kind, **fields}
        peer.chunk(f"event: {kind}\ndata: {json.dumps(said)}\n\n".encode())

    event("message_start", message=body)
    event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for word in peer.tokens(script, asked):
        count += 1
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
    event("content_block_stop", index=0)
    ending = {"stop_reason": "end_turn", "stop_sequence": None}
    event("message_delta", delta=ending, usage={"output_tokens": count})
    event("message_stop")
    peer.chunk(b"")


def count_message(peer, script, asked: dict) -> None:
    peer.send(200, {"input_tokens": words(asked.get("messages"))})


def rerank(peer, script, asked: dict) -> None:
    """The longer a document the better."""
    texts = asked.get("documents") or []
    found = [
        {"index": at, "relevance_score": len(str(text)) / 100.0, "document": {"text": str(text)}}
        for at, text in enumerate(texts)
    ]
    found.sort(key=lambda result: -result["relevance_score"])
    used = {"prompt_tokens": words(texts), "total_tokens": words(texts)}
    results = found[: asked.get("top_n") or len(found)]
    peer.send(200, {"id": "rerank-1", "model": script.model, "usage": used, "results": results})


def score(peer, script, asked: dict) -> None:
    texts = asked.get("text_2") or asked.get("documents") or []
    texts = [texts] if isinstance(texts, str) else texts
    cards = [
        {"index": at, "object": "score", "score": len(t) / 100.0} for at, t in enumerate(texts)
    ]
    used = {"prompt_tokens": words(texts), "total_tokens": words(texts)}
    peer.send(200, {"object": "list", "model": script.model, "data": cards, "usage": used})


def transcribe(peer, script, asked: dict) -> None:
    """Says what it heard: the name, size and sum of the file."""
    file = asked.get("file", {})
    if not isinstance(file, dict):
        peer.error(400, "`file` is no file", "invalid_request_error")
        return
    told = f"{file.get('filename')} {file.get('size')} {file.get('sha256')}"
    if asked.get("stream") == "true":
        peer.head(200, "text/event-stream", "Transfer-Encoding: chunked")
        for word in told.split():
            peer.frame({"type": "transcript.text.delta", "delta": word})
        peer.frame({"type": "transcript.text.done", "text": told})
        peer.chunk(b"data: [DONE]\n\n")
        peer.chunk(b"")
    elif asked.get("response_format") == "text":
        peer.send(200, told)
    else:
        peer.send(200, {"text": told, "usage": {"type": "duration", "seconds": 1}})


def speak(peer, script, asked: dict) -> None:
    """Bytes that are no text, with what looks like a model's name in them."""
    peer.head(200, "audio/mpeg", "Transfer-Encoding: chunked")
    for _ in peer.tokens(script, asked):
        peer.chunk(b'\xff\xfb\x90\x00{"model":"scripted"}\x00')
    peer.chunk(b"")


def draw(peer, script, asked: dict) -> None:
    image = {"b64_json": "iVBORw0KGgo=", "revised_prompt": str(asked.get("prompt"))}
    peer.send(200, {"created": int(time.time()), "data": [image] * int(asked.get("n") or 1)})


def tokenize(peer, script, asked: dict) -> None:
    """A token is a character's number."""
    text = asked.get("content") or asked.get("prompt") or ""
    tokens = [ord(c) for c in text]
    peer.send(200, {"tokens": tokens, "count": len(tokens), "max_model_len": 4096})


def detokenize(peer, script, asked: dict) -> None:
    text = "".join(map(chr, asked.get("tokens") or []))
    peer.send(200, {"content": text, "prompt": text})


def classify(peer, script, asked: dict) -> None:
    peer.send(200, {"object": "list", "model": script.model, "data": [{"index": 0, "label": "a"}]})


def words(text: object) -> int:
    return len(json.dumps(text or "").split())


def read_form(content_type: str, body: bytes) -> dict:
    """The parts of a form; of a file its name, type, size and sum. Raises ValueError."""
    # Not at the top: most starts of the engine need none, and it takes a while.
    import hashlib

    _, _, boundary = content_type.partition("boundary=")
    mark = b"--" + boundary.strip('"').encode("latin-1")
    if not boundary or not body.startswith(mark) or not body.rstrip(b"\r\n").endswith(mark + b"--"):
        raise ValueError("not a form")
    fields: dict = {}
    for piece in body.split(mark)[1:-1]:
        head, _, content = piece[2:].partition(b"\r\n\r\n")
        content = content[:-2]
        lines = head.decode().split("\r\n")
        about = next(x for x in lines if x.lower().startswith("content-disposition:"))
        given = {
            key: value.strip('"')
            for key, _, value in (p.strip().partition("=") for p in about.split(";")[1:])
        }
        if "filename" in given:
            digest = hashlib.sha256(content).hexdigest()
            file = {"filename": given["filename"], "size": len(content), "sha256": digest}
            fields[given["name"]] = {**file, "head": lines}
        else:
            fields[given["name"]] = content.decode()
    return fields


WORK = {
    "/v1/responses": respond,
    "/v1/responses/input_tokens": count_input,
    "/v1/messages": message,
    "/v1/messages/count_tokens": count_message,
    "/v1/rerank": rerank,
    "/rerank": rerank,
    "/v2/rerank": rerank,
    "/v1/score": score,
    "/score": score,
    "/v1/audio/transcriptions": transcribe,
    "/v1/audio/translations": transcribe,
    "/v1/audio/speech": speak,
    "/v1/images/generations": draw,
    "/v1/images/edits": draw,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/classify": classify,
}
