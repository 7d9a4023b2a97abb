"""What yardctl reads from the API and shows: models, replicas, nodes, commands, the state of the yard.

Reading has no effects. Each function takes the open API and prints; nothing is kept.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from controlplane.ctl.connect import Api, Listed
from controlplane.ctl.failures import CtlError
from controlplane.ctl.show import (
    age,
    mode,
    notes_of,
    print_fields,
    print_json,
    print_table,
    size,
    unread_line,
)
from schemas.replica import TERMINAL_PHASES

Row = Mapping[str, Any]


def path_of(kind: str, key: str) -> str:
    """The path of one thing; a name may hold anything."""
    return f"/v1/{kind}/{quote(key, safe='')}"


def refuse_unread(listed: Listed, name: str) -> None:
    """Raises CtlError when `name` is one that a newer version wrote: it is there, and cannot be shown."""
    for one in listed.unread:
        if one["name"] == name:
            raise CtlError(unread_line(one))


async def show_one(api: Api, kind: str, key: str, output: str) -> None:
    found = await api.data(path_of(kind, key))
    if output == "json":
        print_json(found)
    else:
        print_fields(found)


async def show_model(api: Api, name: str, output: str) -> None:
    """One entry by its name or an alias. Raises CtlError when neither is known."""
    models = await api.data("/v1/models")
    names = (model["name"] for model in models if name in model.get("aliases", []))
    await show_one(api, "models", next(names, name), output)


async def list_models(api: Api, output: str) -> None:
    models = await api.listed("/v1/models")
    if output == "json":
        print_json(models.rows + models.unread)
        return
    replicas = await api.data("/v1/replicas")
    activations = await api.data("/v1/activations")
    print_table(
        ("model", "scaling", "state", "replicas", "profiles", "aliases"),
        (model_row(model, replicas, activations) for model in models.rows),
        "the catalog is empty; serve a model: yardctl model serve OWNER/REPO",
        notes_of(models),
    )


def model_row(model: Row, replicas: Sequence[Row], activations: Sequence[Row]) -> tuple[str, ...]:
    """`state` is that of the replicas when there are any, else of the demand; `replicas` how many are ready of those
    there are, or shall be."""
    own = [r for r in replicas if r["model"] == model["name"]]
    live = [r for r in own if r["phase"] not in TERMINAL_PHASES]
    ready = sum(r["phase"] == "ready" for r in live)
    demand = next((a["phase"] for a in activations if a["model"] == model["name"]), "idle")
    scaling = model.get("scaling", {})
    if mode(scaling) == "off" and not live:
        state = "off"
    elif ready:
        state = "ready"
    else:
        state = live[0]["phase"] if live else demand
    return (
        model["name"],
        mode(scaling),
        state,
        f"{ready}/{max(len(live), scaling.get('min', 0))}",
        ", ".join(p["name"] for p in model.get("profiles", [])),
        ", ".join(model.get("aliases", [])),
    )


async def list_replicas(api: Api, output: str, now: datetime, everything: bool) -> None:
    replicas = await api.listed("/v1/replicas")
    if output == "json":
        print_json(replicas.rows + replicas.unread)
        return
    shown = [r for r in replicas.rows if everything or r["phase"] not in TERMINAL_PHASES]
    print_table(
        ("id", "model", "node", "cards", "profile", "phase", "since", "memory", "why"),
        (replica_row(replica, now) for replica in shown),
        "no replica is running" if not everything else "there is no replica",
        notes_of(replicas),
    )


def replica_row(replica: Row, now: datetime) -> tuple[str, ...]:
    return (
        replica["id"],
        replica["model"],
        replica["node"],
        ",".join(replica.get("cards", [])),
        replica["profile"],
        replica["phase"],
        age(replica.get("since"), now),
        size(replica.get("measured_memory_bytes") or replica.get("memory_bytes")),
        replica.get("reason") or replica.get("last_line") or "",
    )


async def list_nodes(api: Api, output: str, now: datetime) -> None:
    nodes = await api.listed("/v1/nodes")
    if output == "json":
        print_json(nodes.rows + nodes.unread)
        return
    cards = await api.data("/v1/cards")
    print_table(
        ("node", "state", "host", "cards", "engines", "since", "version"),
        (node_row(node, cards, now) for node in nodes.rows),
        "no node has registered",
        notes_of(nodes),
    )


def standing_of(node: Row) -> str:
    """One word for a node: what the operator wants of it before what its heartbeats say."""
    standing = node.get("standing") or {}
    reach = standing.get("reach", "reachable")
    if reach != "reachable":
        return reach
    admin = standing.get("admin", "open")
    if admin != "open":
        return admin
    return "reachable" if node.get("running", True) else "agent stopped"


def node_row(node: Row, cards: Sequence[Row], now: datetime) -> tuple[str, ...]:
    own = [c for c in cards if c["node"] == node["id"]]
    return (
        node["id"],
        standing_of(node),
        node.get("host", ""),
        ", ".join(card_cell(card) for card in own),
        ", ".join(e["name"] for e in node.get("engines", [])),
        age(node.get("started_at"), now),
        node.get("version", ""),
    )


def card_cell(card: Row) -> str:
    """`cpu 1.2 GiB of 8 GiB leased`."""
    leased = sum(lease["memory_bytes"] for lease in card.get("leases", []))
    held = size(leased) if leased else "0"
    return f"{card['id']} {held} of {size(card['memory_bytes'])} leased"


def counted(states: Iterable[str]) -> str:
    """`198 ready, 2 refused`: each state with how often it is there, the most frequent first."""
    ordered = sorted(Counter(states).items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{count} {state}" for state, count in ordered)


async def show_status(api: Api, output: str, now: datetime) -> None:
    """The yard at a glance."""
    doctor = await api.get("/v1/doctor")
    kinds = ("nodes", "cards", "models", "replicas", "activations", "adapters")
    listed = {kind: await api.listed(f"/v1/{kind}") for kind in kinds}
    if output == "json":
        told = {kind: found.rows + found.unread for kind, found in listed.items()}
        print_json({"doctor": doctor, **told})
        return
    nodes, cards, models, replicas, activations, adapters = (listed[kind].rows for kind in kinds)
    leader = doctor.get("leader")
    who = f"{leader['instance']} (term {leader['term']})" if leader else "nobody"
    print(f"leader   {who}")
    seq = doctor.get("log_seq")
    print(f"log      sequence {'unknown' if seq is None else seq}")
    findings = doctor.get("findings", [])
    print(f"ready    {'yes' if not findings else 'no'}")
    for finding in findings:
        print(f"         {finding['sentence']}")
    for node in nodes:
        own = [c for c in cards if c["node"] == node["id"]]
        print(f"node     {node['id']}: {standing_of(node)}; {', '.join(map(card_cell, own))}")
    if not nodes and not listed["nodes"].unread:
        print("node     none has registered")
    if adapters:
        print(f"adapters {counted(adapter['phase'] for adapter in adapters)}")
    print()
    print_table(
        ("model", "scaling", "state", "replicas", "profiles", "aliases"),
        (model_row(model, replicas, activations) for model in models),
        "the catalog is empty; serve a model: yardctl model serve OWNER/REPO",
        [note for found in listed.values() for note in notes_of(found)],
    )
    refused = [a for a in activations if a["phase"] in ("refused", "waiting", "wanted")]
    for activation in refused:
        why = activation.get("reason") or ", ".join(activation.get("waiting_for", []))
        print(f"\n{activation['model']}: {activation['phase']}: {why}")
