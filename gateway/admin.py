"""Answers what the gateway itself is asked: models and their standing, health, numbers, timelines, its description, preflights.

All of it only reads: no scrape, probe or listing starts a model, wakes one or counts as a use.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct, structs

from gateway import description
from gateway.domain.adaptertable import AdapterEntry
from gateway.domain.admission import unknown
from gateway.domain.answers import Answer, answer
from gateway.domain.cards import CardRef
from gateway.domain.cors import preflight_headers
from gateway.domain.doors import is_loopback
from gateway.domain.keytable import ANYBODY, Caller
from gateway.domain.names import Place, place_of
from gateway.domain.oncards import is_served, missing_card, not_served
from gateway.domain.rights import forbidden, visible
from gateway.domain.status import Readiness, adapter_card, list_body, model_card, model_list
from gateway.domain.table import Table
from gateway.gateway import Gateway
from gateway.http.messages import Request, Responder
from gateway.metrics import CONTENT_TYPE, Metrics, Reading
from gateway.timeline import Timelines, shown
from schemas.cardnames import ANY_SCOPE

JSON = (b"content-type", b"application/json")

WHOLE_BYTES = 256 * 1024
"""A page of numbers up to this size is one answer with a length."""


class Admin:
    """The gateway's own routes, all but inference."""

    def __init__(self, gateway: Gateway, metrics: Metrics, timelines: Timelines) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._timelines = timelines
        self.metrics_page: Callable[[], Awaitable[bytes]] | None = None
        """What `/metrics` shows instead of this process's numbers alone."""
        metrics.watch(self.gauges)

    async def serve(
        self, place: Place, request: Request, respond: Responder, caller: Caller = ANYBODY
    ) -> Answer | int:
        """Answers, returning the status; or returns the refusal for the caller to write."""
        match place.kind:
            case "preflight":
                headers = preflight_headers(request.headers.get(b"access-control-request-headers"))
                await respond.send(204, headers, b"")
                return 204
            case "healthz":
                return await _json(respond, 200, {"status": "ok"})
            case "readyz":
                return await self._readyz(respond)
            case "metrics":
                await self._numbers(respond)
                return 200
            case "openapi":
                await respond.send(200, (JSON,), description.page())
                return 200
            case "timeline":
                return await self._timeline(request, respond)
            case "models":
                return await self._models(respond, place.on, caller)
            case "model":
                refused = forbidden(caller, place.model, self._gateway.table)
                return refused or await self._model(place.model, respond, place.on)
            case "bad_card_name":
                return answer("invalid_request", "The node or the card in the path is not UTF-8.")
            case "bad_model_id":
                return answer("invalid_request", "The model id in the path is not UTF-8.")
            case "method_not_allowed":
                respond.add_header(b"allow", place.allow.encode())
                return answer(
                    "method_not_allowed",
                    f"{request.method} is not answered here, only {place.allow}.",
                )
            case "route_not_forwarded":
                return answer(
                    "route_not_forwarded",
                    f"The gateway does not pass {request.path} on to engines{_meant(request)}",
                )
            case "not_found" | "inference":
                return answer("not_found", f"There is nothing at {request.path}{_meant(request)}")

    async def _numbers(self, respond: Responder) -> None:
        """The page for Prometheus; a large one goes out while it is written: it is never held, nor copied, as a whole."""
        headers = ((b"content-type", CONTENT_TYPE),)
        page = self.metrics_page
        pieces = self._metrics.pieces() if page is None else _sliced(await page())
        first: list[bytes] = []
        size = 0
        async for piece in pieces:
            if respond.started:
                await respond.write(piece)
                continue
            first.append(piece)
            size += len(piece)
            if size > WHOLE_BYTES:
                await respond.send_head(200, headers)
                await respond.write(b"".join(first))
        if respond.started:
            await respond.finish()
        else:
            await respond.send(200, headers, b"".join(first))

    async def _readyz(self, respond: Responder) -> int:
        gateway = self._gateway
        ready = gateway.table is not None and not gateway.draining and gateway.stopped is None
        table = gateway.table
        body = Readiness(
            ready=ready,
            synced=gateway.synced,
            connected=gateway.is_connected(),
            draining=gateway.draining,
            position=None if table is None else table.position,
            broken={} if table is None else dict(table.broken),
            stopped=gateway.stopped,
        )
        return await _json(respond, 200 if ready else 503, body)

    async def _timeline(self, request: Request, respond: Responder) -> Answer | int:
        if not is_loopback(request.peer):
            return answer("not_found", "Timelines are shown on this machine only.")
        wanted = parse_qs(request.query.decode("latin-1")).get("request", [""])[0]
        if not wanted:
            return answer("not_found", "Name the request: `?request=` and its x-request-id.")
        found = self._timelines.find(wanted)
        if found is None:
            return answer("not_found", f"No timeline of a request {wanted!r} is kept.")
        return await _json(respond, 200, shown(found, self._gateway.clock))

    async def _models(self, respond: Responder, on: CardRef | None, caller: Caller) -> Answer | int:
        gateway = self._gateway
        table = gateway.table
        if table is None:
            return answer("yard_unavailable", "This gateway has not read the catalog yet.")
        missing = None if on is None else missing_card(table, on, synced=gateway.synced)
        if missing is not None:
            return missing
        scope = ANY_SCOPE if on is None else on.scope
        listed = model_list(
            table,
            gateway.clock.now(),
            waiting=gateway.waiting(None if on is None else scope),
            stale=not gateway.synced,
            ejected=gateway.standing().ejected,
            scope=scope,
        )
        shown_to = structs.replace(listed, data=visible(caller, listed.data))
        await respond.send(200, (JSON,), list_body(shown_to))
        return 200

    async def _model(self, name: str, respond: Responder, on: CardRef | None) -> Answer | int:
        gateway = self._gateway
        table = gateway.table
        if table is None:
            return answer("yard_unavailable", "This gateway has not read the catalog yet.")
        missing = None if on is None else missing_card(table, on, synced=gateway.synced)
        if missing is not None:
            return missing
        scope = ANY_SCOPE if on is None else on.scope
        model = table.model(name)
        adapter = table.adapter(name) if model is None else None
        if adapter is not None:
            return await self._adapter(table, adapter, name, respond, scope)
        if model is None:
            return unknown(name, synced=gateway.synced)
        if not is_served(table, model, scope):
            return not_served(model.name, scope)
        card = model_card(
            table,
            table.models[model.name],
            gateway.clock.now(),
            asked_as=name,
            waiting=gateway.waiting(None if on is None else scope).get(model.name, 0),
            ejected=gateway.standing().ejected,
            scope=scope,
        )
        await respond.send(200, (JSON,), msgspec.json.encode(card))
        return 200

    async def _adapter(
        self, table: Table, entry: AdapterEntry, name: str, respond: Responder, scope: str
    ) -> Answer | int:
        base = table.base_of(entry)
        if base is not None and not is_served(table, base, scope):
            return not_served(name, scope)
        card = adapter_card(
            table,
            entry,
            self._gateway.clock.now(),
            asked_as=name,
            ejected=self._gateway.standing().ejected,
            scope=scope,
        )
        await respond.send(200, (JSON,), msgspec.json.encode(card))
        return 200

    def gauges(self) -> dict[str, Reading]:
        """What is read at scrape time; labels are catalog names, known cards, or none."""
        gateway = self._gateway
        table = gateway.table
        inflight: dict[str, float] = {}
        for replica_id, count in gateway.usage.by_replica.items():
            replica = None if table is None else table.replicas.get(replica_id)
            model = replica.model if replica is not None else "(gone)"
            inflight[model] = inflight.get(model, 0) + count
        waiting = {m: float(n) for m, n in gateway.waiting().items()}
        on_cards: dict[str, float] = {}
        for scope, count in gateway.room.by_scope().items():
            if scope != ANY_SCOPE:
                known = scope if table is not None and scope in table.cards() else "(unknown)"
                on_cards[known] = on_cards.get(known, 0) + count

        def one(text: str, value: float) -> Reading:
            return Reading(text=text, values={"": float(value)})

        return {
            "yard_gateway_inflight": Reading(
                text="Requests running at engines.", values=inflight or {"": 0.0}
            ),
            "yard_gateway_waiting": Reading(
                text="Requests that wait for a model or for their turn.",
                values=waiting or {"": 0.0},
            ),
            "yard_gateway_in_line": Reading(
                text="Those of them that wait for their turn at a model that runs.",
                values={m: float(n) for m, n in gateway.line.by_model().items()} or {"": 0.0},
            ),
            "yard_gateway_card_waiting": Reading(
                text="Those of them that came under the base URL of a card.",
                values=on_cards or {"": 0.0},
                label="scope",
            ),
            "yard_gateway_synced": one(
                "1 when the table holds the whole log, 0 from a snapshot or without one.",
                gateway.synced,
            ),
            "yard_gateway_connected": one("1 while NATS is connected.", gateway.is_connected()),
            "yard_gateway_position": one(
                "Sequence of the last event applied.", table.position if table is not None else 0
            ),
            "yard_gateway_stopped": one(
                "1 when an event could not be folded and the table does not follow the log any more.",
                gateway.stopped is not None,
            ),
            "yard_gateway_broken_subjects": one(
                "Subjects whose last event cannot be read.",
                len(table.broken) if table is not None else 0,
            ),
            "yard_gateway_unknown_events": one(
                "Events of a newer type or version that were not folded.",
                table.unknown_events if table is not None else 0,
            ),
            "yard_gateway_adapter_pins": one(
                "Adapters in replicas that this gateway counts on.", len(gateway.pins)
            ),
            "yard_gateway_adapter_pins_trusted": one(
                "Those of them that a request could be sent to without asking an agent.",
                gateway.pins.trusted(gateway.clock.now_s()),
            ),
            "yard_gateway_ejected": one(
                "Replicas that did not answer this gateway as they should.", len(gateway.ejections)
            ),
        }


async def _sliced(page: bytes) -> AsyncIterator[bytes]:
    """A page that is there already, with others' turns between its pieces."""
    for begin in range(0, len(page), WHOLE_BYTES):
        yield page[begin : begin + WHOLE_BYTES]
        await asyncio.sleep(0)


def _meant(request: Request) -> str:
    """What to say of a client whose base URL has `/v1` once too few or too often; else the end of the sentence."""
    path = request.path
    other = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    meant = place_of(request.method, other).kind in ("inference", "models", "model")
    return f"; did the base URL mean {other}?" if meant else "."


async def _json(respond: Responder, status: int, body: Mapping[str, object] | Struct) -> int:
    await respond.send(status, (JSON,), msgspec.json.encode(body))
    return status
