"""Tests of a real NVIDIA card are collected where there is one, and where `make test-gpu` asks for them: there
they fail without one. Nothing here is ever skipped."""

import ctypes.util
import os

if not (
    os.environ.get("YARD_TEST_GPU")
    or (ctypes.util.find_library("cuda") and os.path.exists("/dev/nvidiactl"))
):
    collect_ignore_glob = ["test_*.py"]
