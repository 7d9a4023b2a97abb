"""Says which NATS user may publish and subscribe what; users.conf and docs/permissions.md are made from it.

The lists follow from the table of writers (schemas/messages.py): who writes an aggregate, and nobody else,
may publish its subjects. No role may subscribe to `yard.evt.>` on core NATS, where refused attempts show.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from events.streams import stream_name
from events.subjects import PREFIX, encode_token
from schemas.messages import NOUNS

EVERY: Final = ("EVENTS", "COMMANDS", "PROGRESS", "AUDIT", "USAGE")


class Role(Struct, frozen=True, kw_only=True):
    """One NATS user and its rights. `replies`: may answer a request it received, once, within 2 minutes."""

    user: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    replies: bool = False


def _reader(kind: str, prefix: str, filters: Iterable[str] = ()) -> tuple[str, ...]:
    """Rights to follow a stream: wholly, or only with consumers of one of `filters`."""
    stream = stream_name(kind, prefix)
    create = f"$JS.API.CONSUMER.CREATE.{stream}"
    creates = [f"{create}.*.{f}" for f in filters] or [f"{create}.>"]
    return (
        *creates,
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
    )


def inbox_prefix(user: str) -> str:
    """Every user has its own inbox, so nobody reads another's answers."""
    return f"_INBOX_{encode_token(user)}"


def _inbox(user: str) -> str:
    return inbox_prefix(user) + ".>"


def control(prefix: str = PREFIX) -> Role:
    nouns = [n.name for n in NOUNS.values() if n.writer == "control"]
    own = [f"{prefix}.evt.{n}" if "." in n else f"{prefix}.evt.{n}.>" for n in nouns]
    return Role(
        user="control",
        publish=(
            *own,
            f"{prefix}.prog.control.>",
            f"{prefix}.beacon.leader.*",
            f"{prefix}.beacon.mirror.*",
            "$JS.API.INFO",
            "$JS.API.STREAM.NAMES",
            "$JS.API.STREAM.CREATE.*",
            "$JS.API.STREAM.UPDATE.*",
            *(r for kind in EVERY for r in _reader(kind, prefix)),
        ),
        subscribe=(_inbox("control"), f"{prefix}.beacon.>"),
    )


def gateway(prefix: str = PREFIX) -> Role:
    return Role(
        user="gateway",
        publish=(
            f"{prefix}.cmd.gateway.model.activate",
            f"{prefix}.beacon.gateway.*",
            f"{prefix}.beacon.limits.*",
            # It asks agents for adapters; what a person asks them goes by other names.
            f"{prefix}.rpc.adapters.*",
            # What requests used; nobody else may say so.
            f"{prefix}.use.gateway.>",
            "$JS.API.INFO",
            *_reader("EVENTS", prefix),
        ),
        subscribe=(
            _inbox("gateway"),
            f"{prefix}.beacon.agent.*",
            f"{prefix}.beacon.leader.*",
            # Gateways share the limits of keys among themselves.
            f"{prefix}.beacon.limits.*",
            # How far files are that somebody waits for.
            f"{prefix}.prog.*.fetch.*",
        ),
    )


def agent_user(node: str) -> str:
    return f"agent-{node}"


def agent(node: str, prefix: str = PREFIX) -> Role:
    """An agent writes its own node's aggregates and follows its plan, what it wrote itself, and the catalog:
    it has the adapters of the models it may run on its disk before somebody asks for them."""
    token = encode_token(node)
    own = [
        f"{prefix}.evt.{n.name}.{token}" + ".*" * (len(n.tokens) - 1)
        for n in NOUNS.values()
        if n.writer == "agent"
    ]
    # A consumer's filter stands in its create subject with its wildcard spelled out, hence `>`.
    filters = [
        f"{prefix}.evt.plan.{token}",
        *(f"{prefix}.evt.{noun}.>" for noun in ("model", "adapter")),
        *(s.replace(".*", ".>") for s in own),
    ]
    user = agent_user(node)
    return Role(
        user=user,
        publish=(
            *own,
            f"{prefix}.prog.{token}.>",
            f"{prefix}.beacon.agent.{token}",
            "$JS.API.INFO",
            *_reader("EVENTS", prefix, filters),
            # Whether the audit has its events decides when it may end a subject.
            f"$JS.API.STREAM.INFO.{stream_name('AUDIT', prefix)}",
        ),
        subscribe=(
            _inbox(user),
            f"{prefix}.rpc.*.{token}",
            f"{prefix}.beacon.gateway.*",
            f"{prefix}.beacon.mirror.*",
        ),
        replies=True,
    )


def admin(prefix: str = PREFIX) -> Role:
    """People: the only ones who may ask an agent for its cards or for an engine's log."""
    return Role(
        user="admin",
        publish=(
            f"{prefix}.cmd.admin.>",
            f"{prefix}.rpc.>",
            "$JS.API.INFO",
            "$JS.API.STREAM.NAMES",
            *(r for kind in EVERY for r in _reader(kind, prefix)),
        ),
        subscribe=(
            _inbox("admin"),
            f"{prefix}.live.>",
            f"{prefix}.beacon.>",
            f"{prefix}.prog.>",
        ),
    )


def viewer(prefix: str = PREFIX) -> Role:
    return Role(
        user="viewer",
        publish=tuple(r for kind in ("EVENTS", "PROGRESS", "AUDIT") for r in _reader(kind, prefix)),
        subscribe=(_inbox("viewer"), f"{prefix}.live.>", f"{prefix}.prog.>"),
    )


def roles(nodes: Iterable[str], prefix: str = PREFIX) -> tuple[Role, ...]:
    """Every user of a yard with these nodes."""
    return (
        control(prefix),
        gateway(prefix),
        *(agent(n, prefix) for n in nodes),
        admin(prefix),
        viewer(prefix),
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def users_conf(members: Iterable[tuple[Role, str]]) -> str:
    """The `authorization` block for (role, password) pairs, in the server's configuration language."""
    lines = ["authorization {", "  users: ["]
    for role, password in members:
        publish = ", ".join(_quoted(s) for s in role.publish)
        subscribe = ", ".join(_quoted(s) for s in role.subscribe)
        replies = '      allow_responses: {max: 1, expires: "2m"}\n' if role.replies else ""
        lines.append(
            f"    {{\n      user: {_quoted(role.user)}, password: {_quoted(password)}\n"
            f"      permissions: {{\n      publish: {{allow: [{publish}]}}\n"
            f"      subscribe: {{allow: [{subscribe}]}}\n{replies}      }}\n    }}"
        )
    lines += ["  ]", "}", ""]
    return "\n".join(lines)
