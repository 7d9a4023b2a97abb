"""Takes the place of nvidia-ml-py in a process whose PYTHONPATH begins with this folder: the fake driver of the
file that FAKE_NVML names. It holds nothing of its own."""

import importlib.util
import os
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location(
    "fake_nvml", Path(__file__).parents[1] / "fake_nvml.py"
)
assert _spec is not None
assert _spec.loader is not None
_fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fake)
_library = _fake.FakeNvml(os.environ[_fake.STATE])


def __getattr__(name: str) -> Any:
    return getattr(_library, name)
