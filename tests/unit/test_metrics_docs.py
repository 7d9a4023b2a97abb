"""docs/metrics.md and the dashboard name the numbers there are: none is left out, none is made up."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from controlplane.app import ControlPlane
from controlplane.candidate import Me
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from gateway.accesslog import AccessLine
from gateway.accounting import Accounting
from gateway.admin import Admin
from gateway.clock import LoopClock
from gateway.domain.tokens import Tokens
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from gateway.requestmetrics import MAX_KEYS, OTHER, RequestNumbers
from gateway.timeline import Timelines
from schemas.settings import ControlplaneSettings, GatewaySettings
from tests.support.aio import run

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "modelyard.json").read_text("utf-8"))


def kinds_of(text: bytes) -> dict[str, str]:
    """Names and kinds of a scrape, without the times at which counters began."""
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text.decode(), re.MULTILINE))
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


def of_a_gateway() -> dict[str, str]:
    async def scraped() -> bytes:
        gateway, metrics = Gateway("gw", GatewaySettings(), LoopClock()), Metrics()
        log = MemoryLog(MemoryBroker(), source="/gateway/gw")
        Admin(gateway, metrics, Timelines())
        Accounting("gw", "i", log, metrics)
        return metrics.render()

    return kinds_of(run(scraped()))


def of_a_control_plane(folder: Path) -> dict[str, str]:
    async def scraped() -> bytes:
        log = MemoryLog(MemoryBroker(), source="/cp/cp-1")
        plane = ControlPlane(
            events=log,
            wire=MemoryWire(log.connection),
            me=Me(instance="cp-1", host="h", pid=1),
            settings=ControlplaneSettings(),
            folder=folder,
            token="t",
        )
        return plane.metrics.text()

    return kinds_of(run(scraped()))


def rows_below(head: str) -> dict[str, tuple[str, set[str]]]:
    """Name -> kind and labels of the table below a heading."""
    section = TEXT[TEXT.index(head) :].split("\n## ", 1)[0]
    found = re.findall(r"^\| `(yard_\w+)` \| (\w+) \| ([a-z, ]*) ?\|", section, re.MULTILINE)
    assert len(found) == len({name for name, _, _ in found})
    return {
        name: (kind, {label.strip() for label in labels.split(",") if label.strip()})
        for name, kind, labels in found
    }


def test_every_number_of_a_gateway_is_told_and_no_other() -> None:
    assert {n: kind for n, (kind, _) in rows_below("## A gateway's").items()} == of_a_gateway()


def test_every_number_of_a_control_plane_is_told_and_no_other(tmp_path: Path) -> None:
    told = {n: kind for n, (kind, _) in rows_below("## A control plane's").items()}
    assert told == of_a_control_plane(tmp_path)


def test_labels_of_a_gateways_numbers_are_told_as_they_are() -> None:
    metrics = Metrics()
    used = Tokens(prompt=1, estimated=True)
    metrics.of_requests.count("m", "ok", "k", duration_s=1, first_s=1, tokens=used)
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        labels = getattr(family, "_labelnames", None)
        if labels is not None:
            found[f"{family.name}{'_total' * (family.type == 'counter')}"] = set(labels)
    told = {name: labels for name, (_, labels) in rows_below("## A gateway's").items()}
    assert len(found) > 15
    assert {name: told[name] for name in found} == found


def test_the_fields_of_the_access_log_are_those_of_a_line() -> None:
    section = TEXT[TEXT.index("## The access log") :]
    told = set[str]()
    for line in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        told |= set(re.findall(r"`(\w+)`", line))
    of_every_line = {"time", "level", "logger", "message"}
    assert told == {f.name for f in msgspec.structs.fields(AccessLine)} - of_every_line


def queries() -> Iterable[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        query = variable["query"]
        yield query if isinstance(query, str) else query["query"]


def test_every_number_and_label_of_the_dashboard_exists() -> None:
    told = rows_below("## A gateway's") | rows_below("## A control plane's")
    named = set[str]()
    for query in queries():
        for name, _, selected in re.findall(r"(yard_\w+)(\{([^}]*)\})?", query):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            known = base if base in told and told[base][0] == "histogram" else name
            assert known in told, name
            named.add(known)
            labels = set(re.findall(r"(\w+)[!=]", selected))
            for summed in re.findall(r"by \(([\w, ]*)\)", query):
                labels |= set(summed.split(", ")) - {"le", "instance"}
            assert labels <= told[known][1], query
    assert len(named) > 25


def test_the_dashboards_panels_have_their_own_ids_and_places() -> None:
    panels = DASHBOARD["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken = set[tuple[int, int]]()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_only_so_many_keys_have_numbers_of_their_own() -> None:
    numbers = RequestNumbers()
    tokens = Tokens(prompt=3, cached=1, completion=2)
    for n in range(MAX_KEYS + 50):
        for _ in range(2):
            numbers.count("m", "ok", f"k{n}", duration_s=0.2, first_s=0.1, tokens=tokens)
    families = {family.name: family for family in numbers.collect()}
    requests = {
        s.labels["key"]: s.value
        for s in families["yard_gateway_key_requests"].samples
        if s.name.endswith("_total")
    }
    assert len(requests) == MAX_KEYS + 1
    assert (requests["k0"], requests[OTHER]) == (2, 100)
    tokens_of = families["yard_gateway_key_tokens"].samples
    assert sum(s.value for s in tokens_of if s.labels["kind"] == "prompt") == 2 * 3 * (
        MAX_KEYS + 50
    )


def test_a_histogram_counts_upwards_and_sums() -> None:
    numbers = RequestNumbers()
    for seconds in (0.005, 0.02, 0.02, 1000.0):
        numbers.count("m", "ok", "", duration_s=seconds, first_s=None, tokens=None)
    (durations,) = (f for f in numbers.collect() if f.name == "yard_gateway_request_seconds")
    buckets = {s.labels["le"]: s.value for s in durations.samples if s.name.endswith("_bucket")}
    assert (buckets["0.005"], buckets["0.01"], buckets["0.025"], buckets["300.0"]) == (1, 1, 3, 3)
    assert buckets["+Inf"] == 4
    totals = {s.name: s.value for s in durations.samples}
    assert totals["yard_gateway_request_seconds_sum"] == 1000.045
    assert totals["yard_gateway_request_seconds_count"] == 4
