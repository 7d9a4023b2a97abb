"""Which paths each kind of engine may have, and that a gateway knows all of them as inference."""

from pathlib import Path

import pytest

from gateway.domain.places import BY_ID, ENGINE_PATHS
from nodeagent.drivers import command, llamacpp, vllm
from nodeagent.drivers.driver import EngineStart
from nodeagent.drivers.llamacpp import LlamacppDriver
from schemas.plan import Launch
from tests.support.launches import no_secrets


def test_inv_2_no_engine_is_told_to_answer_what_a_gateway_does_not_know_as_inference() -> None:
    known = {*ENGINE_PATHS, *BY_ID}
    for paths in (
        vllm.PATHS,
        command.PATHS,
        llamacpp.PATHS,
        llamacpp.EMBEDDING_PATHS,
        llamacpp.RERANKING_PATHS,
        llamacpp.AUDIO_PATHS,
    ):
        assert known.issuperset(paths)
        assert len(set(paths)) == len(paths)
    assert known == {
        *vllm.PATHS,
        *llamacpp.PATHS,
        *llamacpp.EMBEDDING_PATHS,
        *llamacpp.RERANKING_PATHS,
    }


@pytest.mark.parametrize("server", ["", "/bin/true"])
@pytest.mark.parametrize(
    ("args", "more"),
    [
        ((), ()),
        (("--embeddings",), llamacpp.EMBEDDING_PATHS),
        (("--embeddings", "--pooling", "mean"), llamacpp.EMBEDDING_PATHS),
        (("--reranking",), (*llamacpp.EMBEDDING_PATHS, *llamacpp.RERANKING_PATHS)),
    ],
)
def test_llamacpp_answers_what_its_flags_switch_on(
    tmp_path: Path, args: tuple[str, ...], more: tuple[str, ...], server: str
) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    launch = Launch(
        model="m",
        incarnation="i",
        profile="p",
        revision="1",
        engine="llamacpp",
        source=str(source),
        args=args,
    )
    start = LlamacppDriver(server).prepare(
        launch, replica="r-1", host="127.0.0.1", port=1, key="k", secrets=no_secrets
    )
    assert isinstance(start, EngineStart)
    assert start.paths == (*llamacpp.PATHS, *more)
