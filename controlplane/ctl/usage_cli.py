"""yardctl's command `usage`. Wiring only, like main.py, which hands in its group and options."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import rich_click as click

from controlplane.ctl import usagereads
from controlplane.ctl.keys_cli import typed_key

Options = Callable[[Any], Any]


def register(
    cli: click.Group,
    *,
    output: Options,
    place_of: Callable[[click.Context], Any],
    reading: Callable[..., None],
) -> None:
    """Adds `usage`."""

    @cli.command()
    @click.option(
        "--days",
        type=click.IntRange(1, 3660),
        default=30,
        show_default=True,
        help="So many, with today.",
    )
    @click.option("--key", help="Only of this key, by its id or name.")
    @click.option("--model", help="Only of this model, by its name in the catalog.")
    @click.option(
        "--by",
        multiple=True,
        type=click.Choice(usagereads.BY),
        help="What sums are kept apart by; may be given several times. Key and model unless told.",
    )
    @output
    @click.pass_context
    def usage(
        context: click.Context,
        days: int,
        key: str | None,
        model: str | None,
        by: Sequence[str],
        output: str,
    ) -> None:
        """Show how many requests and tokens keys used of which models. Days are those of UTC."""
        reading(
            place_of(context),
            usagereads.show_usage,
            output,
            datetime.now(UTC),
            days,
            tuple(by) or ("key", "model"),
            None if key is None else typed_key(key),
            model,
        )
