"""The real llama.cpp on weights that a node fetched: from a mirror's HTTP, and in shards beside each other."""

import struct
from pathlib import Path

import gguf
import httpx
import numpy
import pytest

from nodeagent.drivers.llamacpp import LlamacppDriver
from schemas.plan import Launch
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_node, an_item, memory_yard
from tests.support.aio import run
from tests.support.fetch_items import announced
from tests.support.scripted_mirror import TOKEN, a_manifest, serving_mirror

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NODE = a_node()


def an_item_on(replica: str, key: str):
    launch = Launch(
        model="smollm2",
        incarnation="i",
        profile="cpu",
        revision="1",
        engine="llamacpp",
        source=f"mirror:{key}",
        # One thread: several wait for each other by spinning, which a busy machine punishes.
        args=("--ctx-size", "512", "--parallel", "1", "--threads", "1"),
    )
    return an_item(replica, launch=launch, memory_bytes=GIB)


def split_in_two(folder: Path) -> list[bytes]:
    """The model as a publisher splits it: its first shard with what describes it, the second with tensors."""
    reader = gguf.GGUFReader(MODEL)
    half = len(reader.tensors) // 2
    parts: list[bytes] = []
    for number, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        path = folder / f"part-{number}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for field in reader.fields.values():
                if field.name.startswith("GGUF.") or field.name == "general.architecture":
                    continue
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16)
        total = len(reader.tensors)
        writer.add_key_value("split.tensors.count", total, gguf.GGUFValueType.INT32)
        for tensor in tensors:
            data = numpy.ascontiguousarray(tensor.data)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path.read_bytes())
    return parts


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shards", [1, 2])
def test_scn_c5_an_engine_serves_what_its_node_fetched_from_the_first_shard_on(tmp_path, shards):
    if shards == 1:
        bodies, names = [MODEL.read_bytes()], ["smollm2.gguf"]
    else:
        bodies = split_in_two(tmp_path)
        names = [f"smollm2-{n:05d}-of-00002.gguf" for n in (1, 2)]
    assert all(body[:4] == b"GGUF" for body in bodies)
    assert struct.unpack("<I", bodies[0][4:8]) == (3,)
    manifest = a_manifest("smollm2", *bodies, names=names)

    async def story():
        with serving_mirror() as mirror:
            mirror.add(manifest, *bodies)
            async with memory_yard(tmp_path) as yard:
                agent = yard.agent(
                    node=NODE, drivers={"llamacpp": LlamacppDriver()}, mirror_token=TOKEN
                )
                async with agent, announced(yard.hand.wire, mirror):
                    hand = yard.hand
                    await hand.plan(an_item_on("r-1", manifest.key))
                    ready = await hand.phase("r-1", "ready", 40.0)
                    async with httpx.AsyncClient(timeout=40.0) as client:
                        answer = await client.post(
                            f"{ready.endpoint}/v1/chat/completions",
                            json={
                                "model": "smollm2",
                                "messages": [{"role": "user", "content": "Say hello."}],
                                "max_tokens": 4,
                            },
                            headers={"Authorization": "Bearer key-of-r-1"},
                        )
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["completion_tokens"] == 4
                    await hand.expect(
                        lambda: (hand.replica("r-1").measured_memory_bytes or 0) > 80 * MIB,
                        "its measured memory",
                    )

    run(story(), 100.0)
