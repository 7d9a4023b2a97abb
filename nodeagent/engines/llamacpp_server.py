"""Runs the llama.cpp server of the xllamacpp wheel as an engine process until it is ended.

    python -I llamacpp_server.py --model PATH --alias NAME --host HOST --port PORT --set JSON

It is run as a file and imports nothing of ours, and little else: its start is part of every cold
request. Which attributes the profile's flags stand for was decided before; here they are only set.
"""

import enum
import json
import os
import signal
import sys


def main() -> int:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    # Both end the process where it stands, in the middle of a load too: the agent has drained it
    # before, and a handler of ours would only run once the engine's own code returned.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    import xllamacpp

    params = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for path, value in json.loads(given["--set"]).items():
            _assign(params, path, value)
    except (AttributeError, TypeError, ValueError) as error:
        return _fail(f"this llama.cpp does not take a setting of the profile: {error}")
    params.model.path = given["--model"]
    params.model_alias = {given["--alias"]}
    params.hostnames = [given["--host"]]
    params.port = int(given["--port"])
    params.endpoint_metrics = True
    params.endpoint_slots = True
    key = os.environ.pop("YARD_ENGINE_KEY", "")
    if key:
        params.api_keys = [key]
    try:
        # Returns when the model is loaded and the port answers.
        server = xllamacpp.Server(params)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        return _fail(f"llama.cpp could not load {given['--model']}: {error}")
    _tell_ready()
    while server is not None:
        signal.pause()
    return 0


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
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main())
