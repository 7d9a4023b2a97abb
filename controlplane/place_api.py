"""The API's question about placement: where a model would go now. It changes nothing."""

from typing import Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from controlplane import api_refusals
from controlplane.placing import NotThere, PlaceAsked, Placer
from schemas import codes
from schemas.api import ErrorBody, PlaceOne


def handlers(placer: Placer) -> list[HTTPRouteHandler]:
    """The routes, for build_api."""

    @post(
        "/v1/place",
        status_code=200,
        operation_id="place",
        summary="Where a replica of a model would go now; nothing is changed",
        responses=api_refusals.responses(
            api_refusals.PLACE, ok=api_refusals.told(PlaceOne, "Every candidate, best first.")
        ),
    )
    async def place(data: JSONBody[PlaceAsked]) -> PlaceOne:
        found = await placer.place(data)
        return PlaceOne(data=found, applied_seq=found.position)

    return [place]


def not_there(_: Request[Any, Any, Any], error: NotThere) -> Response[ErrorBody]:
    return Response(api_refusals.error_body(codes.NOT_FOUND, str(error)), status_code=404)
