"""The machine-readable codes of every refusal, one meaning each, shared by log, gateway and ctl.

The HTTP status, the Retry-After and the text of each client-facing code are the gateway's affair
(gateway/domain/answers.py); the control plane only names the code of a decision it refused.
"""

from typing import Final, Literal

RefusalCode = Literal[
    "no_capacity",
    "start_failed",
    "model_quarantined",
    "model_off",
    "model_not_found",
    "card_kept",
]

# Codes of rejected commands (yard.evt.command.<id>), printed by ctl.
INVALID: Final = (
    "invalid"  # the body did not decode, or an entry broke a rule; `problems` says where
)
EXISTS: Final = "exists"  # a name or alias is taken
NOT_FOUND: Final = "not_found"  # no such model, replica, node
CONFLICT: Final = (
    "conflict"  # the state does not allow it (unload while min > 0, load of an off model)
)
EXPIRED: Final = "expired"  # the command was older than its ttl_s when the leader came to it
UPGRADE_REQUIRED: Final = "upgrade_required"  # an aggregate was written by a newer version
BROKEN: Final = "broken"  # an aggregate's last event cannot be read; `yardctl repair`
IN_USE: Final = "in_use"  # something still needs what was to be removed; the sentence says what
NEEDS_MIRROR: Final = "needs_mirror"  # a source that only a mirror can fetch

AMBIGUOUS_NAME: Final = "ambiguous_name"  # several leases or claims have it; the sentence lists ids
CARD_KEPT: Final = "card_kept"  # a VM, a claim or a pinned lease has it
NOT_HERE: Final = (
    "not_here"  # only on the machine of that node: a process cannot be watched from afar
)
TIMED_OUT: Final = "timed_out"  # it waited in line as long as it was told to
CANNOT_PARK: Final = "cannot_park"  # neither engine, profile nor node has a way

# Codes of refused adapters (yard.evt.adapter.<name>, yard.evt.slots.<node>.<replica>).
NO_ADAPTERS: Final = "no_adapters"  # its base loads none
NOT_AN_ADAPTER: Final = "not_an_adapter"  # no adapter_config.json, no weights, or not readable
UNSUPPORTED_ADAPTER: Final = (
    "unsupported_adapter"  # DoRA, modules_to_save, embeddings, modules the engine does not adapt
)
RANK_TOO_HIGH: Final = "rank_too_high"
WRONG_BASE: Final = "wrong_base"
LOAD_REFUSED: Final = "load_refused"  # an engine refused it for a reason of the adapter's
LOAD_FAILED: Final = "load_failed"  # an engine failed; another replica may take it
LOAD_TIMEOUT: Final = "load_timeout"
FILES_MISSING: Final = "files_missing"  # its files could not be had on that node
ROUTE_OFF: Final = "route_off"  # that engine has no routes to load adapters at run time

# Codes of failed jobs, files and plans (yard.evt.job.<id>, yard.evt.file.<key>).
REGISTRY_UNREACHABLE: Final = "registry_unreachable"  # no answer within the tries
SOURCE_UNREACHABLE: Final = (
    "source_unreachable"  # the URL or folder of an adapter gave nothing usable within the tries
)
REPO_NOT_FOUND: Final = "repo_not_found"  # no such repository, or private and not ours to see
REVISION_NOT_FOUND: Final = "revision_not_found"
NEEDS_TOKEN: Final = "needs_token"  # noqa: S105 - gated or private, and no HF_TOKEN is set
LICENCE_NOT_ACCEPTED: Final = (
    "licence_not_accepted"  # gated, and this token's account has no access
)
TOKEN_REFUSED: Final = "token_refused"  # noqa: S105 - wrong, expired, or without that permission
RATE_LIMITED: Final = "rate_limited"
REPO_DISABLED: Final = "repo_disabled"  # the registry itself has taken it offline
REGISTRY_ANSWER: Final = "registry_answer"  # it answered, and the answer makes no sense
NO_GGUF: Final = "no_gguf"
NO_SUCH_FILE: Final = "no_such_file"  # no file set matches; the sentence names what there is
AMBIGUOUS: Final = "ambiguous"  # several quantisations match; the sentence names them
SHARD_MISSING: Final = "shard_missing"
NOT_GGUF: Final = "not_gguf"  # the bytes are no GGUF file
ARCHITECTURE_UNKNOWN: Final = "architecture_unknown"  # no node's engine loads it
CONTEXT_TOO_LONG: Final = "context_too_long"
NO_CAPACITY: Final = "no_capacity"  # fits on no node, even an empty one
DISK_FULL: Final = "disk_full"
DISK_FAILED: Final = "disk_failed"  # it could not be read or written, for another reason than space
CHECKSUM_MISMATCH: Final = "checksum_mismatch"
SIZE_MISMATCH: Final = "size_mismatch"
INTERRUPTED: Final = "interrupted"  # a fetch nobody needs any more; what came is kept
NO_PROGRESS: Final = "no_progress"  # no byte came for the bound
START_FAILED: Final = "start_failed"
QUARANTINED: Final = "model_quarantined"
NOT_READY: Final = "not_ready"  # no replica was ready within job_ready_s
SMOKE_FAILED: Final = "smoke_failed"
