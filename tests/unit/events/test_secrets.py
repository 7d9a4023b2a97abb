"""Secrets: files of mode 0600, made once, and derivations that do not leak into each other."""

import stat
import threading
from pathlib import Path

import pytest

from events import secrets


def test_a_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "api.token"
    first = secrets.ensure_secret(path)
    assert secrets.ensure_secret(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(first) >= 43


def test_of_many_makers_all_get_the_same(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "yard.key"
    found: list[str] = []
    makers = [
        threading.Thread(target=lambda: found.append(secrets.ensure_secret(path))) for _ in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(set(found)) == 1
    assert [p.name for p in path.parent.iterdir()] == ["yard.key"]


def test_a_missing_secret_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(secrets.SecretMissing, match="yardctl init"):
        secrets.read_secret(tmp_path / "none")


def test_keys_differ_by_yard_node_and_launch() -> None:
    keys = {
        secrets.engine_key(secrets.node_secret(yard, node), launch)
        for yard in ("a", "b")
        for node in ("n1", "n2")
        for launch in ("r-1", "r-2")
    }
    assert len(keys) == 8
    assert all(k.isascii() and "=" not in k for k in keys)


def test_a_yard_keeps_its_id_without_yard_json(tmp_path: Path) -> None:
    with pytest.raises(secrets.SecretMissing):
        secrets.yard_id(tmp_path)
    secrets.ensure_secret(secrets.yard_secret_path(tmp_path))
    own = secrets.yard_id(tmp_path)
    assert secrets.yard_id(tmp_path) == own
    file = tmp_path / "yard.json"
    for damaged in ("", "{", "[]", '{"yard_id": null}', '{"yard_id": ""}'):
        file.write_text(damaged, encoding="utf-8")
        assert secrets.yard_id(tmp_path) == own
    file.write_text('{"yard_id": "given"}', encoding="utf-8")
    assert secrets.yard_id(tmp_path) == "given"


def test_a_node_name_never_leaves_the_folder(tmp_path: Path) -> None:
    path = secrets.node_secret_path(tmp_path, "../../etc/x")
    assert path.parent == tmp_path / "secrets"
