"""Settings: layers, units, and the sentence a person gets when one is wrong."""

from pathlib import Path

import pytest

from events.settings import SettingsError, load, parse_bytes, parse_seconds
from schemas.settings import GIB, StaticCard


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "yard.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "gateway: {listen: '127.0.0.1:1', wait: 10s, resend: 3}\n")
    environment = {"YARD_GATEWAY_LISTEN": "127.0.0.1:2", "YARD_GATEWAY_WAIT": "20s"}
    settings = load(
        file,
        flags={"gateway": {"listen": "127.0.0.1:3", "wait_s": None}},
        environment=environment,
    )
    assert settings.gateway.listen == "127.0.0.1:3"
    assert settings.gateway.wait_s == 20.0
    assert settings.gateway.resend_s == 3.0
    assert settings.gateway.beacon_s == 1.0


def test_the_cards_of_the_issue_are_understood(tmp_path: Path) -> None:
    file = write(tmp_path, "nodeagent: {cards: [{id: gpu0, kind: gpu, memory: 8GiB}]}\n")
    assert load(file, environment={}).nodeagent.cards == (
        StaticCard(id="gpu0", kind="gpu", memory_bytes=8 * GIB),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gateway: {colour: red}\n", "gateway.colour: no such setting"),
        ("gateway: {wait: soon}\n", "gateway.wait: expected a duration"),
        ("gateway: {wait: 1s, wait_s: 2}\n", "given twice"),
        ("gateway:\n  wait: 1s\n  wait: 2s\n", ":3: the key 'wait' is given twice"),
        ("nodeagent: {cards: gpu0}\n", "nodeagent.cards: expected a list"),
        ("gateway: [1]\n", "expected a mapping"),
        ("gateway: {waiting_requests: many}\n", "waiting_requests"),
        ("a: [\n", "yard.yaml"),
        ("gateway: {keys: maybe}\n", "gateway.keys: expected auto or required or off, got 'maybe'"),
        ("gateway: {listen: here}\n", "gateway.listen: expected HOST:PORT"),
        ("gateway: {listen: '127.0.0.1:99999'}\n", "with a port of 0 to 65535"),
        ("gateway: {listen: '127.0.0.1:'}\n", "gateway.listen: expected HOST:PORT"),
        ("gateway: {otlp_endpoint: collector}\n", "gateway.otlp_endpoint: expected a URL"),
        ("gateway: {otlp_endpoint: 'localhost:4318'}\n", "gateway.otlp_endpoint: expected a URL"),
        ("gateway: {otlp_endpoint: 'http://[x'}\n", "gateway.otlp_endpoint: expected a URL"),
        ("gateway: {otlp_endpoint: 4318}\n", "gateway.otlp_endpoint: expected a URL"),
        ("controlplane: {mirror_url: 'ftp://h'}\n", "controlplane.mirror_url: expected a URL"),
        ("controlplane: {listen: 8081}\n", "controlplane.listen: expected HOST:PORT"),
        ("controlplane: {listen: '127.0.0.1:-1'}\n", "controlplane.listen: expected HOST:PORT"),
    ],
)
def test_req_x1_a_wrong_setting_is_refused_with_its_place(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says.replace("[", "\\[").replace("(", "\\(")):
        load(write(tmp_path, text), environment={})


@pytest.mark.parametrize("listen", [":8080", "0.0.0.0:0", "[::1]:65535", "gw.example:80"])
def test_an_address_to_listen_on_is_taken_as_it_stands(listen: str) -> None:
    assert load(None, environment={"YARD_GATEWAY_LISTEN": listen}).gateway.listen == listen


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1:4318", "https://collector.example/v1/traces"]
)
def test_a_url_is_taken_as_it_stands(url: str) -> None:
    assert load(None, environment={"YARD_GATEWAY_OTLP_ENDPOINT": url}).gateway.otlp_endpoint == url


def test_ctl_variables_are_not_settings() -> None:
    load(None, environment={"YARD_NATS": "nats://x", "YARD_API": "y", "YARD_DATA": "z"})


@pytest.mark.parametrize(
    ("text", "number"), [("1GiB", GIB), ("500 MB", 500_000_000), (7, 7), ("1.5KiB", 1536)]
)
def test_sizes(text: str | int, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("text", "number"), [("45s", 45), ("15m", 900), ("250ms", 0.25), ("8h", 28800)]
)
def test_durations(text: str, number: float) -> None:
    assert parse_seconds(text) == number


@pytest.mark.parametrize("text", ["", "-1", "1 year", "GiB", True, float("nan"), -2])
def test_what_is_not_a_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)


def test_inv_3_a_gateway_s_word_counts_for_longer_than_it_trusts_it() -> None:
    """An agent that forgot pins sooner would evict what a gateway streams from."""
    with pytest.raises(SettingsError, match="20"):
        load(environment={"YARD_NODEAGENT_ADAPTER_PIN": "20s"})
    assert load(environment={"YARD_NODEAGENT_ADAPTER_PIN": "25s"}).nodeagent.adapter_pin_s == 25


def test_a_word_that_yaml_reads_as_false_is_that_word(tmp_path: Path) -> None:
    file = tmp_path / "yard.yaml"
    file.write_text("gateway:\n  keys: off\n")
    assert load(file, environment={}).gateway.keys == "off"
    assert load(environment={"YARD_GATEWAY_KEYS": "off"}).gateway.keys == "off"
    file.write_text("gateway:\n  keys: on\n")
    with pytest.raises(SettingsError, match="keys"):
        load(file, environment={})
