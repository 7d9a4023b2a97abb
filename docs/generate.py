"""Writes the documents that mirror code: settings, permissions, state diagrams, the gateway's OpenAPI, the proof column of
requirements.

With `--check` nothing is written: it names every document that would change and exits 1. Sentences are
written by people; this program only fills in what code knows better.
"""

import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
if str(ROOT) not in sys.path:
    sys.path.insert(
        0, str(ROOT)
    )  # run as a program, the packages are beside docs/, not beside this

MISSING: Final = "**no test yet**"
LATER: Final = "a later version"


# Settings --------------------------------------------------------------------------------------------


def configuration(_: str) -> str:
    """docs/configuration.md, from schemas/settings.py."""
    from schemas.settings import Settings, StaticCard

    lines = [
        "# Configuration",
        "",
        "<!-- Written by docs/generate.py from schemas/settings.py; do not edit. -->",
        "",
        "Every service reads `--config FILE` (YAML, one section per service) and uses the sections it needs.",
        "A flag wins over the environment, the environment over the file, the file over the default. The",
        "variable of a setting is `YARD_<SECTION>_<KEY>`. Durations may be written `45s`, `15m`, `8h`, sizes",
        "`512MiB`, `8GiB`; a key may be written with its unit (`wait_s: 45`) or without it (`wait: 45s`).",
        "",
        "```yaml",
        "gateway:",
        "  listen: 0.0.0.0:8080 # beyond this machine only with API keys",
        "  wait: 45s",
        "nodeagent:",
        "  allow_commands: true",
        "  cards: [{id: gpu0, kind: gpu, memory: 8GiB}]",
        "```",
        "",
    ]
    for section in msgspec.structs.fields(Settings):
        kind = section.type
        lines += [f"## {section.name}", "", first_line(kind), ""]
        lines += ["| key | default | meaning | variable |", "|---|---|---|---|"]
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            meaning = described(hints[field.name])
            variable = f"YARD_{section.name}_{bare(field.name)}".upper()
            default = shown(field.name, field.default)
            lines.append(f"| `{bare(field.name)}` | {default} | {meaning} | `{variable}` |")
        lines.append("")
    lines += ["A declared card has these fields:", "", "| key | default |", "|---|---|"]
    for field in msgspec.structs.fields(StaticCard):
        default = "required" if field.required else shown(field.name, field.default)
        lines.append(f"| `{bare(field.name)}` | {default} |")
    return "\n".join(lines) + "\n"


def first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def described(annotation: Any) -> str:
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, msgspec.Meta) and extra.description:
            return extra.description.replace("|", "\\|")
    return ""


def bare(field: str) -> str:
    for suffix in ("_bytes", "_s"):
        field = field.removesuffix(suffix)
    return field


def shown(field: str, value: Any) -> str:
    if field.endswith("_bytes") and value:
        for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if value % size == 0:
                return f"`{value // size}{unit}`"
    if field.endswith("_s"):
        for unit, size in (("h", 3600), ("m", 60)):
            if value and value % size == 0:
                return f"`{value / size:g}{unit}`"
        return f"`{value:g}s`"
    if value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return "`yes`" if value else "`no`"
    return "`" + (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)) + "`"


# Permissions -----------------------------------------------------------------------------------------


