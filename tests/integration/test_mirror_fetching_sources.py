"""Where a fetch asks and whom it tells the token: redirects, proxies, and several mirrors before the registry."""

from pathlib import Path

import pytest

from controlplane.mirror.domain.sources import sources_of
from schemas import codes
from tests.support.fileserver import Asked, Script, file_server, whole_or_rest
from tests.support.mirror_fetching import CONTENT, MIB, PAGE, content_of, fault, stored
from tests.support.mirrors import (
    COMMIT,
    fetched,
    model_bytes,
    open_store,
    registry_sources,
    task_for,
)

# -- redirects and tokens --------------------------------------------------------------------------


def test_a_token_is_sent_to_its_host_and_never_after_a_redirect_to_another(
    tmp_path: Path,
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as other, file_server(lambda _: None) as server:
        server.script = lambda asked: asked.answer(302, location=f"{other.url}/cdn?sig=a%2Fb")
        stored(fetched(store, task, registry_sources(task, server, "secret-token")))
        assert server.requests[0].headers["authorization"] == "Bearer secret-token"
        (asked,) = other.requests
    assert asked.path == "/cdn?sig=a%2Fb"
    assert "authorization" not in asked.headers
    assert "secret-token" not in str(asked.headers)


def test_a_token_does_not_come_back_when_a_stranger_sends_us_home(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda _: None) as other, file_server(lambda _: None) as server:
        other.script = lambda asked: asked.answer(307, location=f"{server.url}/final")

        def script(asked: Asked) -> None:
            if asked.path == "/final":
                whole_or_rest(CONTENT)(asked)
            else:
                asked.answer(302, location=f"{other.url}/x")

        server.script = script
        stored(fetched(store, task, registry_sources(task, server, "secret-token")))
        assert "authorization" not in server.requests[-1].headers


def test_a_renamed_repository_on_the_same_host_keeps_the_token(tmp_path: Path) -> None:
    def script(asked: Asked) -> None:
        if "/new/" in asked.path:
            whole_or_rest(CONTENT)(asked)
        else:
            asked.answer(307, location=f"/new/repo/resolve/{COMMIT}/model.gguf")

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server, "t")))
        assert [asked.headers.get("authorization") for asked in server.requests] == [
            "Bearer t",
            "Bearer t",
        ]


@pytest.mark.parametrize(
    "location", ["/again", "file:///etc/passwd", "ftp://x/y", "http://[bad/", "http://x:99999999/"]
)
def test_a_redirect_that_leads_nowhere_is_no_loop(tmp_path: Path, location: str) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda asked: asked.answer(302, location=location)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) < 12
    assert result.code == codes.REGISTRY_UNREACHABLE
    assert "points" in result.sentence


def test_an_address_that_expired_is_asked_for_again(tmp_path: Path) -> None:
    def expired_first(asked: Asked) -> None:
        if len(asked.server.requests) == 1:
            asked.answer(403, b"<?xml version='1.0'?><Error/>")
        else:
            whole_or_rest(CONTENT)(asked)

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(expired_first) as other, file_server(lambda _: None) as server:
        server.script = lambda asked: asked.answer(302, location=f"{other.url}/signed")
        stored(fetched(store, task, registry_sources(task, server, "t")))
        assert len(server.requests) == 2


def test_a_proxy_of_the_environment_is_used_for_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//user:p%40ss@"))
        monkeypatch.setenv("no_proxy", "")
        sources = sources_of(
            task,
            mirrors={},
            mirror_token="",
            endpoint="http://hub.invalid",
            registry_token=None,
        )
        stored(fetched(store, task, sources))
        (asked,) = proxy.requests
    assert asked.path.startswith("http://hub.invalid/owner/repo/resolve/")
    assert asked.headers["host"] == "hub.invalid"
    assert asked.headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"


# -- several sources -------------------------------------------------------------------------------


def test_another_mirror_is_asked_first_with_our_token(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT, others=("cp-2",))
    with file_server(whole_or_rest(CONTENT)) as mirror, file_server(lambda _: None) as hub:
        sources = sources_of(
            task,
            mirrors={"cp-2": mirror.url},
            mirror_token="control.mac",
            endpoint=hub.url,
            registry_token="hf",
        )
        result = stored(fetched(store, task, sources))
        assert hub.requests == []
        (asked,) = mirror.requests
    assert result.origin == "mirror"
    assert asked.path == f"/mirror/files/{task.key}"
    assert asked.headers["authorization"] == "Bearer control.mac"


@pytest.mark.parametrize("kind", ["404", "wrong bytes", "dead", "cut", "page"])
def test_a_mirror_that_fails_leaves_it_to_the_registry(tmp_path: Path, kind: str) -> None:
    scripts: dict[str, Script] = {
        "404": lambda asked: asked.answer(404),
        "wrong bytes": whole_or_rest(model_bytes(len(CONTENT), seed=3)),
        "dead": lambda asked: None,
        "cut": lambda asked: whole_or_rest(CONTENT, cut_after=1000 if asked.offset is None else 0)(
            asked
        ),
        "page": lambda asked: asked.answer(200, PAGE),
    }
    store, task = open_store(tmp_path), task_for(CONTENT, others=("cp-2",))
    with file_server(scripts[kind]) as mirror, file_server(whole_or_rest(CONTENT)) as hub:
        sources = sources_of(
            task,
            mirrors={"cp-2": mirror.url},
            mirror_token="control.mac",
            endpoint=hub.url,
            registry_token=None,
        )
        result = stored(fetched(store, task, sources))
        assert all("authorization" not in asked.headers for asked in hub.requests)
    assert result.origin == "registry"
    assert content_of(store, task.key) == CONTENT


def test_what_a_mirror_began_the_registry_does_not_go_on_with_unchecked(tmp_path: Path) -> None:
    """Without a published sha256 the halves of two servers could be of two files."""
    other = model_bytes(len(CONTENT), seed=5)
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None, others=("cp-2",))

    def half(asked: Asked) -> None:
        whole_or_rest(other, cut_after=MIB if asked.offset is None else 0)(asked)

    with file_server(half) as mirror, file_server(whole_or_rest(CONTENT)) as hub:
        sources = sources_of(
            task,
            mirrors={"cp-2": mirror.url},
            mirror_token="t",
            endpoint=hub.url,
            registry_token=None,
        )
        stored(fetched(store, task, sources))
        assert hub.requests[0].offset is None
    assert content_of(store, task.key) == CONTENT
