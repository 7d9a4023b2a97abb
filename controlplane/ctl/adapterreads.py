"""What yardctl reads of LoRA adapters from the API, and prints.

Reading has no effects.
"""

from datetime import datetime
from typing import Final

from controlplane.ctl import adapterview
from controlplane.ctl.adapterview import Row
from controlplane.ctl.connect import Api
from controlplane.ctl.failures import CtlError
from controlplane.ctl.reads import refuse_unread
from controlplane.ctl.show import notes_of, print_fields, print_json, print_table

ADD: Final = "yardctl adapter add NAME --base {} --source PATH|OWNER/REPO|URL"


async def list_adapters(api: Api, output: str, now: datetime, base: str | None = None) -> None:
    """All of them, or those of one model, by base and name. Raises CtlError when there is no such model."""
    base = None if base is None else await _model(api, base)
    adapters = await api.listed("/v1/adapters")
    found: list[Row] = [row for row in adapters.rows if base is None or row["base"] == base]
    found.sort(key=lambda row: (row["base"], row["name"]))
    # Of whose base they are nobody here can read: they are told with any.
    if output == "json":
        print_json([*found, *adapters.unread])
        return
    slots: list[Row] = await api.data("/v1/slots")
    replicas: list[Row] = await api.data("/v1/replicas")
    rows = adapterview.adapter_rows(found, slots, replicas, now)
    print_table(
        adapterview.ADAPTER_COLUMNS,
        ([row[column] for column in adapterview.ADAPTER_COLUMNS] for row in rows),
        f"{base or 'the catalog'} has no adapter; add one: {ADD.format(base or 'MODEL')}",
        notes_of(adapters),
    )


async def _model(api: Api, name: str) -> str:
    """The model's name, which may be given as an alias."""
    models = await api.listed("/v1/models")
    for model in models.rows:
        if name == model["name"] or name in model.get("aliases", ()):
            return model["name"]
    refuse_unread(models, name)
    raise CtlError(f"there is no model {name!r}; yardctl model list shows them")


async def show_adapter(api: Api, name: str, output: str, now: datetime) -> None:
    """One by its name or an alias. Raises CtlError when there is none."""
    found = await the_adapter(api, name)
    slots: list[Row] = await api.data("/v1/slots")
    replicas: list[Row] = await api.data("/v1/replicas")
    if output == "json":
        loaded = adapterview.loaded_in(found["name"], slots, replicas)
        bad = adapterview.bad_in(found["name"], slots, replicas)
        print_json(
            {
                **found,
                "loaded": [_at(one, slot) for one, slot in loaded],
                "bad": [_at(one, slot) for one, slot in bad],
            }
        )
        return
    print_fields(adapterview.fields(found, now))
    for line in adapterview.place_lines(found["name"], slots, replicas, now):
        print(line)


def _at(slots: Row, slot: Row) -> Row:
    return {"node": slots["node"], "replica": slots["replica"], **slot}


async def the_adapter(api: Api, name: str) -> Row:
    """As `known`. Raises CtlError when there is none."""
    found = await known(api, name)
    if found is None:
        refuse_unread(await api.listed("/v1/adapters"), name)
        raise CtlError(f"there is no adapter {name!r}; yardctl adapter list shows them")
    return found


async def known(api: Api, name: str) -> Row | None:
    """The adapter that `name` means: its name, an alias, or `BASE:NAME`. None: there is none."""
    adapters: list[Row] = await api.data("/v1/adapters")
    found = adapterview.find(adapters, name)
    if found is None and ":" in name:
        # Its base may be called by an alias.
        models: list[Row] = await api.data("/v1/models")
        found = adapterview.find(adapters, name, models)
    return found
