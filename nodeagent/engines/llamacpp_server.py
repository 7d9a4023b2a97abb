"""Runs the llama.cpp server of the xllamacpp wheel as an engine process until SIGTERM.

It is run as a file, under -I, and imports nothing of ours: its start is part of every cold request.
Which attributes the profile's flags stand for was decided before; here they are only set.
"""

import argparse
import enum
import json
import os
import signal
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "alias", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--set", default="{}", help="attributes of CommonParams as JSON")
    given = parser.parse_args()
    # Waited for, not handled: Python runs a handler only between its own instructions, and the
    # engine's threads must inherit the mask so that the signal waits for us.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    import xllamacpp

    params = xllamacpp.CommonParams()
    try:
        for path, value in json.loads(given.set).items():
            _assign(params, path, value)
    except (AttributeError, TypeError, ValueError) as error:
        return _fail(f"this llama.cpp does not take a setting of the profile: {error}")
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.hostnames = [given.host]
    params.port = given.port
    params.endpoint_metrics = True
    params.endpoint_slots = True
    key = os.environ.pop("YARD_ENGINE_KEY", "")
    if key:
        params.api_keys = [key]
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        return _fail(f"llama.cpp could not load {given.model}: {error}")
    _tell_ready()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    # Not `del server`: that waits for running requests, and the agent has drained before.
    assert server is not None
    sys.stdout.flush()
    os._exit(0)


def _assign(params: object, path: str, value: object) -> None:
    """Sets `path`, such as `cpuparams.n_threads`, to a value of the kind that is there already."""
    *outer, name = path.split(".")
    target = params
    for part in outer:
        target = getattr(target, part)
    present = getattr(target, name)
    if isinstance(present, enum.Enum):
        value = type(present)(value)
    setattr(target, name, value)


def _tell_ready() -> None:
    descriptor = os.environ.get("YARD_READY_FD")
    if descriptor is None:
        return
    os.write(int(descriptor), b"ready\n")
    os.close(int(descriptor))


def _fail(sentence: str) -> int:
    """The last line printed is what a person is shown."""
    sys.stdout.flush()
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main())
