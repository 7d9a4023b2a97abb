"""What the server sends is cut into messages as the client library would do it, wherever a read ends."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError

from events.delivery import DirectClient, Message, Receiver, WireParser, parse_headers
from tests.support.aio import run

Heard = tuple[str, str, bytes, bytes]

MESSAGES: list[tuple[bytes, Heard]] = [
    (b"MSG a.b 1 5\r\nhello\r\n", ("a.b", "", b"hello", b"")),
    (b"MSG a.b 1 in.box 0\r\n\r\n", ("a.b", "in.box", b"", b"")),
    (b"MSG  a\t1  7\r\nMSG a 1\r\n", ("a", "", b"MSG a 1", b"")),
    (b"HMSG a 1 r 12 14\r\nNATS/1.0\r\n\r\nhi\r\n", ("a", "r", b"hi", b"NATS/1.0\r\n\r\n")),
    (b"HMSG a 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n", ("a", "", b"", b"NATS/1.0 503\r\n\r\n")),
    (b"MSG a 1 4\r\n\r\n\r\n\r\n", ("a", "", b"\r\n\r\n", b"")),
    (b"MSG big 1 70000\r\n" + b"x" * 70_000 + b"\r\n", ("big", "", b"x" * 70_000, b"")),
]
OTHERS = [b"PING\r\n", b"+OK\r\n", b"PONG\r\n", b'INFO {"server_id":"x"}\r\n']


class Socketless:
    """Stands for a client: notes what the parser hands over and what it leaves to the library."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.lines: list[str] = []
        self.parser: Any = WireParser(self)
        self.reset_at: str = ""

    def deliver(self, sid: int, subject: str, reply: str, data: bytes, head: bytes) -> None:
        assert sid == 1
        self.heard.append((subject, reply, data, head))

    async def _process_ping(self) -> None:
        self._line("PING")

    async def _process_pong(self) -> None:
        self._line("PONG")

    async def _process_info(self, _: dict[str, Any]) -> None:
        self._line("INFO")

    async def _process_err(self, text: str) -> None:
        self._line(text)

    def _line(self, name: str) -> None:
        self.lines.append(name)
        if name == self.reset_at:
            self.parser.reset()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*range(len(MESSAGES)), *(-1 - n for n in range(len(OTHERS)))])),
    st.lists(st.integers(1, 90_000), min_size=1, max_size=40),
)
def test_messages_arrive_whole_and_in_order_wherever_a_read_ends(
    which: list[int], sizes: list[int]
) -> None:
    sent = b"".join(MESSAGES[n][0] if n >= 0 else OTHERS[-1 - n] for n in which)

    async def main() -> None:
        client = Socketless()
        at = turn = 0
        while at < len(sent):
            size = sizes[turn % len(sizes)]
            await client.parser.parse(sent[at : at + size])
            at, turn = at + size, turn + 1
        assert client.heard == [MESSAGES[n][1] for n in which if n >= 0]
        said = [OTHERS[-1 - n].split()[0].decode() for n in which if n < 0]
        assert client.lines == [line for line in said if line != "+OK"]
        assert client.parser.buf == b""

    run(main())


def test_byte_by_byte() -> None:
    async def main() -> None:
        client = Socketless()
        for wire, _ in MESSAGES[:-1]:
            for byte in wire:
                await client.parser.parse(bytes([byte]))
        assert client.heard == [heard for _, heard in MESSAGES[:-1]]

    run(main())


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a 1\r\n",
        b"MSG a x 5\r\nhello\r\n",
        b"MSG a 1 r more 5\r\nhello\r\n",
        b"MSG a 1 -5\r\nhello\r\n",
        b"HMSG a 1 5\r\n",
        b"HMSG a 1 9 5\r\nhello\r\n",
        b"HMSG a 1 -1 5\r\nhello\r\n",
        b"MSG \xff 1 5\r\nhello\r\n",
        b"NONSENSE\r\n",
    ],
)
def test_a_line_that_is_none_ends_the_connection(line: bytes) -> None:
    async def main() -> None:
        client = Socketless()
        with pytest.raises(ProtocolError):
            await client.parser.parse(line)
        assert client.heard == []

    run(main())


