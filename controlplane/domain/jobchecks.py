"""Judges what a header says of a model before anything is fetched, and again when it is there.

It fails what cannot work in seconds instead of after forty gigabytes; it writes nothing.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from controlplane.domain import estimate, jobentry, needs
from controlplane.domain.files import copy_on, is_here
from controlplane.domain.jobwrites import CHECK_AHEAD
from controlplane.domain.judging import is_heard
from controlplane.domain.quantities import show_bytes
from controlplane.domain.rehearsal import rehearse
from controlplane.domain.reports import HeaderRead
from controlplane.domain.scene import Scene
from controlplane.domain.shape import ModelShape
from controlplane.domain.world import World
from schemas import codes
from schemas.file import File
from schemas.job import Job, MemoryEstimate
from schemas.node import EngineInfo


class Failed(Struct, frozen=True, kw_only=True):
    """It cannot work: a code of schemas/codes.py and the sentence for a person."""

    code: str
    sentence: str


class Passed(Struct, frozen=True, kw_only=True):
    """What the check found; `context_length` is the number that is passed on and shown."""

    architecture: str
    generates: bool
    unmapped: bool
    context_length: int
    estimate: MemoryEstimate
    detail: str


def check(scene: Scene, job: Job, report: HeaderRead) -> Passed | Failed:
    """The first of these that fails, or what was found:

    1. the file is a shard of another set than the one that was chosen;
    2. a node is there to ask; some node's llama.cpp loads the architecture;
    3. the context asked for is not longer than the model's. One nobody asked for is cut to it;
    4. the mirror's disk takes what is still to be fetched (ahead of the download only);
    5. some card, were it empty, has room for one replica.
    """
    shape = report.shape
    assert job.file_set is not None
    shards = job.file_set.shards
    if shape is not None and shape.split_count > 1 and shape.split_count != shards:  # 1
        sentence = (
            f"{job.file_set.first} says that it is one of {shape.split_count} shards, "
            f"the set has {shards}"
        )
        return Failed(code=codes.SHARD_MISSING, sentence=sentence)
    architecture = shape.architecture if shape is not None else report.architecture
    wrong = _engines(scene, architecture) or _context(job, shape)  # 2, 3
    if wrong is None and report.index == CHECK_AHEAD:
        wrong = _disk(scene, job, report)  # 4
    if wrong is not None:
        return wrong
    generates = shape.causal if shape is not None else True
    unmapped = shape is not None and shape.repacked > 0
    asked = job.request.context_length
    trained = shape.trained_context if shape is not None else 0
    context_length = min(asked, trained) if trained > 0 else asked
    wanted = jobentry.Wanted(
        model=job.model,
        first=needs.keys_of_job(job)[0],
        request=job.request,
        context_length=context_length,
        generates=generates,
        unmapped=unmapped,
        gpus=jobentry.has_gpus(scene.world.nodes.values()),
    )
    made = estimate_of(wanted, shape, job.file_set.bytes)
    model = jobentry.model_of(wanted, made.total_bytes)
    if isinstance(model, tuple):
        return Failed(code=codes.INVALID, sentence=f"{model[0].path}: {model[0].sentence}")
    places = rehearse(scene, model)
    if places.no_node or (not places.unknown and not places.fits):  # 5
        sentence = places.no_node or f"no node can host it: {places.sentence}"
        return Failed(code=codes.NO_CAPACITY, sentence=sentence)
    return Passed(
        architecture=architecture,
        generates=generates,
        unmapped=unmapped,
        context_length=context_length,
        estimate=made,
        detail=_detail(job, architecture, context_length, made, report.why, places.sentence),
    )


def estimate_of(
    wanted: jobentry.Wanted, shape: ModelShape | None, weights_bytes: int
) -> MemoryEstimate:
    """What one replica of that entry will use; by the size of the files when the header gave no shape."""
    if shape is None:
        return estimate.by_size(weights_bytes, wanted.request.ctx_pool)
    args = jobentry.arguments(wanted)
    if wanted.unmapped:
        args = (*args, *jobentry.UNMAPPED)
    return estimate.estimate_for_args(shape, weights_bytes, args)


def _detail(
    job: Job,
    architecture: str,
    context_length: int,
    made: MemoryEstimate,
    why: str,
    places: str,
) -> str:
    parts = [architecture or "architecture not read" + (f" ({why})" if why else "")]
    if context_length != job.request.context_length:
        parts.append(f"context {context_length} tokens, all it was trained for")
    parts.append(estimate.explain(made))
    parts.append(places)
    return ", ".join(parts)


def _engines(scene: Scene, architecture: str) -> Failed | None:
    """2. An engine that does not say what it loads is not accused of anything."""
    heard = [node for node in sorted(scene.world.nodes) if is_heard(scene, node)]
    if not scene.world.nodes:
        return Failed(code=codes.NO_CAPACITY, sentence="no node has joined this yard")
    if not heard:
        return Failed(code=codes.NO_CAPACITY, sentence="no node is reachable")
    engines: list[EngineInfo] = []
    for node in heard:
        engines += [e for e in scene.world.nodes[node].engines if e.name == "llamacpp"]
    if not architecture or not engines:
        return None
    if any(not e.architectures or architecture in e.architectures for e in engines):
        return None
    versions = ", ".join(sorted({e.version for e in engines if e.version})) or "of unknown version"
    sentence = (
        f"llama.cpp {versions} on the nodes cannot run this: "
        f"it does not know the architecture {architecture!r}"
    )
    return Failed(code=codes.ARCHITECTURE_UNKNOWN, sentence=sentence)


def _context(job: Job, shape: ModelShape | None) -> Failed | None:
    trained = shape.trained_context if shape is not None else 0
    asked = job.request.context_length
    if trained <= 0 or asked <= trained or not job.request.context_given:
        return None
    sentence = (
        f"a context of {asked} tokens was asked for, the model was trained for {trained}; "
        f"ask for at most {trained} with --context-length"
    )
    return Failed(code=codes.CONTEXT_TOO_LONG, sentence=sentence)


def _disk(scene: Scene, job: Job, report: HeaderRead) -> Failed | None:
    if report.free_bytes is None:
        return None
    world = scene.world
    known = [world.files[key] for key in needs.keys_of_job(job) if key in world.files]
    missing = missing_bytes(world, scene.live.mirror, known, report.reserved)
    return no_disk(report.free_bytes, missing, sum(file.published_bytes for file in known))


def missing_bytes(
    world: World, mirror: str, wanted: Sequence[File], reserved: Mapping[str, int]
) -> int:
    """What the mirror's disk must still take. What is there, be it under another name, needs no more room,
    nor does what a fetch has reserved (`reserved`, bytes by key)."""
    sums = {file.published_sha256 for file in wanted}
    there = {f.sha256 for f in world.files.values() if f.sha256 in sums and is_here(f, mirror)}
    missing = 0
    for file in wanted:
        mine = copy_on(file, mirror)
        is_there = mine is not None and mine.phase in ("present", "verifying")
        if not is_there and (file.published_sha256 is None or file.published_sha256 not in there):
            missing += max(0, file.published_bytes - reserved.get(file.key, 0))
    return missing


def no_disk(free_bytes: int, missing_bytes: int, total_bytes: int) -> Failed | None:
    """The refusal of files that are not all there and of which the mirror's disk cannot take the rest."""
    if missing_bytes <= max(free_bytes, 0):
        return None
    sentence = (
        f"the mirror's disk has {show_bytes(max(free_bytes, 0))} free, and {show_bytes(missing_bytes)} "
        f"of {show_bytes(total_bytes)} are still to be fetched; `yardctl mirror gc` removes what "
        "nothing needs, or give the mirror more disk"
    )
    return Failed(code=codes.DISK_FULL, sentence=sentence)
