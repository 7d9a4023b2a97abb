"""Prints, as a JSON list, the kinds of devices the llama.cpp of the xllamacpp wheel can use on this machine.

    python -I llamacpp_devices.py

Run as a process of its own: whoever loads the engine carries its memory and its faults.
"""

import json
import sys


def main() -> int:
    import xllamacpp

    devices = xllamacpp.get_device_info()  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(json.dumps([device["type"].name for device in devices]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
