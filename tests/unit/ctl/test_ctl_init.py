"""`yardctl init`: secrets are made once, nodes add up, nothing is readable for others."""

import stat
from pathlib import Path

import pytest

from controlplane.ctl import main
from controlplane.ctl.failures import UsageMistake
from controlplane.ctl.init import known_nodes, make_yard


def contents(data: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (data / "secrets").iterdir()}


def test_a_second_node_keeps_the_first_and_every_secret(tmp_path: Path) -> None:
    make_yard(tmp_path, ["one"])
    before = contents(tmp_path)
    assert make_yard(tmp_path, ["rack 2/b"])[1].endswith("one, rack 2/b")
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert known_nodes(tmp_path) == ["one", "rack 2/b"]
    users = (tmp_path / "nats" / "users.conf").read_text()
    assert "agent-one" in users
    assert "agent-rack" in users


def test_nobody_else_may_read_what_it_writes(tmp_path: Path) -> None:
    make_yard(tmp_path, ["one"])
    files = [*(tmp_path / "secrets").iterdir(), *(tmp_path / "nats").iterdir()]
    assert files
    assert [p for p in files if stat.S_IMODE(p.stat().st_mode) & 0o077] == []
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700


def test_a_yard_without_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageMistake, match="name at least one node"):
        make_yard(tmp_path, [])


def test_it_prints_how_to_start_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["init", "--data", str(tmp_path), "--node", "n"]) == 0
    assert f"nats-server -c {tmp_path}/nats/nats.conf" in capsys.readouterr().out
    assert main.main(["init", "--data", str(tmp_path / "x")]) == 64
