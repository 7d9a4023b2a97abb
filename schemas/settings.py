"""Every setting of every service with its default and unit; the configuration reference is made from it.

A setting is given by flag over environment (`YARD_<SECTION>_<KEY>`) over file over default.
Fields end in their unit; a file may write a duration as `45s`, `15m`, `1h` and bytes as `1GiB`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class YardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all services of one yard share."""

    prefix: Annotated[str, Meta(description="First token of every subject.")] = "yard"
    log_level: Annotated[str, Meta(description="Python logging level of the service log.")] = "INFO"


class NatsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach NATS."""

    url: Annotated[str, Meta(description="Server address, nats:// or tls://.")] = (
        "nats://127.0.0.1:4222"
    )
    user: Annotated[str, Meta(description="NATS user; empty = the role's own name.")] = ""
    password_file: Annotated[
        str, Meta(description="File holding the password; empty = secrets/nats-<user>.password.")
    ] = ""
    retry_budget_s: Annotated[
        float, Meta(description="How long an append retries without an answer.")
    ] = 15.0


class ControlplaneSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control plane."""

    listen: Annotated[str, Meta(description="Host and port of the API.")] = "127.0.0.1:8081"
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="Host headers the API accepts besides its own address.")
    ] = ()
    leader_silence_s: Annotated[
        float, Meta(description="Silence of the leader after which another takes over.")
    ] = 3.0
    drain_timeout_s: Annotated[float, Meta(description="Bound of a drain.")] = 60.0
    stale_gateway_s: Annotated[
        float, Meta(description="Silence after which a gateway counts as gone.")
    ] = 10.0
    unreachable_after_s: Annotated[
        float, Meta(description="Silence of an agent after which its node is unreachable.")
    ] = 30.0
    lost_after_s: Annotated[
        float, Meta(description="Silence of an agent after which its replicas count as gone.")
    ] = 3600.0
    replace_unreachable_after_s: Annotated[
        float,
        Meta(description="Wanted models of an unreachable node are placed elsewhere after this."),
    ] = 60.0
    backoff_s: Annotated[
        float, Meta(description="First backoff after a failed start; doubles.")
    ] = 15.0
    backoff_max_s: Annotated[float, Meta(description="Longest backoff.")] = 300.0
    quarantine_after: Annotated[
        int, Meta(description="Failed starts in a row after which a model is given up.")
    ] = 5
    quarantine_s: Annotated[float, Meta(description="How long it stays given up.")] = 1800.0
    min_residency_s: Annotated[
        float, Meta(description="A replica ready for less is not drained for another model.")
    ] = 10.0
    starvation_bound_s: Annotated[
        float, Meta(description="A demand waiting longer overrides the minimum residency.")
    ] = 30.0
    endings_after_s: Annotated[
        float, Meta(description="Age of a terminal state at which its subject is ended.")
    ] = 86400.0
    job_ready_s: Annotated[
        float, Meta(description="How long a serve job waits for a ready replica.")
    ] = 1800.0
    job_kept_s: Annotated[float, Meta(description="Age at which a job that is over is ended.")] = (
        7 * 86400.0
    )
    mirror_url: Annotated[
        str, Meta(description="URL at which nodes reach this mirror; empty = http:// and `listen`.")
    ] = ""
    mirror_fetches: Annotated[
        int,
        Meta(
            description="Files fetched at the same time; as many of adapters from the network, and from folders, beside them."
        ),
    ] = 2
    mirror_bandwidth_bytes: Annotated[
        int, Meta(description="Bytes per second of all fetches together; 0 = no limit.")
    ] = 0
    mirror_no_progress_s: Annotated[
        float, Meta(description="A fetch without a new byte for this long fails.")
    ] = 300.0
    mirror_keep_free_bytes: Annotated[
        int, Meta(description="Bytes of the mirror's disk that are never used.")
    ] = GIB
    smoke_timeout_s: Annotated[
        float, Meta(description="How long a smoke test waits for its answer.")
    ] = 300.0


class GatewaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gateway."""

    listen: Annotated[str, Meta(description="Host and port of the inference API.")] = (
        "127.0.0.1:8080"
    )
    wait_s: Annotated[
        float, Meta(description="How long a request waits for a model; 0 or less = the default.")
    ] = 45.0
    no_decision_s: Annotated[
        float, Meta(description="No control plane decided within this: yard_unavailable.")
    ] = 5.0
    resend_s: Annotated[
        float, Meta(description="No decision seen for this: the same message is sent again.")
    ] = 2.0
    beacon_s: Annotated[float, Meta(description="Interval of the beacon.")] = 1.0
    waiting_requests: Annotated[int, Meta(description="Requests that may wait for one model.")] = (
        1000
    )
    waiting_bytes: Annotated[
        int, Meta(description="Bytes of bodies that may wait for one model.")
    ] = 256 * MIB
    body_limit_bytes: Annotated[int, Meta(description="Largest request body.")] = 64 * MIB
    body_memory_bytes: Annotated[
        int, Meta(description="A body above this is kept in an unlinked file.")
    ] = 256 * KIB
    body_budget_bytes: Annotated[
        int, Meta(description="Bytes of all bodies kept by this gateway, memory and files.")
    ] = 1024 * MIB
    drain_s: Annotated[
        float, Meta(description="How long a stopping gateway lets running requests finish.")
    ] = 30.0
    connect_timeout_s: Annotated[
        float, Meta(description="Bound of a connection attempt to an engine.")
    ] = 5.0
    first_byte_s: Annotated[
        float,
        Meta(
            description="Longest silence of an engine before the first byte of its answer; 0 = no bound: a long prefill is no fault."
        ),
    ] = 0.0
    stream_stall_s: Annotated[
        float,
        Meta(
            description="Longest silence of an engine in an answer that has begun; then the client is told and the stream ends. 0 = no bound."
        ),
    ] = 300.0
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Origins a browser may call from; `*` = any.")
    ] = ("*",)
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Collector of OpenTelemetry to send a span of each request to (OTLP over HTTP, as http://127.0.0.1:4318); empty = none."
        ),
    ] = ""
    workers: Annotated[
        int,
        Meta(
            description="Processes that serve on the one port, each a gateway of its own to the yard; 0 or 1 = this one alone.",
            ge=0,
            le=64,
        ),
    ] = 0
    keys: Annotated[
        Literal["auto", "required", "off"],
        Meta(
            description="Whether requests need an API key; `auto` = as soon as the yard has one, and always beyond loopback."
        ),
    ] = "auto"


class StaticCard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card declared by hand."""

    id: str
    memory_bytes: int
    kind: Literal["cpu", "gpu"] = "gpu"


class NodeagentSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent."""

    cards: Annotated[
        tuple[StaticCard, ...], Meta(description="Declared cards, besides `cpu`.")
    ] = ()
    cpu_memory_bytes: Annotated[
        int,
        Meta(
            description="Memory of the `cpu` card; 0 = smaller of cgroup limit and RAM, less 10 %."
        ),
    ] = 0
    allow_commands: Annotated[
        bool, Meta(description="Whether profiles of engine `command` may run on this node.")
    ] = False
    gpus: Annotated[
        bool, Meta(description="Whether NVIDIA cards of this machine are found by themselves.")
    ] = True
    card_look_s: Annotated[float, Meta(description="Interval of the readings of the cards.")] = 5.0
    foreground_drain_s: Annotated[
        float,
        Meta(description="Bound of a drain for a lease of priority hold or foreground."),
    ] = 10.0
    interactive_drain_s: Annotated[
        float, Meta(description="Bound of a drain for a lease of priority interactive, or a VM.")
    ] = 60.0
    app_drain_s: Annotated[
        float,
        Meta(description="Bound of a drain for the claim of a desktop app; a game waits 0 s."),
    ] = 30.0
    lease_grace_s: Annotated[
        float,
        Meta(
            description="Time between the polite signal to a drained lease's process and the kill."
        ),
    ] = 10.0
    parking: Annotated[
        bool, Meta(description="Whether drained engines may be parked in this node's RAM.")
    ] = True
    park_again_s: Annotated[
        float, Meta(description="A model whose park failed is stopped instead for this long.")
    ] = 600.0
    cuda_checkpoint: Annotated[
        str, Meta(description="Path of cuda-checkpoint; empty = looked up on PATH.")
    ] = ""
    vllm: Annotated[
        str, Meta(description="Path of the vllm program; empty = looked up on PATH.")
    ] = ""
    llama_server: Annotated[
        str, Meta(description="Path of a llama-server to run instead of the embedded llama.cpp.")
    ] = ""
    beacon_s: Annotated[float, Meta(description="Interval of the heartbeat.")] = 5.0
    stop_grace_s: Annotated[
        float, Meta(description="Time between the polite signal and the kill.")
    ] = 10.0
    port_first: Annotated[int, Meta(description="First port given to engines.")] = 20000
    port_last: Annotated[int, Meta(description="Last port given to engines.")] = 29999
    port_rest_s: Annotated[float, Meta(description="A port is not given again within this.")] = (
        600.0
    )
    gateway_gone_s: Annotated[
        float, Meta(description="Silence after which a gateway does not hold up a drain.")
    ] = 10.0
    files_budget_bytes: Annotated[
        int, Meta(description="Bytes of fetched files kept on this node; 0 = what the disk has.")
    ] = 0
    files_keep_free_bytes: Annotated[
        int, Meta(description="Bytes of the files' disk that are never used.")
    ] = GIB
    fetches: Annotated[int, Meta(description="Files fetched at the same time.")] = 2
    fetch_no_progress_s: Annotated[
        float, Meta(description="A fetch without a new byte for this long fails.")
    ] = 300.0
    adapter_audit_s: Annotated[
        float, Meta(description="Interval at which an engine's own list of adapters is read.")
    ] = 300.0
    adapter_pin_s: Annotated[
        float,
        Meta(
            gt=20.0,
            description="How long a gateway's word keeps an adapter loaded; above the 20 s it trusts that.",
        ),
    ] = 30.0
    mirror_folder: Annotated[
        str,
        Meta(
            description="Folder of a mirror on this machine, whose files are linked, not fetched."
        ),
    ] = ""
    engine_log_bytes: Annotated[
        int, Meta(description="Size at which an engine's log turns over.")
    ] = 8 * MIB


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration file; a service reads the sections it needs."""

    yard: YardSettings = YardSettings()
    nats: NatsSettings = NatsSettings()
    controlplane: ControlplaneSettings = ControlplaneSettings()
    gateway: GatewaySettings = GatewaySettings()
    nodeagent: NodeagentSettings = NodeagentSettings()
