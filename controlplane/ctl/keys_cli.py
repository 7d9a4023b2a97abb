"""yardctl's commands about API keys: `key create|list|show|set|revoke`.

Wiring only, like main.py, which hands in its group and options.
"""

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, Final, get_args

import rich_click as click

from controlplane.ctl import keyacts, keyreads
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import UsageMistake
from schemas.commands import KeyChange, KeyCreate
from schemas.key import KEY_PREFIX, Priority

Options = Callable[[Any], Any]

PRIORITIES: Final = get_args(Priority)
LIMIT: Final = click.IntRange(min=0)


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
    """Adds the group `key`."""

    models = click.option(
        "--models",
        multiple=True,
        metavar="M",
        help="A model, alias or adapter it may use, or a pattern with `*`, as `llama*` or `llama:*`; "
        "may be given several times.",
    )
    rpm = click.option("--rpm", type=LIMIT, help="Requests in any 60 seconds; 0 = no limit.")
    tpm = click.option("--tpm", type=LIMIT, help="Tokens in any 60 seconds; 0 = no limit.")
    parallel = click.option("--parallel", type=LIMIT, help="Requests at once; 0 = no limit.")
    priority = click.option(
        "--priority",
        type=click.Choice(PRIORITIES),
        help="Who goes first of those that wait for their turn; normal unless told.",
    )

    @cli.group()
    def key() -> None:
        """Create, list, change and revoke the API keys that gateways ask for."""

    @key.command("create")
    @click.option(
        "--name", required=True, help="What you will call it; it says nothing to gateways."
    )
    @models
    @click.option(
        "--may-activate", is_flag=True, help="Its requests may start a model that is not running."
    )
    @rpm
    @tpm
    @parallel
    @priority
    @click.option("--expires", type=duration, metavar="DURATION", help="As 30d; never unless told.")
    @output
    @timeout
    @click.pass_context
    def key_create(
        context: click.Context,
        name: str,
        models: Sequence[str],
        may_activate: bool,
        rpm: int | None,
        tpm: int | None,
        parallel: int | None,
        priority: Priority | None,
        expires: float | None,
        output: str,
        timeout: float,
    ) -> None:
        """Create a key and print it, once: the yard keeps a hash of it and cannot show it again.

        The key alone goes to stdout, what is to be said about it to stderr.
        """
        body = KeyCreate(
            id="",
            name=_name(name),
            hash="",
            models=list(models),
            may_activate=may_activate,
            rpm=rpm or 0,
            tpm=tpm or 0,
            parallel=parallel or 0,
            priority=priority or "normal",
            expires_s=expires,
        )
        run(keyacts.create(place_of(context), body, timeout, output))

    @key.command("list")
    @output
    @click.pass_context
    def key_list(context: click.Context, output: str) -> None:
        """List keys with their rights and limits; one that is over stays listed for a day."""
        reading(place_of(context), keyreads.list_keys, output, datetime.now(UTC))

    @key.command("show")
    @click.argument("key")
    @output
    @click.pass_context
    def key_show(context: click.Context, key: str, output: str) -> None:
        """Show one by its id or name."""
        reading(place_of(context), keyreads.show_key, typed_key(key), output, datetime.now(UTC))

    @key.command("set")
    @click.argument("key")
    @models
    @click.option("--all-models", is_flag=True, help="Every model, whatever it could use before.")
    @click.option(
        "--may-activate/--may-not-activate",
        default=None,
        help="Whether its requests may start a model that is not running.",
    )
    @rpm
    @tpm
    @parallel
    @priority
    @click.option(
        "--expires", type=duration, metavar="DURATION", help="From now on, as 30d; 0 = never."
    )
    @output
    @timeout
    @click.pass_context
    def key_set(
        context: click.Context,
        key: str,
        models: Sequence[str],
        all_models: bool,
        may_activate: bool | None,
        rpm: int | None,
        tpm: int | None,
        parallel: int | None,
        priority: Priority | None,
        expires: float | None,
        output: str,
        timeout: float,
    ) -> None:
        """Change what a key may do, by its id or name; what is not given stays, and so does the secret.

        Gateways go by it as soon as they read of it.
        """
        if models and all_models:
            raise UsageMistake("--models and --all-models exclude each other")
        body = KeyChange(
            key=typed_key(key),
            models=list(models) if models or all_models else None,
            may_activate=may_activate,
            rpm=rpm,
            tpm=tpm,
            parallel=parallel,
            priority=priority,
            expires_s=expires,
        )
        if body == KeyChange(key=body.key):
            raise UsageMistake(
                "nothing to change was given; yardctl key set --help lists what can be"
            )
        run(keyacts.change(place_of(context), body, timeout, output))

    @key.command("revoke")
    @click.argument("key")
    @output
    @timeout
    @click.pass_context
    def key_revoke(context: click.Context, key: str, output: str, timeout: float) -> None:
        """End a key for good, by its id or name, and say on how many gateways it is refused.

        Exits 3 when a gateway has not read of it yet.
        """
        run(keyacts.revoke(place_of(context), typed_key(key), timeout, output))


def typed_key(key: str) -> str:
    """The id or name itself; of a whole key its id, so that its secret goes no further. Raises UsageMistake when
    nothing was typed."""
    if not key:
        raise UsageMistake("expected the id or name of a key, got nothing")
    return key.split("_", 2)[1] if key.startswith(f"{KEY_PREFIX}_") else key


def _name(name: str) -> str:
    """`name` itself. Raises UsageMistake for what cannot be one, and must not be sent."""
    if not name:
        raise UsageMistake("expected a name, got nothing")
    if name.startswith(f"{KEY_PREFIX}_"):
        raise UsageMistake(f"expected a name that does not begin with {KEY_PREFIX}_")
    return name
