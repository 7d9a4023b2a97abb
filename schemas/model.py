"""A model: its name, weights, profiles and scaling, as the catalog holds it, and its events."""

from typing import Literal

from msgspec import Struct

EngineName = Literal["llamacpp", "command", "vllm"]
ParkWay = Literal["none", "sleep", "checkpoint", "command"]


class Scaling(Struct, frozen=True, kw_only=True):
    """How many replicas: `min` are kept, up to `max` may run. 0/0 means configured and off.

    `idle_timeout_s` is how long nobody may have asked before replicas above `min` stop; 0 = never.
    """

    min: int = 0
    max: int = 0
    idle_timeout_s: float = 900.0


class SecretRef(Struct, frozen=True, kw_only=True):
    """Names a secret that lives in a file on the node; the value never enters an event."""

    secret: str


class Parking(Struct, frozen=True, kw_only=True):
    """How a drained engine may be parked: its weights in RAM, its process alive, its card given back.

    sleep       the engine's own sleep (vllm)
    checkpoint  cuda-checkpoint, where the node's driver has it
    command     `park` and `resume` are run on the node, which must allow commands
    none        it is stopped

    Each step is bounded by `timeout_s`.
    """

    way: ParkWay = "none"
    park: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    timeout_s: float = 60.0


class Profile(Struct, frozen=True, kw_only=True):
    """One way to run a model. `card` are kinds (`cpu`, `gpu`) or patterns of `node/card`."""

    name: str
    engine: EngineName
    memory_bytes: int
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: str = "/health"
    key_env: str | None = None
    env: dict[str, str | SecretRef] = {}
    start_timeout_s: float = 600.0
    card: tuple[str, ...] = ("cpu",)
    cards: int = 1
    exclusive: bool = False
    weight: int = 1
    priority: int = 100
    parking: Parking | None = None
    """None: what the engine does by itself (vllm sleeps, others stop)."""


class Model(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.model.<model>`.

    `incarnation` is minted when the name is added and never changes while it lives, so a re-added
    name is never confused with its predecessor. `order` is the place in the configuration (ties).
    """

    name: str
    incarnation: str
    aliases: tuple[str, ...] = ()
    description: str = ""
    source: str = ""
    context_length: int | None = None
    max_output: int | None = None
    scaling: Scaling = Scaling()
    profiles: tuple[Profile, ...] = ()
    order: int = 0
    off_reason: str = ""
    """Why it was switched off by the control plane itself (a serve job that failed); empty otherwise."""
    max_loaded_adapters: int = 0
    """How many LoRA adapters one replica keeps loaded; 0: it loads none."""
    lora_rank: int = 0
    """The rank its engines are started for where a profile leaves that open; it grows with its adapters, in
    steps the engine knows, and never shrinks. 0: no adapter asked for one yet."""
    concurrency: int = 0
    """How many requests gateways let one replica run at once; more wait for their turn. 0: any number."""


class ModelAdded(Struct, frozen=True, kw_only=True, tag_field="type", tag="model.added"):
    by: str


class ModelChanged(Struct, frozen=True, kw_only=True, tag_field="type", tag="model.changed"):
    by: str
    fields: tuple[str, ...]


class ModelRemoved(Struct, frozen=True, kw_only=True, tag_field="type", tag="model.removed"):
    by: str


class ModelDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="model.deleted"):
    """A tombstone: the aggregate ends with this event and its subject empties when it expires."""


ModelEvent = ModelAdded | ModelChanged | ModelRemoved | ModelDeleted
