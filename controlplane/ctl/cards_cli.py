"""yardctl's commands about cards: `card`, `lease`, `claim`, `vm`, `run`, `place`, `replica park|resume`.

Wiring only, like main.py, which hands in its groups and options.
"""

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import rich_click as click

from controlplane.ctl import cardacts, cardreads, parkacts, running
from controlplane.ctl.cardasking import parse_card, parse_cards
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import UsageMistake
from events.settings import parse_bytes
from schemas.card import PRIORITIES, ClaimKind, Priority

Options = Callable[[Any], Any]

ACQUIRE_S: Final = 60.0
RUN_S: Final = 3600.0
ATTACH_S: Final = 300.0
PATIENT_S: Final = 86400.0


class Bytes(click.ParamType):
    """`8GiB`, `500MB`, or bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_bytes(int(value) if str(value).isdigit() else value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


AS = click.option("--as", "name", required=True, help="Who it is for, as others shall read it.")
MEMORY = click.option(
    "--memory", type=Bytes(), help="So much of each card beside others; the whole card if left out."
)
PINNED = click.option("--pinned", is_flag=True, help="Nobody may ask it to leave.")
PRIORITY = click.option(
    "--priority",
    type=click.Choice(PRIORITIES),
    default="interactive",
    show_default=True,
    help="Place in line, and who has to leave for it; the most urgent first.",
)


def register(
    cli: click.Group,
    replica: click.Group,
    *,
    output: Options,
    timeout: Options,
    wait: Options,
    wait_timeout: Options,
    duration: click.ParamType,
    place_of: Callable[[click.Context], Place],
    run: Callable[[Coroutine[Any, Any, None]], None],
    reading: Callable[..., None],
) -> None:
    """Adds the commands to their groups."""

    def in_line(default_s: float) -> Options:
        return click.option(
            "--wait",
            "wait_s",
            type=duration,
            default=f"{default_s:g}s",
            is_flag=False,
            flag_value=f"{PATIENT_S:g}s",
            show_default=True,
            help="How long to wait in line; 0 = not at all, a bare --wait = a day.",
        )

    @cli.group()
    def card() -> None:
        """List and show cards: who has them, who waits, and why."""

    @card.command("list")
    @output
    @click.pass_context
    def card_list(context: click.Context, output: str) -> None:
        """List the cards of all nodes."""
        reading(place_of(context), cardreads.list_cards, output)

    @card.command("show")
    @click.argument("card", metavar="NODE/CARD")
    @output
    @click.pass_context
    def card_show(context: click.Context, card: str, output: str) -> None:
        """Show one card: holders, line, claims, VM, stowaways, memory, parked copies, why."""
        found = parse_card(card)
        reading(place_of(context), cardreads.show_card, found, output, datetime.now(UTC))

    @cli.group()
    def lease() -> None:
        """Lease cards, list leases, give them back."""

    @lease.command("acquire")
    @click.argument("cards", nargs=-1, required=True, metavar="NODE/CARD...")
    @AS
    @MEMORY
    @PINNED
    @PRIORITY
    @click.option("--ttl", "ttl_s", type=duration, help="Ends by itself after so long.")
    @in_line(ACQUIRE_S)
    @output
    @click.pass_context
    def lease_acquire(
        context: click.Context,
        cards: Sequence[str],
        name: str,
        memory: int | None,
        pinned: bool,
        priority: Priority,
        ttl_s: float | None,
        wait_s: float,
        output: str,
    ) -> None:
        """Lease a card, or several of one node at once, until it is released."""
        run(
            cardacts.acquire(
                place_of(context),
                parse_cards(cards),
                name,
                memory_bytes=memory,
                pinned=pinned,
                priority=priority,
                ttl_s=ttl_s,
                wait_s=wait_s,
                output=output,
            )
        )

    @lease.command("list")
    @output
    @click.pass_context
    def lease_list(context: click.Context, output: str) -> None:
        """List the leases of all nodes, and who waits for one."""
        reading(place_of(context), cardreads.list_leases, output, datetime.now(UTC))

    @lease.command("release")
    @click.argument("what", metavar="ID-or-NAME")
    @output
    @click.pass_context
    def lease_release(context: click.Context, what: str, output: str) -> None:
        """End a lease, or leave the line."""
        run(cardacts.release(place_of(context), what, output))

    @cli.command("run", context_settings={"allow_interspersed_args": False})
    @click.option(
        "--card",
        "cards",
        multiple=True,
        required=True,
        metavar="NODE/CARD",
        help="May be given several times, of one node.",
    )
    @AS
    @MEMORY
    @PINNED
    @PRIORITY
    @in_line(RUN_S)
    @click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
    @click.pass_context
    def run_command(
        context: click.Context,
        cards: Sequence[str],
        name: str,
        memory: int | None,
        pinned: bool,
        priority: Priority,
        wait_s: float,
        command: Sequence[str],
    ) -> None:
        """Run a program of this machine under a lease that lives as long as it does.

        Waits in line, then becomes the program: pid, signals and exit code are its own. YARD_LEASE names
        the lease.
        """
        running.run(
            place_of(context),
            parse_cards(cards),
            name,
            command,
            memory_bytes=memory,
            pinned=pinned,
            priority=priority,
            wait_s=wait_s,
        )

    @cli.group()
    def claim() -> None:
        """Keep a card for a game or a desktop app."""

    @claim.command("start")
    @click.argument("card", metavar="NODE/CARD")
    @AS
    @click.option(
        "--kind",
        type=click.Choice(["game", "app"]),
        default="game",
        show_default=True,
        help="For a game, running requests there end at once; for an app they may finish.",
    )
    @click.option("--pid", type=click.IntRange(1), help="Ends with that process of this machine.")
    @output
    @click.pass_context
    def claim_start(
        context: click.Context,
        card: str,
        name: str,
        kind: ClaimKind,
        pid: int | None,
        output: str,
    ) -> None:
        """Keep a card from this moment on; what runs there leaves."""
        run(cardacts.start_claim(place_of(context), parse_card(card), name, kind, pid, output))

    @claim.command("end")
    @click.argument("what", metavar="ID-or-NAME")
    @output
    @click.pass_context
    def claim_end(context: click.Context, what: str, output: str) -> None:
        """Give the card back."""
        run(cardacts.end_claim(place_of(context), what, output))

    @cli.group()
    def vm() -> None:
        """Hand a card to a virtual machine and take it back."""

    @vm.command("attach")
    @click.argument("card", metavar="NODE/CARD")
    @click.option("--as", "name", required=True, metavar="VM", help="Name of the machine.")
    @in_line(ATTACH_S)
    @output
    @click.pass_context
    def vm_attach(context: click.Context, card: str, name: str, wait_s: float, output: str) -> None:
        """Wait until the engines have left the card, then hand it over."""
        run(cardacts.attach_vm(place_of(context), parse_card(card), name, wait_s, output))

    @vm.command("detach")
    @click.argument("card", metavar="NODE/CARD")
    @output
    @click.pass_context
    def vm_detach(context: click.Context, card: str, output: str) -> None:
        """The card is the yard's again."""
        run(cardacts.detach_vm(place_of(context), parse_card(card), output))

    @cli.command("place")
    @click.argument("model")
    @click.option("--card", metavar="NODE/CARD", help="Only this card, as its own URL asks.")
    @output
    @click.pass_context
    def place_command(context: click.Context, model: str, card: str | None, output: str) -> None:
        """Show where a model would be placed, and why not elsewhere; changes nothing."""
        only = None if card is None else parse_card(card)
        reading(place_of(context), cardreads.show_places, model, only, output)

    @replica.command("park")
    @click.argument("id")
    @wait
    @timeout
    @wait_timeout
    @output
    @click.pass_context
    def replica_park(
        context: click.Context,
        id: str,
        wait: bool,
        timeout: float,
        wait_timeout: float,
        output: str,
    ) -> None:
        """Drain a replica and keep it in RAM, its card given back."""
        limit = wait_timeout if wait else None
        run(parkacts.park(place_of(context), _typed(id), timeout, limit, output))

    @replica.command("resume")
    @click.argument("id")
    @wait
    @timeout
    @wait_timeout
    @output
    @click.pass_context
    def replica_resume(
        context: click.Context,
        id: str,
        wait: bool,
        timeout: float,
        wait_timeout: float,
        output: str,
    ) -> None:
        """Bring a parked replica back to its cards."""
        limit = wait_timeout if wait else None
        run(parkacts.resume(place_of(context), _typed(id), timeout, limit, output))


def _typed(replica: str) -> str:
    """Raises UsageMistake for nothing, which names no replica."""
    if not replica:
        raise UsageMistake("expected the id of a replica, got nothing")
    return replica
