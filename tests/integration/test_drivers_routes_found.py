"""A running engine is asked which inference paths it has, and for no work."""

from nodeagent.drivers.command import PATHS, CommandDriver
from nodeagent.drivers.routes import ALWAYS, OPENAI, answered
from tests.support.aio import run
from tests.support.scripted import ask, scripted
from tests.support.scripted_http import Asked, response, scripted_http


def test_a_running_engine_is_asked_which_paths_it_has_and_for_no_work() -> None:
    """As FastAPI answers: 404 where there is no route, 405 for another method, 4xx for no body."""
    there = {
        "/v1/chat/completions": 400,
        "/v1/rerank": 422,
        "/tokenize": 400,
        "/v1/audio/speech": 200,
        "/v1/messages": 401,
    }
    absent = {"/score": 404, "/v1/score": 501, "/detokenize": 405}
    by_id = {
        ("POST", "/v1/responses/resp_none"): 405,
        ("GET", "/v1/responses/resp_none/cancel"): 405,
    }

    def reply(asked: Asked) -> bytes:
        assert asked.body == b""
        status = by_id.get((asked.method, asked.path)) or {**there, **absent}.get(asked.path, 404)
        return response(status, "{}")

    async def story() -> None:
        async with scripted_http(reply) as engine:
            found = await answered(engine.endpoint, "k", OPENAI)
            assert set(found) == {
                *there,
                "/v1/responses/{id}",
                "/v1/responses/{id}/cancel",
            }
            assert found == tuple(p for p in OPENAI if p in found)
            assert all(a.headers["authorization"] == "Bearer k" for a in engine.asked)

    run(story())


def test_an_engine_that_has_none_of_them_cannot_be_asked_and_keeps_what_all_have() -> None:
    async def story() -> None:
        async with scripted_http(response(404, "{}")) as engine:
            assert await answered(engine.endpoint, "", OPENAI) == ALWAYS

    run(story())


def test_an_engine_that_does_not_say_keeps_what_all_have() -> None:
    async def story() -> None:
        assert await answered("http://127.0.0.1:1", "", OPENAI) == ALWAYS
        async with scripted_http(None) as engine:
            assert await answered(engine.endpoint, "", OPENAI) == ALWAYS
            # Who hangs is not waited for again and again.
            assert len(engine.asked) < len(OPENAI) - len(ALWAYS)

    run(story())


def test_a_path_that_ends_the_connection_costs_no_other_path() -> None:
    """Some servers end the connection where a handler fails on nothing at all; they do not hang."""

    async def story() -> None:
        broken = OPENAI[0], "/v1/embeddings", "/v1/rerank"
        for path in broken:

            def reply(asked: Asked, path: str = path) -> bytes:
                by_id = "resp_none" in asked.path
                return b"" if asked.path == path else response(405 if by_id else 400, "{}")

            async with scripted_http(reply) as engine:
                found = await answered(engine.endpoint, "", OPENAI)
                # What every engine has is kept.
                assert found == tuple(p for p in OPENAI if p != path or p in ALWAYS)

    run(story())


def test_the_scripted_engine_has_what_it_was_not_told_to_lack() -> None:
    async def story() -> None:
        driver = CommandDriver()
        with scripted(key="k", without="/score,/tokenize,by_id") as endpoint:
            found = await driver.routes(endpoint, "k", PATHS)
            assert set(PATHS) - set(found) == {
                "/score",
                "/tokenize",
                "/v1/responses/{id}",
                "/v1/responses/{id}/cancel",
                "/v1/responses/{id}/input_items",
            }
            assert ask(endpoint, "/script/counters")["requests"] == 0
        with scripted() as endpoint:
            assert await driver.routes(endpoint, "", PATHS) == PATHS

    run(story())
