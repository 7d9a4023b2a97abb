"""yardctl's commands about LoRA adapters: `adapter add|list|show|rm|pin|unpin|load|unload|holders`.

Wiring only, like main.py, which hands in its group and options.
"""

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import rich_click as click

from controlplane.ctl import adapteracts, adapterplaces, adapterreads
from controlplane.ctl.adaptersource import source_of
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import UsageMistake
from schemas.commands import AdapterAdd

Options = Callable[[Any], Any]

READY_S: Final = 900.0
CHANGE_S: Final = 180.0
"""An agent gives one load two minutes, and an unload before it half a minute."""


def register(
    cli: click.Group,
    *,
    output: Options,
    timeout: Options,
    duration: click.ParamType,
    place_of: Callable[[click.Context], Place],
    run: Callable[[Coroutine[Any, Any, None]], None],
    reading: Callable[..., None],
) -> None:
    """Adds the group `adapter`."""

    replica = click.option("--replica", metavar="ID", help="In this replica and no other.")
    within = click.option(
        "--timeout",
        type=duration,
        default=f"{CHANGE_S:g}s",
        show_default=True,
        help="How long to stay; it goes on after that.",
    )

    @cli.group()
    def adapter() -> None:
        """Add, list, pin and remove LoRA adapters, and see where they are loaded."""

    @adapter.command("add")
    @click.argument("name")
    @click.option(
        "--base",
        required=True,
        metavar="MODEL",
        help="The model it was trained for, or an alias of it.",
    )
    @click.option(
        "--source",
        required=True,
        metavar="PATH|OWNER/REPO[@REV]|URL",
        help="A folder of the control plane's machine, a repository, or the URL of a folder.",
    )
    @click.option("--pin", is_flag=True, help="What has it loaded never gives it up for another.")
    @click.option("--alias", "aliases", multiple=True, help="May be given several times.")
    @click.option(
        "--trust-base", is_flag=True, help="Do not compare the base its configuration names."
    )
    @click.option("--no-wait", is_flag=True, help="Leave once it is in the catalog.")
    @click.option(
        "--wait-timeout",
        type=duration,
        default=f"{READY_S:g}s",
        show_default=True,
        help="How long to stay until it is ready.",
    )
    @output
    @timeout
    @click.pass_context
    def adapter_add(
        context: click.Context,
        name: str,
        base: str,
        source: str,
        pin: bool,
        aliases: Sequence[str],
        trust_base: bool,
        no_wait: bool,
        wait_timeout: float,
        output: str,
        timeout: float,
    ) -> None:
        """Add an adapter and stay until it is ready. Exits 1 when it cannot be served.

        It is read and fetched by the control plane; leaving this terminal changes nothing.
        """
        body = AdapterAdd(
            name=_typed(name),
            base=_typed(base, "a model"),
            source=source_of(source, Path.cwd()),
            pinned=pin,
            aliases=list(aliases),
            trust_base=trust_base,
        )
        limit = None if no_wait else wait_timeout
        run(adapteracts.add(place_of(context), body, timeout, limit, output))

    @adapter.command("list")
    @click.option("--base", metavar="MODEL", help="Only those of one model.")
    @output
    @click.pass_context
    def adapter_list(context: click.Context, base: str | None, output: str) -> None:
        """List adapters: their state, and in how many replicas they are loaded."""
        reading(place_of(context), adapterreads.list_adapters, output, datetime.now(UTC), base)

    @adapter.command("show")
    @click.argument("name")
    @output
    @click.pass_context
    def adapter_show(context: click.Context, name: str, output: str) -> None:
        """Show one, by its name, an alias or BASE:NAME; where it is loaded, and where that failed."""
        now = datetime.now(UTC)
        reading(place_of(context), adapterreads.show_adapter, _typed(name), output, now)

    @adapter.command("rm")
    @click.argument("name")
    @timeout
    @click.pass_context
    def adapter_rm(context: click.Context, name: str, timeout: float) -> None:
        """Remove an adapter; replicas unload it once no request uses it."""
        run(adapteracts.remove(place_of(context), _typed(name), timeout))

    @adapter.command("pin")
    @click.argument("name")
    @timeout
    @click.pass_context
    def adapter_pin(context: click.Context, name: str, timeout: float) -> None:
        """Never give it up for another adapter, wherever it is loaded."""
        run(adapteracts.pin(place_of(context), _typed(name), timeout, pinned=True))

    @adapter.command("unpin")
    @click.argument("name")
    @timeout
    @click.pass_context
    def adapter_unpin(context: click.Context, name: str, timeout: float) -> None:
        """Let it go again when room is needed."""
        run(adapteracts.pin(place_of(context), _typed(name), timeout, pinned=False))

    @adapter.command("load")
    @click.argument("name")
    @replica
    @within
    @output
    @click.pass_context
    def adapter_load(
        context: click.Context, name: str, replica: str | None, timeout: float, output: str
    ) -> None:
        """Load it now, before anybody asks, into every ready replica of its base."""
        run(adapterplaces.load(place_of(context), _typed(name), replica, timeout, output))

    @adapter.command("unload")
    @click.argument("name")
    @replica
    @click.option("--force", is_flag=True, help="At once, whoever is using it.")
    @within
    @output
    @click.pass_context
    def adapter_unload(
        context: click.Context,
        name: str,
        replica: str | None,
        force: bool,
        timeout: float,
        output: str,
    ) -> None:
        """Unload it wherever it is, once no request uses it; the next request loads it again."""
        place = place_of(context)
        run(adapterplaces.unload(place, _typed(name), replica, timeout, output, force=force))

    @adapter.command("holders")
    @click.argument("name", default="")
    @output
    @click.pass_context
    def adapter_holders(context: click.Context, name: str, output: str) -> None:
        """Show where it is loaded, in use, last used, and how it got there; without NAME, every adapter.

        Agents are asked themselves. Exits 3 when one does not answer.
        """
        run(adapterplaces.show_holders(place_of(context), name, output))


def _typed(name: str, what: str = "an adapter") -> str:
    """`name` itself. Raises UsageMistake when nothing was typed."""
    if not name:
        raise UsageMistake(f"expected the name of {what}, got nothing")
    return name
