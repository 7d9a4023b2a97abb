"""Where a file is asked for and in which order; and that the mirror's decisions are pure."""

from pathlib import Path

import pytest

from controlplane.mirror.domain.sources import Source, host_of, registry_url, sources_of
from tests.support.mirrors import COMMIT, key_of, model_bytes, task_for
from tests.unit.test_domain_is_pure import faults

DOMAIN = Path(__file__).resolve().parents[3] / "controlplane" / "mirror" / "domain"


def test_req_c29_the_registry_is_asked_at_the_pinned_commit() -> None:
    (source,) = sources_of(
        task_for(model_bytes(10), "Q4/m x#1.gguf"),
        mirrors={},
        mirror_token="mirror",
        endpoint="https://hub.test/base/",
        registry_token="hf",
    )
    assert source == Source(
        url=f"https://hub.test/base/owner/repo/resolve/{COMMIT}/Q4/m%20x%231.gguf",
        origin="registry",
        place="hub.test",
        token="hf",
        endpoint="https://hub.test/base/",
    )


def test_live_mirrors_are_asked_before_the_registry() -> None:
    task = task_for(model_bytes(10), others=("cp-2", "cp-gone", "cp-3"))
    sources = sources_of(
        task,
        mirrors={"cp-3": "http://c:1/", "cp-2": "http://b:1", "cp-9": "http://z:1"},
        mirror_token="mirror",
        endpoint="https://hub.test",
        registry_token=None,
    )
    assert [source.url for source in sources[:-1]] == [
        f"http://b:1/mirror/files/{key_of('model.gguf')}",
        f"http://c:1/mirror/files/{key_of('model.gguf')}",
    ]
    assert {source.token for source in sources[:-1]} == {"mirror"}
    assert sources[-1].token == ""


def test_an_adapter_s_url_and_folder_are_asked_without_a_token() -> None:
    task = task_for(b"x", "adapter_model.safetensors", repo="https://h.test:1/a", others=("b",))
    mirror, web = sources_of(
        task,
        mirrors={"b": "http://b:1"},
        mirror_token="mirror",
        endpoint="https://hub.test",
        registry_token="hf",
    )
    assert mirror.origin == "mirror"
    assert web == Source(
        url="https://h.test:1/a/adapter_model.safetensors", origin="web", place="h.test:1"
    )
    (folder,) = sources_of(
        task_for(b"x", "adapter_model.safetensors", repo="/srv/a"),
        mirrors={},
        mirror_token="mirror",
        endpoint="https://hub.test",
        registry_token="hf",
    )
    assert folder == Source(url="/srv/a", origin="folder", place="the folder /srv/a")


def test_a_revision_with_a_slash_stays_one_part() -> None:
    assert registry_url("http://h", "o/r", "refs/pr/1", "a/b") == (
        "http://h/o/r/resolve/refs%2Fpr%2F1/a/b"
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://hub.test/a", "https://HUB.test:443/b", True),
        ("https://hub.test/a", "http://hub.test/a", False),
        ("https://hub.test/a", "https://hub.test:8443/a", False),
        ("https://hub.test/a", "https://cdn.hub.test/a", False),
        ("https://hub.test/a", "https://hub.test@evil.test/a", False),
    ],
)
def test_a_token_stays_with_scheme_host_and_port(one: str, other: str, same: bool) -> None:
    assert (host_of(one) == host_of(other)) is same


@pytest.mark.parametrize("path", sorted(DOMAIN.glob("*.py")), ids=lambda path: path.stem)
def test_req_x8_the_mirror_decides_without_clock_or_chance(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []
