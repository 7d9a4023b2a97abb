"""Decides what becomes of API keys: who may have one, what changes of it, and when one that is over ends.

It never sees a secret, only its hash. Whether a request may use a key is each gateway's to judge, by its own
clock: a key expires without an event.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from controlplane.domain import keyfields, names
from controlplane.domain.catalog import TOMBSTONE_TTL_S
from controlplane.domain.decision import Accepted, Change, Decision, Rejected
from controlplane.domain.quantities import show_bytes
from controlplane.domain.scene import Scene
from schemas import codes
from schemas.commands import KeyChange, KeyCreate, KeyRevoke, Problem
from schemas.key import KEY_PREFIX, Key, KeyChanged, KeyCreated, KeyDeleted, KeyEvent, KeyRevoked

KeyCommand = KeyCreate | KeyChange | KeyRevoke

STATE_BYTES: Final = 8192
"""Every event carries the whole key."""
KEPT_S: Final = 86_400.0
"""How long a key that is over stays known, so that a refusal can say why it is refused."""


def decide(scene: Scene, actor: str, asked_at: datetime, body: KeyCommand) -> Accepted | Rejected:
    """What a person's wish about a key does. `asked_at`: when the command was stored."""
    match body:
        case KeyCreate():
            return _create(scene, actor, asked_at, body)
        case KeyChange():
            return _change(scene, actor, asked_at, body)
        case KeyRevoke():
            return _revoke(scene, actor, body)
        case _:
            assert_never(body)


def is_over(key: Key, now: datetime) -> bool:
    """Whether it was revoked or has expired: no gateway takes it."""
    at = over_at(key)
    return at is not None and at <= now


def over_at(key: Key) -> datetime | None:
    """Since when, or from when on, the key is over; None: it lasts until somebody revokes it."""
    times = [at for at in (key.revoked_at, key.expires_at) if at is not None]
    return min(times, default=None)


def find(keys: Mapping[str, Key], said: str, now: datetime) -> Key | None:
    """The key with this id or name. Of several with the name, the one that is not over, else the newest."""
    by_id = keys.get(id_of(said))
    if by_id is not None:
        return by_id
    called = [key for key in keys.values() if key.name == said]
    return max(
        called, key=lambda key: (not is_over(key, now), key.created_at, key.id), default=None
    )


def id_of(said: str) -> str:
    """The id, where somebody gave the whole key."""
    if said.startswith(f"{KEY_PREFIX}_"):
        return said.split("_", 2)[1]
    return said


def look_after(scene: Scene, id_: str) -> Decision | None:
    """Ends a key that has been over for long enough, when the audit has its past. The last one stays: gateways ask
    for keys as long as they hold any, and a yard must not open by itself."""
    key = scene.world.keys.get(id_)
    if key is None or scene.live.audit_behind or not _is_due(scene, key):
        return None
    mine = _rank(scene, key)
    if not any(_rank(scene, other) > mine for other in scene.world.keys.values()):
        return None
    ended = Change(
        noun="key",
        key=(id_,),
        event=KeyDeleted(),
        state=None,
        reason="it was over for long enough",
        ttl_s=TOMBSTONE_TTL_S,
    )
    head = scene.world.head("key", id_)
    return Decision(changes=(ended,), what=f"key {key.name} ({id_}) ended", cause=head.id)


def due_at(scene: Scene, id_: str) -> datetime | None:
    """When time alone gives `look_after` something to do."""
    key = scene.world.keys.get(id_)
    at = over_at(key) if key is not None else None
    return at + timedelta(seconds=KEPT_S) if at is not None else None


def is_last(scene: Scene, id_: str) -> bool:
    """Whether the key would end, were there another to stay for it."""
    key = scene.world.keys.get(id_)
    return key is not None and _is_due(scene, key)


def _is_due(scene: Scene, key: Key) -> bool:
    at = over_at(key)
    return at is not None and scene.age_s(at) >= KEPT_S


def _rank(scene: Scene, key: Key) -> tuple[bool, datetime, str]:
    """The one that would stay the longest is the last in this order."""
    at = over_at(key)
    return not is_over(key, scene.now), scene.now if at is None else at, key.id


def _create(scene: Scene, actor: str, asked_at: datetime, body: KeyCreate) -> Accepted | Rejected:
    """1. something about it is wrong; 2. that very key is there already: nothing changes; 3. its id was used for
    another, or for one that is over; 4. its name is taken; 5. it is known from now on."""
    problems = [
        *keyfields.identity_problems(body),
        *keyfields.model_problems(body.models),
        *keyfields.limit_problems(body.rpm, body.tpm, body.parallel),
    ]
    if body.expires_s is not None:
        problems += keyfields.life_problems(
            body.expires_s, "leave it out for a key that never expires"
        )
    if problems:  # 1
        return _invalid(problems)
    made = Key(
        id=body.id,
        name=body.name,
        hash=body.hash,
        created_at=asked_at,
        by=actor,
        models=tuple(body.models),
        may_activate=body.may_activate,
        rpm=body.rpm,
        tpm=body.tpm,
        parallel=body.parallel,
        priority=body.priority,
        expires_at=None if body.expires_s is None else _after(asked_at, body.expires_s),
    )
    before = scene.world.keys.get(body.id)
    if before is not None and not is_over(before, scene.now) and _is_same(before, made):  # 2
        return _as_before(scene, before, f"the key {made.name!r} ({made.id}) is there already")
    if before is not None or scene.world.head("key", body.id).seq > 0:  # 3
        sentence = f"the id {body.id!r} is of another key, or of one that is over; take a new one"
        return Rejected(code=codes.EXISTS, sentence=sentence)
    taken = _taken(scene, made)
    if taken is not None:  # 4
        return taken
    if any(key.name == made.id for key in scene.world.keys.values()):  # 4
        sentence = f"{made.id!r} is the name of a key already; take another id"
        return Rejected(code=codes.EXISTS, sentence=sentence)
    return _written(  # 5
        scene,
        made,
        KeyCreated(by=actor),
        f"created by {actor}",
        f"the key {made.name!r} is valid now",
    )


def _is_same(before: Key, made: Key) -> bool:
    """Whether both are the same wish, asked for at two times."""
    at = before.created_at
    return (before.name, before.hash) == (made.name, made.hash) and replace(
        made, created_at=at, by=before.by, expires_at=before.expires_at
    ) == replace(before, revoked_at=None)


def _change(scene: Scene, actor: str, asked_at: datetime, body: KeyChange) -> Accepted | Rejected:
    """1. there is none, or it was revoked; 2. something about it is wrong; 3. it becomes what is asked for. One that
    expired may be given more time, while nobody else has its name."""
    key = find(scene.world.keys, body.key, scene.now)
    if key is None:  # 1
        return _not_found(scene, body.key)
    if key.revoked_at is not None:  # 1
        sentence = (
            f"the key {key.name!r} ({key.id}) was revoked and never comes back; create another"
        )
        return Rejected(code=codes.CONFLICT, sentence=sentence)
    problems = [
        *keyfields.model_problems(body.models or ()),
        *keyfields.limit_problems(body.rpm or 0, body.tpm or 0, body.parallel or 0),
    ]
    if body.expires_s is not None and body.expires_s != 0:
        problems += keyfields.life_problems(body.expires_s, "0 for a key that never expires")
    if problems:  # 2
        return _invalid(problems)
    after = key
    if body.models is not None:
        after = replace(after, models=tuple(body.models))
    if body.may_activate is not None:
        after = replace(after, may_activate=body.may_activate)
    if body.rpm is not None:
        after = replace(after, rpm=body.rpm)
    if body.tpm is not None:
        after = replace(after, tpm=body.tpm)
    if body.parallel is not None:
        after = replace(after, parallel=body.parallel)
    if body.priority is not None:
        after = replace(after, priority=body.priority)
    if body.expires_s is not None:
        until = None if body.expires_s == 0 else _after(asked_at, body.expires_s)
        after = replace(after, expires_at=until)
    fields = tuple(
        field for field in Key.__struct_fields__ if getattr(after, field) != getattr(key, field)
    )
    if not fields:
        return _as_before(scene, key, f"the key {key.name!r} ({key.id}) is as asked for already")
    if is_over(key, scene.now) and not is_over(after, scene.now):
        taken = _taken(scene, after)
        if taken is not None:
            return taken
    said = f"{', '.join(fields)} changed by {actor}"
    return _written(  # 3
        scene,
        after,
        KeyChanged(by=actor, fields=fields),
        said,
        f"the key {key.name!r} ({key.id}): {', '.join(fields)} changed",
    )


def _revoke(scene: Scene, actor: str, body: KeyRevoke) -> Accepted | Rejected:
    """One that has expired may be revoked too: then nobody gives it more time."""
    key = find(scene.world.keys, body.key, scene.now)
    if key is None:
        return _not_found(scene, body.key)
    if key.revoked_at is not None:
        return _as_before(scene, key, f"the key {key.name!r} ({key.id}) was revoked already")
    # Clocks of two leaders may differ; a key is not over before it was made.
    at = max(scene.now, key.created_at)
    said = f"the key {key.name!r} ({key.id}) is revoked"
    changed = _changed(replace(key, revoked_at=at), KeyRevoked(by=actor), f"revoked by {actor}")
    return Accepted(changes=(changed,), sentence=said)


def _as_before(scene: Scene, key: Key, sentence: str) -> Accepted:
    return Accepted(sentence=sentence, refs=(scene.world.subject("key", key.id),))


def _written(
    scene: Scene, key: Key, event: KeyEvent, reason: str, sentence: str
) -> Accepted | Rejected:
    """The change, unless it is too large for an event; with what its patterns match nothing of so far."""
    size = len(msgspec.json.encode(key))
    if size > STATE_BYTES:
        said = f"the key takes {show_bytes(size)}; every event carries it, at most {show_bytes(STATE_BYTES)}"
        return Rejected(code=codes.INVALID, sentence=said)
    return Accepted(
        changes=(_changed(key, event, reason),),
        sentence=sentence,
        lines=tuple(_unknown_names(scene, key)),
    )


def _changed(key: Key, event: KeyEvent, reason: str) -> Change:
    return Change(noun="key", key=(key.id,), event=event, state=key, reason=reason)


def _taken(scene: Scene, key: Key) -> Rejected | None:
    """The refusal when another key that is not over has its name, or when its name is another's id."""
    for id_, other in sorted(scene.world.keys.items()):
        if id_ == key.id:
            continue
        if key.name == id_ or (key.name == other.name and not is_over(other, scene.now)):
            sentence = (
                f"{key.name!r} is the {'id' if key.name == id_ else 'name'} of a key already ({id_}); "
                "take another name, or revoke that one first"
            )
            return Rejected(code=codes.EXISTS, sentence=sentence)
    return None


def _not_found(scene: Scene, said: str) -> Rejected:
    known = [key.name for key in scene.world.keys.values() if not is_over(key, scene.now)]
    near = get_close_matches(said, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    # A whole key is not repeated: its secret would be in the log.
    return Rejected(code=codes.NOT_FOUND, sentence=f"there is no key {id_of(said)!r}{hint}")


def _after(at: datetime, seconds: float) -> datetime:
    return at + timedelta(seconds=seconds)


def _invalid(problems: list[Problem]) -> Rejected:
    sentence = f"{problems[0].path}: {problems[0].sentence}"
    return Rejected(code=codes.INVALID, sentence=sentence, problems=tuple(problems))


def _unknown_names(scene: Scene, key: Key) -> Iterable[str]:
    """What the key may use that nobody has given a name yet: it may come, or be a typing mistake."""
    world = scene.world
    plain = [name for name in key.models if "*" not in name]
    if not plain:
        return
    known = names.holders(world.models.values(), world.adapters.values())
    known |= names.pairs(world.models, world.adapters.values())
    for name in plain:
        if name not in known:
            yield f"no model, alias or adapter is called {name!r} so far"
