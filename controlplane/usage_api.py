"""The API's question about usage: how many requests and tokens, of whom, for what, on which days. It changes nothing."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from msgspec.structs import replace

from controlplane import api_refusals
from controlplane.events_api import BadQuery
from controlplane.projections.usage import UsageModel
from controlplane.projections.usagefile import DIMENSIONS, Wanted
from events.ids import utc_now
from events.settings import parse_seconds
from schemas.api import UsageList

DEFAULT_DAYS: Final = 30
DEFAULT_BY: Final = "day,key,model"


def handlers(usage: UsageModel) -> list[HTTPRouteHandler]:
    """The routes, for build_api."""

    @get(
        "/v1/usage",
        operation_id="usage",
        summary="What requests used, summed up",
        description=(
            "Sums of what gateways told. Days are those of UTC. `by` lists what sums are kept apart by: day, key, "
            "model, adapter; without it by day, key and model. What is summed over is empty in `row`."
        ),
        responses=api_refusals.responses(
            api_refusals.USAGE,
            ok=api_refusals.told(UsageList, "The sums, each with what it is of."),
        ),
    )
    async def totals(
        since: Annotated[
            str | None,
            QueryParameter(description="First day: `2026-01-31`, or how long ago, as `7d`."),
        ] = None,
        until: Annotated[str | None, QueryParameter(description="Last day, as `since`.")] = None,
        by: Annotated[str | None, QueryParameter(description="As `day,key,model,adapter`.")] = None,
        key: Annotated[str | None, QueryParameter(description="The id or name of a key.")] = None,
        model: Annotated[str | None, QueryParameter(description="The name of a model.")] = None,
    ) -> Response[UsageList]:
        wanted = parse_wanted(since=since, until=until, by=by, model=model, now=utc_now())
        if key is not None:
            wanted = replace(wanted, key=await usage.key_id(key))
        data, position = await usage.totals(wanted)
        return Response(UsageList(data=tuple(data), applied_seq=position))

    return [totals]


def parse_wanted(
    *, since: str | None, until: str | None, by: str | None, model: str | None, now: datetime
) -> Wanted:
    """What is asked for. Raises BadQuery."""
    today = now.astimezone(UTC).date()
    first = today - timedelta(days=DEFAULT_DAYS - 1) if since is None else _day(since, "since", now)
    named = tuple(part.strip() for part in (DEFAULT_BY if by is None else by).split(","))
    shown = tuple(part for part in named if part)
    unknown = [part for part in shown if part not in DIMENSIONS]
    if unknown:
        raise BadQuery(f"by is made of {', '.join(DIMENSIONS)}, not of {unknown[0]!r}")
    return Wanted(
        since=first,
        until=today if until is None else _day(until, "until", now),
        by=shown,
        model=model,
    )


def _day(text: str, name: str, now: datetime) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        pass
    try:
        return (now - timedelta(seconds=parse_seconds(text))).astimezone(UTC).date()
    except (ValueError, OverflowError):
        raise BadQuery(
            f"{name} is a day such as 2026-01-31 or how long ago, as 7d, not {text!r}"
        ) from None
