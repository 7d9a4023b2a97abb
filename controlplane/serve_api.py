"""The API's questions about registries: what a repository holds, and what serving it would do.

They take seconds, because they ask the registry; they change nothing.
"""

from typing import Annotated, Any

from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromQuery, JSONBody, PathParameter

from controlplane import api_refusals
from controlplane.planning import BadRequest, NotAnswered, Planner, ServeAsked
from schemas import codes
from schemas.api import ErrorBody, PlanOne, RegistryOne


def handlers(planner: Planner) -> list[HTTPRouteHandler]:
    """The routes, for build_api."""

    @get(
        "/v1/registry/{owner:str}/{repo:str}",
        operation_id="show_registry",
        summary="What a repository of the registry holds, and what would be picked of it",
        responses=api_refusals.responses(
            api_refusals.REGISTRY,
            ok=api_refusals.told(RegistryOne, "The repository at one commit."),
        ),
    )
    async def registry(
        owner: Annotated[str, PathParameter(description="Owner of the repository.")],
        repo: Annotated[str, PathParameter(description="Its name.")],
        quant: FromQuery[str | None] = None,
        file: FromQuery[str | None] = None,
        revision: FromQuery[str | None] = None,
    ) -> RegistryOne:
        found = await planner.registry(f"{owner}/{repo}", quant=quant, file=file, revision=revision)
        return RegistryOne(data=found)

    @post(
        "/v1/plan",
        status_code=200,
        operation_id="plan_serve",
        summary="What `job.serve` with this body would do; nothing is changed",
        responses=api_refusals.responses(
            api_refusals.PLAN,
            ok=api_refusals.told(PlanOne, "What would be done, or why it would fail."),
        ),
    )
    async def plan(data: JSONBody[ServeAsked]) -> PlanOne:
        return PlanOne(data=await planner.plan(data), applied_seq=planner.position)

    return [registry, plan]


def bad_request(_: Request[Any, Any, Any], error: BadRequest) -> Response[ErrorBody]:
    return _error(400, codes.INVALID, str(error))


def not_answered(_: Request[Any, Any, Any], error: NotAnswered) -> Response[ErrorBody]:
    return _error(api_refusals.registry_status(error.code), error.code, str(error))


def _error(status: int, code: str, sentence: str) -> Response[ErrorBody]:
    return Response(api_refusals.error_body(code, sentence), status_code=status)