def permissions(_: str) -> str:
    """docs/permissions.md, from events/roles.py."""
    roles = importlib.import_module("events.roles").roles(["<node>"])
    lines = [
        "# Who may say what",
        "",
        "<!-- Written by docs/generate.py from events/roles.py; do not edit. -->",
        "",
        "One NATS user per role; the server refuses everything that is not listed. The lists follow from the",
        "table of writers in [the architecture](architecture.md): who writes an aggregate, and nobody else, may",
        "publish its subjects. Nobody may subscribe to `yard.evt.>`, where refused attempts would show: people",
        "tail `yard.live.>`, which the server republishes from what it stored.",
        "",
    ]
    for role in roles:
        # A node's user is spelled for `<node>`, whose encoded form no reader would recognise.
        def readable(subject: str) -> str:
            return subject.replace("%3Cnode%3E", "<node>")

        lines += [f"## {role.user}", ""]
        for verb, subjects in (("publish", role.publish), ("subscribe", role.subscribe)):
            lines.append(f"May {verb}:")
            lines += ["", *(f"- `{readable(subject)}`" for subject in subjects), ""]
        if role.replies:
            lines += ["May answer a request it received, once, within two minutes.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


# State diagrams --------------------------------------------------------------------------------------

DIAGRAMS: Final[Mapping[str, str]] = {
    "replica": "nodeagent.domain.lifecycle",
    "activation": "controlplane.domain.activation",
    "adapter": "controlplane.domain.adapters",
}
BLOCK: Final = re.compile(
    r"(<!-- begin generated: (\w+) -->\n)(.*?)(<!-- end generated: \2 -->)", re.DOTALL
)


def concepts(text: str) -> str:
    """docs/concepts.md with its diagrams drawn from the transition tables."""
    return BLOCK.sub(lambda m: m[1] + diagram(DIAGRAMS[m[2]]) + m[4], text)


def diagram(module: str) -> str:
    """A mermaid state diagram: one arrow per pair of phases, labelled by the events that lead there."""
    table: Mapping[tuple[str | None, str], str] = importlib.import_module(module).TRANSITIONS
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in table.items():
        if before != after:  # an event that repeats a phase tells details; it moves nothing
            arrows.setdefault((before or "[*]", after), []).append(event.partition(".")[2])
    left = {before for before, _ in arrows}
    lines = ["```mermaid", "stateDiagram-v2"]
    for (before, after), events in arrows.items():
        label = "" if events == [after] else f": {', '.join(events)}"
        lines.append(f"    {before} --> {after}{label}")
    ends = sorted({after for _, after in arrows} - left)
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join([*lines, "```", ""])


# The proof column of requirements ----------------------------------------------------------------------

NUMBERED: Final = re.compile(
    r"^[ \t]*(?:async )?def (test_(?:(req)_([a-dx]|bugb)(\d+)|(scn)_([a-e])(\d+)|(log)_(\d+)|(inv)_(\d+))_\w+)\(",
    re.MULTILINE,
)
ROW: Final = re.compile(r"^\| (\S+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
RANGE: Final = re.compile(r"([A-Z-]+?)(\d+)(?:…(\d+))?")


def numbered_tests(tests: Path) -> dict[str, list[str]]:
    """Number (`A12`, `BUG-B1`, `S-A3`, `L5`, `I3`) -> names of the tests that carry it, sorted."""
    found: dict[str, set[str]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        for match in NUMBERED.finditer(file.read_text(encoding="utf-8")):
            name, *parts = match.groups()
            kind, *rest = [part for part in parts if part]
            letters = rest[0].upper().replace("BUG", "BUG-") if len(rest) == 2 else ""
            number = f"{letters}{int(rest[-1])}"
            label = {"req": "", "scn": "S-", "log": "L", "inv": "I"}[kind] + number
            found.setdefault(label, set()).add(name)
    return {label: sorted(names) for label, names in found.items()}


def covers(label: str, number: str) -> bool:
    """Whether the row `label` (`A12` or a range such as `B1…59`) is about `number`."""
    row, other = RANGE.fullmatch(label), RANGE.fullmatch(number)
    if row is None or other is None or row[1] != other[1]:
        return False
    return int(row[2]) <= int(other[2]) <= int(row[3] or row[2])


def requirements(text: str, tests: Path | None = None) -> str:
    """docs/requirements.md with the third column holding the tests, or the reason there is none."""
    known = numbered_tests(tests or ROOT / "tests")

    def filled(match: re.Match[str]) -> str:
        label, sentence, proof = match.groups()
        if RANGE.fullmatch(label) is None:
            return match[0]
        names = sorted({n for number, ns in known.items() if covers(label, number) for n in ns})
        if names:
            proof = ", ".join(f"`{name}`" for name in names)
            if "…" in label:
                proof = f"{LATER}; so far {proof}"
        elif "`test_" in proof or not proof:
            proof = LATER if "…" in label else MISSING
        return f"| {label} | {sentence} | {proof} |"

    return ROW.sub(filled, text)


# The gateway's OpenAPI document ------------------------------------------------------------------------


def gateway_openapi(_: str) -> str:
    """docs/openapi/gateway.json, from the tables the gateway answers by."""
    openapi = importlib.import_module("gateway.domain.openapi")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = msgspec.json.encode(openapi.document(project["version"]))
    return msgspec.json.format(made, indent=1).decode() + "\n"


DOCUMENTS: Final[Mapping[str, Callable[[str], str]]] = {
    "configuration.md": configuration,
    "permissions.md": permissions,
    "concepts.md": concepts,
    "requirements.md": requirements,
    "openapi/gateway.json": gateway_openapi,
}


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check:
        print("usage: docs/generate.py [--check]", file=sys.stderr)
        return 64
    differing: list[str] = []
    for name, write in DOCUMENTS.items():
        path = DOCS / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = write(before)
        if after != before:
            differing.append(name)
            if not check:
                path.write_text(after, encoding="utf-8")
    if differing:
        verb = "differ from the code; run `make docs`" if check else "written"
        print(f"docs: {', '.join(differing)} {verb}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
