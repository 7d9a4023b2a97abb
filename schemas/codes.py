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
NEEDS_MIRROR: Final = "needs_mirror"  # a source that only a mirror can fetch
