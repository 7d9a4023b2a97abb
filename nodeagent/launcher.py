"""Starts one engine as the child of a process of its own, which then keeps it until it ends.

    python -I -S launcher.py ROOT later|now

Descriptor 0 is a socket on which the agent hands over the launch, once (`nodeagent.spare`); an agent
that ends without a word ends this too. It stands between a cold request and its engine: `later` it
imports everything while nobody waits, `now` it imports nothing before the engine exists. It must not
talk to the log, nor hold a pipe to the agent once it has a launch: it outlives the agent.
"""

import _ctypes
import _signal  # pyright: ignore[reportMissingImports] - built in, without a stub
import _socket
import os
import sys
import time

READY_FD = "YARD_READY_FD"
"""Names the descriptor on which an engine of kind `pipe` writes one line when it answers."""

STALE_S = 5.0
"""A launch that lay longer is not begun: whoever asked has given it up, or soon will."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    """Linux prctl(2). `ctypes` itself would cost as much as starting the engine's process."""
    address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # pyright: ignore[reportArgumentType]
    return _ctypes.call_function(address, (option, value, 0, 0, 0)) == 0


def main() -> int:
    if sys.argv[2] == "later":
        _import_keeper()
    given = _receive()
    if given is None:
        return 0
    folder, ready, argv = given
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
    _import_keeper()
    from nodeagent.keeper import Keeper

    return Keeper(folder, pid, log=log_out, fault=fault_out, ready=ready_out).keep()


def _import_keeper() -> None:
    """Imports the second half; the second call finds it loaded."""
    # -I leaves our own folder out of the path.
    above = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if above not in sys.path:
        sys.path.insert(0, above)
    import nodeagent.keeper  # noqa: F401


def _receive() -> tuple[str, str, list[str]] | None:
    """Waits for the launch: (folder, kind of ready, command line); None when there will be none.

    Afterwards descriptor 0 is the launch's lock, 1 and 2 its own log, and the environment the engine's.
    """
    agent = _socket.socket(fileno=0)
    try:
        told, control, _, _ = agent.recvmsg(1, _socket.CMSG_SPACE(3 * 4))
    except OSError:
        return None
    if not told or not control:
        return None
    fds = control[0][2]
    words, lock, output = (int.from_bytes(fds[at : at + 4], sys.byteorder) for at in (0, 4, 8))
    size = os.fstat(words).st_size
    folder, ready, sent_at, count, *rest = os.pread(words, size, 0).split(b"\0")
    # Its place in the table of descriptors is the lock's now.
    agent.detach()
    os.dup2(lock, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if time.monotonic() - float(sent_at) > STALE_S:
        return None
    os.environb.clear()
    for word in rest[int(count) :]:
        name, _, value = word.partition(b"=")
        if name:
            os.environb[name] = value
    argv = [os.fsdecode(word) for word in rest[: int(count)]]
    return os.fsdecode(folder), ready.decode(), argv


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
