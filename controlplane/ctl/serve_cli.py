"""yardctl's commands about serving from a registry: `model serve`, `job`, `mirror`, `registry`.

Wiring only, like main.py, which hands in its groups and options.
"""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import rich_click as click

from controlplane.ctl import serving
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import UsageMistake
from schemas.commands import JobServe

Options = Callable[[Any], Any]


def register(
    cli: click.Group,
    model: click.Group,
    *,
    output: Options,
    timeout: Options,
    place_of: Callable[[click.Context], Place],
    run: Callable[[Coroutine[Any, Any, None]], None],
    reading: Callable[..., None],
) -> None:
    """Adds the commands to their groups."""

    detach = click.option(
        "--detach", is_flag=True, help="Print the job's id and leave; it runs on."
    )

    @model.command("serve")
    @click.argument("repo", metavar="OWNER/REPO")
    @click.option("--quant", help="Quantisation to take; Q4_K_M unless --file is given.")
    @click.option("--file", help="A file, or a file set by its name, instead of a quantisation.")
    @click.option("--name", help="Name in the catalog; else one follows from the repository.")
    @click.option("--alias", "aliases", multiple=True, help="May be given several times.")
    @click.option("--description", default="", help="Free text.")
    @click.option("--replicas", type=int, help="How many are kept running.  [default: 1]")
    @click.option("--on-demand", is_flag=True, help="Keep none: it loads when first asked for.")
    @click.option(
        "--ctx-pool",
        type=int,
        default=0,
        help="Tokens that all slots of an engine divide.  [default: 16384]",
    )
    @click.option(
        "--context-length",
        type=int,
        default=0,
        help="Tokens one request may use.  [default: 4096, or all the model was trained for]",
    )
    @click.option("--revision", help="Branch, tag or commit; the default branch otherwise.")
    @click.option("--plan", is_flag=True, help="Only show what would be done, and change nothing.")
    @detach
    @output
    @timeout
    @click.pass_context
    def serve(
        context: click.Context,
        repo: str,
        aliases: tuple[str, ...],
        replicas: int | None,
        on_demand: bool,
        plan: bool,
        detach: bool,
        output: str,
        timeout: float,
        **given: Any,
    ) -> None:
        """Serve a model of a registry: fetch it, add it, start it, and let it say hello.

        The job runs in the control plane; leaving this terminal changes nothing.
        """
        if on_demand and replicas not in (None, 0):
            raise UsageMistake("--on-demand keeps no replica; leave --replicas out")
        body = JobServe(
            repo=repo,
            aliases=list(aliases),
            replicas=0 if on_demand else 1 if replicas is None else replicas,
            **given,
        )
        place = place_of(context)
        if plan:
            reading(place, serving.show_plan, body, output)
        else:
            run(serving.serve(place, body, timeout, detach=detach))

    @cli.group()
    def job() -> None:
        """List, show, watch, retry and cancel serve jobs."""

    @job.command("list")
    @output
    @click.pass_context
    def job_list(context: click.Context, output: str) -> None:
        """List jobs, oldest first."""
        reading(place_of(context), serving.list_jobs, output, datetime.now(UTC))

    @job.command("show")
    @click.argument("id")
    @output
    @click.pass_context
    def job_show(context: click.Context, id: str, output: str) -> None:
        """Show one job and its steps."""
        reading(place_of(context), serving.show_job, id, output)

    @job.command("watch")
    @click.argument("id")
    @click.pass_context
    def job_watch(context: click.Context, id: str) -> None:
        """Print a job's steps until it is over. Exits 1 when it failed."""
        run(serving.follow(place_of(context), id))

    @job.command("retry")
    @click.argument("id")
    @detach
    @timeout
    @click.pass_context
    def job_retry(context: click.Context, id: str, detach: bool, timeout: float) -> None:
        """Go on with a job that failed or was cancelled, from where it stopped."""
        run(serving.retry(place_of(context), id, timeout, detach=detach))

    @job.command("cancel")
    @click.argument("id")
    @timeout
    @click.pass_context
    def job_cancel(context: click.Context, id: str, timeout: float) -> None:
        """Stop a job; says what it leaves behind."""
        run(serving.cancel(place_of(context), id, timeout))

    @cli.group()
    def mirror() -> None:
        """Show, verify and remove the files kept from registries."""

    @mirror.command("list")
    @output
    @click.pass_context
    def mirror_list(context: click.Context, output: str) -> None:
        """List the files of all mirrors."""
        reading(place_of(context), serving.list_files, output, datetime.now(UTC))

    @mirror.command("show")
    @click.argument("key")
    @output
    @click.pass_context
    def mirror_show(context: click.Context, key: str, output: str) -> None:
        """Show one file, by its key or the beginning of it."""
        reading(place_of(context), serving.show_file, key, output)

    @mirror.command("verify")
    @click.argument("what", default="")
    @timeout
    @click.pass_context
    def mirror_verify(context: click.Context, what: str, timeout: float) -> None:
        """Read files again and compare their sha256: all, or a KEY, or OWNER/REPO[@COMMIT][/PATH]."""
        run(serving.verify(place_of(context), what, timeout))

    @mirror.command("rm")
    @click.argument("what")
    @timeout
    @click.pass_context
    def mirror_rm(context: click.Context, what: str, timeout: float) -> None:
        """Remove files that nothing needs: a KEY, or OWNER/REPO[@COMMIT][/PATH]."""
        run(serving.remove(place_of(context), what, timeout))

    @mirror.command("gc")
    @click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
    @timeout
    @click.pass_context
    def mirror_gc(context: click.Context, dry_run: bool, timeout: float) -> None:
        """Remove every file that no catalog entry and no running job needs."""
        run(serving.collect(place_of(context), timeout, dry_run=dry_run))

    @cli.group()
    def registry() -> None:
        """Look into a registry."""

    @registry.command("show")
    @click.argument("repo", metavar="OWNER/REPO")
    @click.option("--quant", help="What would be picked for it.")
    @click.option("--file", help="What would be picked for it.")
    @click.option("--revision", help="Branch, tag or commit.")
    @output
    @click.pass_context
    def registry_show(
        context: click.Context,
        repo: str,
        quant: str | None,
        file: str | None,
        revision: str | None,
        output: str,
    ) -> None:
        """Show a repository's file sets and which one would be picked, and why."""
        reading(place_of(context), serving.show_registry, repo, quant, file, revision, output)