def test_what_is_left_of_an_old_connection_is_not_read_after_a_new_one_began() -> None:
    async def main() -> None:
        client = Socketless()
        client.reset_at = "'stale connection'"
        await client.parser.parse(b"-ERR 'Stale Connection'\r\n" + MESSAGES[0][0])
        assert client.lines == ["'stale connection'"]
        assert (client.heard, client.parser.buf) == ([], b"")
        await client.parser.parse(MESSAGES[1][0])
        assert client.heard == [MESSAGES[1][1]]

    run(main())


HEADERS = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    b"Nats-Stream-Source: YARD_EVENTS 17 > >",
                    b"a:b",
                    b"a:  b  ",
                    b"A: b",
                    b"a : c",
                    b"no colon",
                    b": no name",
                    b"two words: x",
                    b"caf\xc3\xa9: x",
                    b"x: caf\xc3\xa9 \xff",
                    b"x: 1:2",
                    b"Status: 503",
                    b"Description: mine",
                ]
            ),
            st.binary(max_size=20),
        ),
        max_size=6,
    ).map(b"\r\n".join),
)


async def _library(head: bytes) -> dict[str, str]:
    read = await Client()._process_headers(head) or {}
    return {str(getattr(name, "value", name)): value for name, value in read.items()}


@settings(max_examples=300, deadline=None)
@given(HEADERS)
def test_headers_are_what_the_library_reads(lines: bytes) -> None:
    head = b"NATS/1.0\r\n" + lines + b"\r\n\r\n"
    assert parse_headers(head) == run(_library(head))


@pytest.mark.parametrize(
    "first", [b"503", b"404 No Messages", b"100 Idle Heartbeat", b"409 Consumer Deleted", b"abc x"]
)
def test_an_inline_status_is_what_the_library_reads(first: bytes) -> None:
    for rest in (b"", b"Nats-Pending-Messages: 3\r\nNats-Pending-Bytes: 0\r\n"):
        head = b"NATS/1.0 " + first + b"\r\n" + rest + b"\r\n"
        if rest and b" " not in first:
            continue  # the library takes the headers behind a bare status for its description
        theirs = run(_library(head))
        assert parse_headers(head) == theirs
        assert Message("s", "", b"", head).status == theirs.get("Status", "")


@given(st.binary(max_size=300))
def test_no_header_block_is_a_surprise(head: bytes) -> None:
    message = Message("s", "", b"", head)
    assert isinstance(message.headers, dict)
    assert message.status == "" or message.status.isdigit()
    for name, value in message.headers.items():
        if name not in ("Status", "Description"):
            assert message.header(name) == value


def test_a_header_named_status_is_no_status() -> None:
    message = Message("s", "", b"", b"NATS/1.0\r\nStatus: 503\r\n\r\n")
    assert (message.status, message.header("Status")) == ("", "503")
    assert message.header("Nats-Stream-Source") is None


def test_a_handler_that_fails_does_not_end_the_reading(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def fail(message: Message) -> None:
        heard.append(message.subject)
        raise ValueError("odd")

    receiver = Receiver(fail)
    receiver.take(Message("a", "", b""))
    receiver.take(Message("b", "", b""))
    receiver.open = False
    receiver.take(Message("c", "", b""))
    assert heard == ["a", "b"]
    assert "message handler failed" in caplog.text


def test_a_message_for_nobody_is_let_go() -> None:
    async def main() -> None:
        DirectClient().deliver(7, "a", "", b"x", b"")
        await asyncio.sleep(0)

    run(main())


class _Idle:
    """Stands for the queue that wakes the library's writer."""

    def empty(self) -> bool:
        return False


def _written(client: Client, headers: dict[str, str] | None, payload: bytes) -> bytes:
    client._status = Client.CONNECTED
    client._flush_queue = _Idle()  # type: ignore[assignment]
    run(client.publish("a.b", payload, "in.box", headers))
    return b"".join(client._pending)


@settings(max_examples=200, deadline=None)
@given(
    st.none()
    | st.dictionaries(
        st.sampled_from(["Nats-Msg-Id", "Yard-Type", "X"]),
        st.text(max_size=12) | st.sampled_from(["a\r\nNats-Rollup: all", "\n", " x ", "caf\u00e9"]),
    ),
    st.binary(max_size=50),
)
def test_a_published_message_is_the_librarys_byte_for_byte(
    headers: dict[str, str] | None, payload: bytes
) -> None:
    assert _written(DirectClient(), headers, payload) == _written(Client(), headers, payload)
