"""yardctl's commands: what may be typed, and which function does it.

Here is wiring only: options, defaults, exit codes. Whatever goes wrong ends in a sentence and an exit code
(failures.py), never in a traceback.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

import rich_click as click

from controlplane.ctl import (
    acts,
    adapters_cli,
    cards_cli,
    keys_cli,
    reads,
    serve_cli,
    tail,
    usage_cli,
)
from controlplane.ctl.connect import Place, find_place, open_api, open_log, open_wire
from controlplane.ctl.failures import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CtlError,
    UsageMistake,
)
from controlplane.ctl.show import console, print_fields, print_json, print_table
from events.settings import parse_seconds
from events.subjects import encode_token

click.rich_click.TEXT_MARKUP = "markdown"
click.rich_click.COMMAND_GROUPS = {
    "yardctl": [
        {"name": "The yard", "commands": ["up", "init", "status", "doctor", "events"]},
        {"name": "The catalog", "commands": ["model", "apply", "adapter"]},
        {"name": "Who may ask, and did", "commands": ["key", "usage"]},
        {"name": "From a registry", "commands": ["job", "mirror", "registry"]},
        {"name": "What runs", "commands": ["replica", "node", "command"]},
        {"name": "Cards", "commands": ["card", "lease", "run", "claim", "vm", "place"]},
    ]
}

WAIT_S: Final = 900.0


class Duration(click.ParamType):
    """`90s`, `15m`, `8h`, or seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return parse_seconds(float(value) if str(value).replace(".", "").isdigit() else value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


DURATION = Duration()
OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print it.",
)
TIMEOUT = click.option(
    "--timeout",
    type=DURATION,
    default=f"{acts.OUTCOME_S:g}s",
    show_default=True,
    help="How long to wait for a decision.",
)
WAIT = click.option("--wait", is_flag=True, help="Stay until it is so, printing what happens.")
WAIT_TIMEOUT = click.option(
    "--wait-timeout",
    type=DURATION,
    default=f"{WAIT_S:g}s",
    show_default=True,
    help="How long --wait stays.",
)
FILE = click.option(
    "-f",
    "--file",
    "file",
    required=True,
    type=click.Path(path_type=Path),
    help="A YAML file with one entry or a list; `-` reads standard input.",
)


