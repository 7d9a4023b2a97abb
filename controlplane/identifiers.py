"""Mints the ids a decision needs, from the system's randomness; the domain gets them as an argument."""

import base64
import os

from controlplane.domain.decision import Ids
from events.ids import new_id


def _random() -> str:
    """Ten base32 characters: 50 random bits, never used again."""
    return base64.b32encode(os.urandom(7)).decode()[:10].lower()


def new_replica_id() -> str:
    """`r-` and ten base32 characters."""
    return "r-" + _random()


def new_job_id() -> str:
    """`j-` and ten base32 characters."""
    return "j-" + _random()


def new_ids() -> Ids:
    return Ids(replica=new_replica_id, decision=new_id, incarnation=new_id, job=new_job_id)
