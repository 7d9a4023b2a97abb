"""Names what a running engine depends on, so that an edit restarts exactly the replicas it concerns.

Scaling, weight, priority, aliases and texts are left out: they take effect without a restart.
"""

import hashlib

import msgspec

from schemas.model import Model, Profile
from schemas.vllm_flags import lora_rank


def profile_revision(model: Model, profile: Profile) -> str:
    """Twelve hex digits that change when the engine would have to be started or placed anew.

    In it: the name it serves under, the weights, the engine with its arguments and environment, and what
    decides where it may be and how much it reserves. How long a start may take and where its health is
    asked matter to the next start only.
    """
    facts = (
        model.name,
        model.source,
        profile.name,
        profile.engine,
        profile.args,
        profile.command,
        profile.key_env,
        sorted(profile.env.items(), key=lambda item: item[0]),
        profile.memory_bytes,
        profile.card,
        profile.cards,
        profile.exclusive,
        # An entry from before there was parking keeps the revision its engines run under.
        *(() if profile.parking is None else (profile.parking,)),
        # So does one from before there were adapters, or without any.
        *(
            ()
            if model.max_loaded_adapters <= 0
            else (model.max_loaded_adapters, lora_rank(profile.args, model.lora_rank))
        ),
    )
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:12]