def place_of(context: click.Context) -> Place:
    return context.ensure_object(dict)["place"]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def reading(place: Place, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """Runs `work(api, *args)` with the API open."""

    async def opened() -> None:
        async with open_api(place) as api:
            await work(api, *args)

    run(opened())


def now() -> datetime:
    return datetime.now(UTC)


def _version() -> str:
    try:
        return metadata.version("modelyard")
    except metadata.PackageNotFoundError:
        return "of a folder that was not installed"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--data", type=click.Path(path_type=Path), help="Data folder (YARD_DATA).")
@click.option("--nats", metavar="URL", help="Address of NATS (YARD_NATS).")
@click.option("--api", metavar="URL", help="Address of the control plane's API (YARD_API).")
@click.version_option(version=_version(), prog_name="yardctl")
@click.pass_context
def cli(context: click.Context, data: Path | None, nats: str | None, api: str | None) -> None:
    """Runs and watches a yard: models in a catalog, loaded when asked for.

    Exit codes: 0 done, 1 failed, 2 rejected, 3 not known yet, 64 usage, 69 nothing reachable.
    """
    context.ensure_object(dict)["place"] = find_place(data=data, nats=nats, api=api)
    context.obj["data"] = data


# The yard ---------------------------------------------------------------------------------------------


@cli.command()
@click.option("--data", type=click.Path(path_type=Path), help="Data folder (YARD_DATA).")
@click.option("--gateway-port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option("--api-port", type=click.IntRange(0, 65535), default=8081, show_default=True)
@click.option("--nats-port", type=click.IntRange(0, 65535), default=4222, show_default=True)
@click.option(
    "--workers", type=click.IntRange(1, 64), help="Processes of the gateway, on its one port."
)
@click.option("--catalog", type=click.Path(path_type=Path), help="Applied once the yard is up.")
@click.option("--config", type=click.Path(path_type=Path), help="YAML file of settings.")
@click.pass_context
def up(context: click.Context, data: Path | None, **options: Any) -> None:
    """Start everything on this machine; Ctrl-C stops it. A port of 0 means any free one."""
    # Imported here: the supervisor and its server are no part of the other commands' start.
    from controlplane.ctl.up import UpOptions, run_up

    for name in ("catalog", "config"):
        path = options[name]
        if path is not None and not path.is_file():
            raise UsageMistake(f"--{name} {path}: there is no such file")
    folder = data.expanduser().absolute() if data is not None else place_of(context).data
    raise SystemExit(asyncio.run(run_up(UpOptions(data=folder, **options))))


@cli.command()
@click.option("--data", type=click.Path(path_type=Path), help="Data folder (YARD_DATA).")
@click.option("--node", "nodes", multiple=True, help="A node's name; may be given several times.")
@click.pass_context
def init(context: click.Context, data: Path | None, nodes: Sequence[str]) -> None:
    """Make secrets and NATS users for a yard whose parts are started one by one; `up` needs no init."""
    from controlplane.ctl.init import make_yard

    folder = data.expanduser().absolute() if data is not None else place_of(context).data
    for line in make_yard(folder, nodes):
        print(line)


@cli.command()
@OUTPUT
@click.pass_context
def status(context: click.Context, output: str) -> None:
    """Show the yard at a glance."""
    reading(place_of(context), reads.show_status, output, now())


@cli.command()
@OUTPUT
@click.pass_context
def doctor(context: click.Context, output: str) -> None:
    """Check every part and say what to do. Exits 1 when something is wrong."""
    from controlplane.ctl.checkup import gather
    from controlplane.ctl.judge import judge

    checks = judge(asyncio.run(gather(place_of(context))))
    if output == "json":
        print_json([{"name": c.name, "verdict": c.verdict, "sentence": c.sentence} for c in checks])
    else:
        print_table(
            ("check", "verdict", "what"), ((c.name, c.verdict, c.sentence) for c in checks), ""
        )
    if any(check.verdict == "fail" for check in checks):
        raise SystemExit(EXIT_FAILED)


@cli.command()
@click.argument("subjects", nargs=-1, metavar="[SUBJECT]...")
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows.")
@click.option("--since", metavar="TIME", help="From then on: 10m, or 2026-01-31T12:00:00Z.")
@click.option("--until", metavar="TIME", help="Up to then.")
@click.option("--from-seq", type=click.IntRange(0), help="From this sequence on (resume).")
@click.option("--state", is_flag=True, help="The last event of every subject, then go on.")
@click.option("--type", "types", multiple=True, help="Only these types, e.g. 'replica.*'.")
@click.option("--model", help="Only events about this model.")
@click.option("--node", help="Only events about this node.")
@click.option("-o", "--output", type=click.Choice(["pretty", "jsonl"]), help="jsonl on a pipe.")
@click.pass_context
def events(
    context: click.Context,
    subjects: Sequence[str],
    follow: bool,
    since: str | None,
    until: str | None,
    from_seq: int | None,
    state: bool,
    types: Sequence[str],
    model: str | None,
    node: str | None,
    output: str | None,
) -> None:
    """Print events: the whole history as far as it is kept, or with `-f` those to come.

    A SUBJECT is a filter such as `replica.>`. The pretty view of everything leaves out `leader.decided`
    and `card.measured`; name a subject or a type to see them.
    """
    place, moment = place_of(context), now()
    query = tail.Query(
        subjects=tuple(tail.parse_subject(s, place.prefix) for s in subjects)
        or (f"{place.prefix}.evt.>",),
        types=tuple(types),
        model=model,
        node=node,
        since=tail.parse_moment(since, moment) if since else None,
        until=tail.parse_moment(until, moment) if until else None,
        after=None if state else max(0, (from_seq or 0) - 1),
        follow=follow,
        live=follow and not state and since is None and from_seq is None,
    )
    out = console()
    kind = output or ("pretty" if out.is_terminal else "jsonl")

    async def work() -> None:
        async with open_log(place) as log:
            await tail.tail(log, query, kind, out)

    run(work())


# The catalog ------------------------------------------------------------------------------------------


@cli.group()
def model() -> None:
    """Add, show, scale, load and remove models."""


@model.command("add")
@FILE
@TIMEOUT
@click.pass_context
def model_add(context: click.Context, file: Path, timeout: float) -> None:
    """Add the one entry of a file; an existing name is refused."""
    run(acts.add(place_of(context), file, timeout))


@cli.command("apply")
@FILE
@click.option("--dry-run", is_flag=True, help="Only tell what would start, drain and stop.")
@click.option("--prune", is_flag=True, help="Remove the models the file does not name.")
@TIMEOUT
@click.pass_context
def apply_catalog(
    context: click.Context, file: Path, dry_run: bool, prune: bool, timeout: float
) -> None:
    """Make the entries a file names equal to it; others stay as they are."""
    run(acts.apply(place_of(context), file, dry_run=dry_run, prune=prune, timeout_s=timeout))


@model.command("list")
@OUTPUT
@click.pass_context
def model_list(context: click.Context, output: str) -> None:
    """List the catalog and what runs of it."""
    reading(place_of(context), reads.list_models, output)


@model.command("show")
@click.argument("name")
@OUTPUT
@click.pass_context
def model_show(context: click.Context, name: str, output: str) -> None:
    """Show one entry, by its name or an alias."""
    reading(place_of(context), reads.show_model, name, output)


@model.command("rm")
@click.argument("name")
@WAIT
@TIMEOUT
@WAIT_TIMEOUT
@click.pass_context
def model_rm(
    context: click.Context, name: str, wait: bool, timeout: float, wait_timeout: float
) -> None:
    """Remove a model; its replicas drain and stop."""
    run(acts.remove(place_of(context), name, timeout, wait_timeout if wait else None))


@model.command("scale")
@click.argument("name")
@click.option("--min", "minimum", type=click.IntRange(0), required=True, help="Always kept.")
@click.option(
    "--max", "maximum", type=click.IntRange(0), help="At most; left out: exactly min are kept."
)
@WAIT
@TIMEOUT
@WAIT_TIMEOUT
@click.pass_context
def model_scale(
    context: click.Context,
    name: str,
    minimum: int,
    maximum: int | None,
    wait: bool,
    timeout: float,
    wait_timeout: float,
) -> None:
    """Change how many replicas are kept and allowed."""
    limit = wait_timeout if wait else None
    most = minimum if maximum is None else maximum
    run(acts.scale(place_of(context), name, minimum, most, timeout, limit))


@model.command("load")
@click.argument("name")
@click.option(
    "--for", "for_s", type=DURATION, help="Hold it that long, whatever the idle clock says."
)
@WAIT
@TIMEOUT
@WAIT_TIMEOUT
@click.pass_context
def model_load(
    context: click.Context,
    name: str,
    for_s: float | None,
    wait: bool,
    timeout: float,
    wait_timeout: float,
) -> None:
    """Start one replica more, up to max; counts as one use."""
    run(acts.load(place_of(context), name, for_s, timeout, wait_timeout if wait else None))


@model.command("unload")
@click.argument("name")
@click.option("--force", is_flag=True, help="End running requests at once.")
@WAIT
@TIMEOUT
@WAIT_TIMEOUT
@click.pass_context
def model_unload(
    context: click.Context, name: str, force: bool, wait: bool, timeout: float, wait_timeout: float
) -> None:
    """Give a model's memory back now; refused while its min is above 0."""
    run(acts.unload(place_of(context), name, force, timeout, wait_timeout if wait else None))


# What runs --------------------------------------------------------------------------------------------


@cli.group()
def replica() -> None:
    """List, show, park and resume replicas, and read their logs."""


@replica.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that ended.")
@OUTPUT
@click.pass_context
def replica_list(context: click.Context, everything: bool, output: str) -> None:
    """List replicas."""
    reading(place_of(context), reads.list_replicas, output, now(), everything)


@replica.command("show")
@click.argument("id")
@OUTPUT
@click.pass_context
def replica_show(context: click.Context, id: str, output: str) -> None:
    """Show one replica."""
    reading(place_of(context), reads.show_one, "replicas", id, output)


@replica.command("logs")
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on as the engine writes.")
@click.option("--tail-bytes", type=click.IntRange(0), default=65536, show_default=True)
@click.pass_context
def replica_logs(context: click.Context, id: str, follow: bool, tail_bytes: int) -> None:
    """Print the end of an engine's log."""
    from controlplane.ctl.replicalogs import print_logs

    place = place_of(context)

    async def work() -> None:
        async with open_api(place) as api:
            found = await api.data(reads.path_of("replicas", id))
        async with open_wire(place) as wire:
            await print_logs(wire, id, found["node"], tail_bytes, follow)

    run(work())


@cli.group()
def node() -> None:
    """List, show and cordon nodes."""


@node.command("list")
@OUTPUT
@click.pass_context
def node_list(context: click.Context, output: str) -> None:
    """List nodes and their cards."""
    reading(place_of(context), reads.list_nodes, output, now())


@node.command("show")
@click.argument("id")
@OUTPUT
@click.pass_context
def node_show(context: click.Context, id: str, output: str) -> None:
    """Show one node."""
    reading(place_of(context), reads.show_one, "nodes", id, output)


@node.command("cordon")
@click.argument("id")
@TIMEOUT
@click.pass_context
def node_cordon(context: click.Context, id: str, timeout: float) -> None:
    """Place nothing new on a node; what runs there stays."""
    run(acts.cordon(place_of(context), id, timeout))


@node.command("uncordon")
@click.argument("id")
@TIMEOUT
@click.pass_context
def node_uncordon(context: click.Context, id: str, timeout: float) -> None:
    """Place models on a node again."""
    run(acts.uncordon(place_of(context), id, timeout))


@cli.group()
def command() -> None:
    """What became of a command."""


@command.command("show")
@click.argument("id")
@OUTPUT
@click.pass_context
def command_show(context: click.Context, id: str, output: str) -> None:
    """Show the outcome of a command."""
    reading(place_of(context), reads.show_one, "commands", id, output)


@command.command("wait")
@click.argument("id")
@TIMEOUT
@OUTPUT
@click.pass_context
def command_wait(context: click.Context, id: str, timeout: float, output: str) -> None:
    """Wait for the outcome of a command; exits as the command itself would have."""
    encode_token(id)
    outcome = asyncio.run(acts.wait_for_outcome(place_of(context), id, timeout))
    if output == "json":
        print_json(outcome)
    else:
        print_fields(outcome)


serve_cli.register(
    cli, model, output=OUTPUT, timeout=TIMEOUT, place_of=place_of, run=run, reading=reading
)
adapters_cli.register(
    cli,
    output=OUTPUT,
    timeout=TIMEOUT,
    duration=DURATION,
    place_of=place_of,
    run=run,
    reading=reading,
)
keys_cli.register(
    cli,
    output=OUTPUT,
    timeout=TIMEOUT,
    duration=DURATION,
    place_of=place_of,
    run=run,
    reading=reading,
)
usage_cli.register(cli, output=OUTPUT, place_of=place_of, reading=reading)
cards_cli.register(
    cli,
    replica,
    output=OUTPUT,
    timeout=TIMEOUT,
    wait=WAIT,
    wait_timeout=WAIT_TIMEOUT,
    duration=DURATION,
    place_of=place_of,
    run=run,
    reading=reading,
)


# The program ------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs yardctl and returns its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that lacks a character gets a question mark, not a failure.
        sys.stdout.reconfigure(errors="replace")
    # Libraries log their troubles; a person gets the sentence of the error instead.
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
    try:
        answer = cli.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="yardctl",
            standalone_mode=False,
        )
    except CtlError as error:
        return _complain(error.lines, error.code)
    except click.UsageError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        error.show()
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except SystemExit as error:
        answer = error.code if isinstance(error.code, int) else EXIT_FAILED
    except BrokenPipeError:
        # Whoever read us has enough. Python would complain once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except UnicodeEncodeError:
        # Half a surrogate pair: of an argument that is no UTF-8, or escaped in a file.
        return _complain(("an argument or a text of the file is no valid Unicode",), EXIT_USAGE)
    except Exception as error:
        # The last boundary before a person.
        if os.environ.get("YARD_TRACEBACK"):
            raise
        kind = type(error).__name__
        line = f"this is a fault of yardctl ({kind}: {error}); YARD_TRACEBACK=1 shows where"
        return _complain((line,), EXIT_FAILED)
    # A group without arguments prints its help and answers 2, which here would mean "rejected".
    if answer == 2:
        return EXIT_USAGE
    return answer if isinstance(answer, int) else EXIT_DONE


def _complain(lines: Sequence[str], code: int) -> int:
    first, *rest = lines
    for line in (f"yardctl: {first}", *(f"  {line}" for line in rest)):
        print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
