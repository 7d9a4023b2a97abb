"""Measures the gateway's HTTP core beside nginx: requests per second, latency, CPU per streamed token.

Both proxies stand in front of the same backends on this machine and take turns, round by round; only
the ratios between rows carry over to another machine. The core does what every request costs (head,
body, the model's name out of the JSON, relay) and nothing of routing, keys or metrics: bench/gateway.py has those.

    python bench/proxy.py [--rounds 5] [--seconds 3] [--clients 32] [--streams 300] [--tokens 100]

It needs nginx (`apt-get install nginx-light`); no other program is used.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import load, rig

GAP_S = 0.02

Row = dict[str, float]


async def core(port: int, upstream: int) -> None:
    """The gateway's data path alone."""
    from gateway.domain.http_rules import engine_request_headers
    from gateway.domain.request_fields import FieldsProblem, read_fields
    from gateway.http.client import EngineClient
    from gateway.http.messages import Request, Responder
    from gateway.http.server import serve

    client = EngineClient()
    endpoint = f"http://127.0.0.1:{upstream}"

    async def handle(request: Request, responder: Responder) -> None:
        fields = read_fields(await request.body.read_all())
        if isinstance(fields, FieldsProblem):
            await responder.send_error(400, "invalid_request", fields.message)
            return
        response = await client.request(
            endpoint,
            request.method,
            request.path,
            engine_request_headers(request.headers.items),
            request.body,
        )
        await responder.relay(response)

    server = await serve(handle, "127.0.0.1", port)
    await load.until_told_to_stop()
    await server.close()
    await client.close()


@contextmanager
def targets(engine: int) -> Iterator[dict[str, tuple[int, Sequence[psutil.Process]]]]:
    """Who is asked: the engine itself, nginx and the core in front of it, and the processes of each."""
    peer, port = rig.free_port(), rig.free_port()
    argv = [sys.executable, __file__, "--role=core", str(port), str(engine)]
    with rig.nginx_proxy(peer, [engine]) as worker, rig.running(port, argv) as process:
        yield {"direct": (engine, ()), "nginx": (peer, [worker]), "core": (port, [process])}


def rounds(engine: int, options: argparse.Namespace, *, stream: bool) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    with targets(engine) as found:
        for target, _ in found.values():
            rig.load(
                "unary" if not stream else "stream",
                target,
                4,
                0.5 if not stream else options.tokens,
            )
        for _ in range(options.rounds):
            for name, (target, processes) in found.items():
                before = rig.cpu_s(processes)
                if stream:
                    got = rig.load("stream", target, options.streams, options.tokens)
                    row = {"first_ms": got["first_p50_ms"]}
                    what, count = "cpu_us/token", got["tokens"]
                else:
                    got = rig.load("unary", target, options.clients, options.seconds)
                    row = {metric: got[metric] for metric in ("rate", "p50_ms", "p99_ms")}
                    what, count = "cpu_us/request", got["count"]
                row[what] = (rig.cpu_s(processes) - before) / count * 1e6
                rows.setdefault(name, []).append(row)
    return rows


def report(title: str, rows: dict[str, list[Row]]) -> None:
    print(f"\n{title}")
    for metric in rows["direct"][0]:
        for name, of in rows.items():
            print(f"  {metric:18} {name:8} {rig.spread([row[metric] for row in of])}")
        ratios = [
            ours[metric] / theirs[metric]
            for ours, theirs in zip(rows["core"], rows["nginx"], strict=True)
            if theirs[metric]
        ]
        if ratios:
            print(f"  {'':18} {'ratio':8} {rig.spread(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--only", choices=("unary", "stream"))
    parser.add_argument("--role", choices=("core",), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        uvloop.run(core(*options.arguments))
        return
    engine = rig.free_port()
    if options.only != "stream":
        with rig.nginx_engine([engine], load.ANSWER, json.dumps({"data": []})):
            title = f"unary, {options.clients} clients, {options.rounds} rounds"
            report(title, rounds(engine, options, stream=False))
    if options.only != "unary":
        with rig.streaming_engine([engine], options.tokens, GAP_S):
            title = f"streams, {options.streams} clients x {options.tokens} tokens"
            report(title, rounds(engine, options, stream=True))


if __name__ == "__main__":
    main()
