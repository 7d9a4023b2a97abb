"""Starts one engine as the child of a process of its own, which then keeps it until it ends.

    python -I -S launcher.py FOLDER pipe|probe -- PROGRAM ARGUMENT…

It stands between a cold request and its engine, so before the engine exists it imports nothing that
is not loaded already; everything else is `nodeagent.keeper`'s, imported while the engine loads. It
must not talk to the log, nor hold a pipe to the agent: it outlives the agent.
"""

import _ctypes
import _signal  # pyright: ignore[reportMissingImports] - built in, without a stub
import os
import sys

READY_FD = "YARD_READY_FD"
"""Names the descriptor on which an engine of kind `pipe` writes one line when it answers."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    """Linux prctl(2). `ctypes` itself would cost as much as starting the engine's process."""
    address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # pyright: ignore[reportArgumentType]
    return _ctypes.call_function(address, (option, value, 0, 0, 0)) == 0


def main() -> int:
    folder, ready, _, *argv = sys.argv[1:]
    # Whatever descriptors the agent had inherited are no business of an engine.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Whatever the engine forks and abandons becomes our child, so nothing of it can get lost.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log_out, log_in = os.pipe()
    fault_out, fault_in = os.pipe()
    ready_out, ready_in = os.pipe() if ready == "pipe" else (-1, -1)
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, launcher, log_in, fault_in, ready_in)
    os.close(log_in)
    os.close(fault_in)
    if ready_in >= 0:
        os.close(ready_in)
    # -I leaves our own folder out of the path.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from nodeagent.keeper import Keeper

    return Keeper(folder, pid, log=log_out, fault=fault_out, ready=ready_out).keep()


def _become(argv: list[str], launcher: int, log_in: int, fault_in: int, ready_in: int) -> None:
    """Turns the forked child into the engine; on failure writes why to `fault_in`. Never returns."""
    try:
        os.setpgid(0, 0)
        # The engine dies with its launcher, however that ends: no engine without an owner. If the
        # launcher ended before this took effect, nobody would send the signal any more.
        _prctl(_PR_SET_PDEATHSIG, _signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(126)
        # Python ignores these two, and that would be inherited.
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
        # Descriptor 0 of the launcher is the lock that says it lives; the engine must not hold it.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log_in, 1)
        os.dup2(log_in, 2)
        if ready_in >= 0:
            os.set_inheritable(ready_in, True)
            os.environ[READY_FD] = str(ready_in)
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(fault_in, f"cannot run {argv[0]!r}: {error.strerror}".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main())
