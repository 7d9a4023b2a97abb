"""Listening sockets that were inherited, and a server that leaves its port to another."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.memory import MemoryLog, MemoryWire
from events.service import FatalError
from gateway import listening
from gateway.accesslog import AccessLog
from gateway.app import run_gateway
from gateway.http.messages import Request, Responder
from gateway.http.server import serve
from gateway.keys import engine_keys
from gateway.listening import bound_socket, inherited_socket, socket_of
from gateway.siblings import Siblings
from schemas.settings import GatewaySettings
from tests.support.aio import run, until
from tests.support.gateway_yard import YARD_SECRET, memory_yard
from tests.support.http_wire import connected, post

GET = b"GET / HTTP/1.1\r\nhost: yard\r\n\r\n"


def test_a_socket_for_this_process_is_taken_and_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as left:
        copy = os.dup(left.fileno())
        monkeypatch.setattr(listening, "FIRST_FD", copy)
        os.set_inheritable(copy, True)
        environment = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "x"}
        taken = inherited_socket(environment)
        assert taken is not None
        with taken:
            assert taken.getsockname() == left.getsockname()
            assert not os.get_inheritable(copy)
        assert environment == {}


@pytest.mark.parametrize("pid", ["1", "", "x"])
def test_a_socket_for_another_process_is_left_alone(pid: str) -> None:
    assert inherited_socket({"LISTEN_FDS": "1", "LISTEN_PID": pid}) is None
    assert inherited_socket({}) is None


def test_what_is_no_socket_to_serve_on_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    several = {"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())}
    with pytest.raises(FatalError, match="2 were inherited"):
        inherited_socket(several)
    with (tmp_path / "file").open("w") as file, pytest.raises(FatalError, match="no socket"):
        socket_of(os.dup(file.fileno()))
    with socket.socket(socket.AF_UNIX) as local, pytest.raises(FatalError, match="no TCP"):
        socket_of(os.dup(local.fileno()))


def test_a_bound_address_refuses_until_somebody_listens_and_a_taken_one_is_said() -> None:
    with bound_socket("127.0.0.1:0") as bound:
        port = bound.getsockname()[1]
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
        bound.listen(1)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) == 0
        with pytest.raises(FatalError, match=f"cannot listen on 127.0.0.1:{port}"):
            bound_socket(f"127.0.0.1:{port}")


def test_a_program_serves_on_the_socket_a_service_manager_left_it(tmp_path: Path) -> None:
    """As systemd does it: descriptor 3, LISTEN_FDS=1 and the pid of the process itself."""
    program = (
        "import os\n"
        "from gateway.listening import inherited_socket\n"
        "s = inherited_socket(os.environ)\n"
        "print(s.getsockname()[1], 'LISTEN_FDS' in os.environ)\n"
    )
    shell = f'LISTEN_FDS=1 LISTEN_PID=$$ exec {sys.executable} -c "$0" 3<&$1'

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as left:
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", shell, program, str(left.fileno())),
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(left.fileno(),),
            )
            out, _ = await process.communicate()
            assert out.decode().split() == [str(left.getsockname()[1]), "False"]

    run(story())


def test_a_server_that_hands_over_answers_what_comes_on_open_connections() -> None:
    async def story() -> None:
        async def handle(request: Request, respond: Responder) -> None:
            await request.body.read_all()
            await respond.send(200, (), b"old")

        with bound_socket("127.0.0.1:0") as sock:
            server = await serve(handle, "", 0, sock=sock.dup())
            async with connected(server.port) as used, connected(server.port) as idle:
                for peer in (used, idle):
                    await peer.send(GET)
                    assert (await peer.message())[1] == b"old"
                leaving = asyncio.create_task(server.hand_over(5.0))
                await asyncio.sleep(0)
                # Its port is another's by now, and a request on an open connection is served, once more.
                await used.send(post(b"{}"))
                head, body = await used.message()
                assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"old")
                assert b"connection: close" in head
                await used.gone()
                assert not leaving.done()
                await idle.send(GET)
                assert (await idle.message())[1] == b"old"
                await asyncio.wait_for(leaving, 2.0)
                assert await server.drain(1.0) == 0

    run(story())


def test_idle_connections_do_not_hold_up_a_successor_for_ever() -> None:
    async def story() -> None:
        async def handle(request: Request, respond: Responder) -> None:
            await respond.send(200, (), b"old")

        server = await serve(handle, "127.0.0.1", 0)
        async with connected(server.port) as idle:
            await idle.send(GET)
            await idle.message()
            await server.hand_over(0.1)
            await server.drain(1.0)
            await idle.gone()

    run(story())


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece


def test_any_worker_shows_the_numbers_of_all_that_answer(tmp_path: Path) -> None:
    async def story() -> None:
        workers = [
            Siblings(tmp_path / "w", n, lambda n=n: pieces(b"# TYPE x gauge\n", b"x %d\n" % n))
            for n in (1, 2, 3)
        ]
        for worker in workers:
            await worker.open()
        await workers[2].close()
        (tmp_path / "w" / "9.sock").touch()  # of one that was killed
        for worker in workers[:2]:
            assert await worker.page() == b'# TYPE x gauge\nx{worker="1"} 1\nx{worker="2"} 2\n'
        for worker in workers[:2]:
            await worker.close()

    run(story())


def test_a_page_that_breaks_off_is_left_out_and_a_large_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All three are of one process here, which others may keep from working for a second.
    monkeypatch.setattr("gateway.siblings.PATIENCE_S", 20.0)

    async def breaks_off() -> AsyncIterator[bytes]:
        yield b"# TYPE x gauge\nx{model="
        raise ConnectionResetError

    async def story() -> None:
        large = b"y 1\n" * 50_000
        workers = [
            Siblings(tmp_path / "w", 1, lambda: pieces(b"# TYPE x gauge\nx 1\n")),
            Siblings(tmp_path / "w", 2, breaks_off),
            Siblings(tmp_path / "w", 3, lambda: pieces(b"# TYPE y gauge\n", *(large,) * 60)),
        ]
        for worker in workers:
            await worker.open()
        page = await workers[0].page()
        assert page.startswith(
            b'# TYPE x gauge\nx{worker="1"} 1\n# TYPE y gauge\ny{worker="3"} 1\n'
        )
        assert page.count(b"\n") == 3 + 50_000 * 60
        for worker in workers:
            await worker.close()

    run(story())


def test_who_asks_a_worker_for_its_numbers_and_does_not_read_them_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.siblings.PATIENCE_S", 0.1)

    def answers() -> list["asyncio.Task[object]"]:
        return [t for t in asyncio.all_tasks() if "_asked" in repr(t.get_coro())]

    async def story() -> None:
        worker = Siblings(tmp_path / "w", 1, lambda: pieces(*(b"x 1\n" * (1 << 10),) * 1024))
        await worker.open()
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(tmp_path / "w" / "1.sock"))
            await until(lambda: bool(answers()), "it to be answered")
            await until(lambda: not answers(), "it to be left")
        await worker.close()

    run(story())


def test_a_worker_that_ends_while_it_is_asked_has_no_fault_to_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x 1\n"
            await asyncio.sleep(0)

    async def story() -> None:
        worker = Siblings(tmp_path / "w", 1, endless)
        await worker.open()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "w" / "1.sock")
        await reader.readline()
        # As the end of the process cancels whatever runs then.
        (asked,) = (t for t in asyncio.all_tasks() if "Siblings._asked" in repr(t.get_coro()))
        asked.cancel()
        await asyncio.wait([asked])
        while await reader.read(65536):
            pass
        writer.close()
        await writer.wait_closed()
        await worker.close()

    run(story())
    assert not caplog.records


@pytest.mark.parametrize(
    ("address", "listen", "opens"),
    [
        ("0.0.0.0:0", "127.0.0.1:0", False),
        ("127.0.0.1:0", "0.0.0.0:0", True),
    ],
)
def test_whether_a_key_is_needed_goes_by_the_socket_that_was_inherited(
    tmp_path: Path, address: str, listen: str, opens: bool
) -> None:
    """Not by the address that the settings name, on which nothing listens."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            log = MemoryLog(yard.broker, source="/gateway/gw")
            sock = bound_socket(address)
            port = sock.getsockname()[1]

            async def start() -> int:
                async with run_gateway(
                    "gw",
                    GatewaySettings(listen=listen, drain_s=0.1),
                    data=tmp_path,
                    events=log,
                    wire=MemoryWire(log.connection),
                    engine_key=engine_keys(YARD_SECRET),
                    access=AccessLog(yard.access.append),
                    sock=sock,
                ) as running:
                    return running.port

            try:
                if opens:
                    assert await start() == port
                else:
                    with pytest.raises(ExceptionGroup) as failed:
                        await start()
                    assert failed.group_contains(FatalError, match="key")
            finally:
                sock.close()

    run(story())


def test_an_address_that_others_have_ends_a_gateway_with_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            log = MemoryLog(yard.broker, source="/gateway/gw")
            with socket.create_server(("127.0.0.1", 0)) as taken:
                listen = f"127.0.0.1:{taken.getsockname()[1]}"
                with pytest.raises(ExceptionGroup) as failed:
                    async with run_gateway(
                        "gw",
                        GatewaySettings(listen=listen, drain_s=0.1),
                        data=tmp_path,
                        events=log,
                        wire=MemoryWire(log.connection),
                        engine_key=engine_keys(YARD_SECRET),
                        access=AccessLog(yard.access.append),
                    ):
                        raise AssertionError("it serves")
            assert failed.group_contains(FatalError, match=f"cannot listen on {listen}: .*in use")

    run(story())
