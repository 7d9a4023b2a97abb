"""Holds memory of the first card CUDA shows it, through the driver's library alone, until it is killed.

    python holding.py BYTES

Prints `holds` when it has it, `cards N` without BYTES.
"""

import ctypes
import signal
import sys

NO_DEVICE = 100


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def check(status: int, call: str) -> None:
    if status:
        sys.exit(f"{call} failed with {status}")


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    status = cuda.cuInit(0)
    count = ctypes.c_int(0)
    if status != NO_DEVICE:
        check(status, "cuInit")
        check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if len(sys.argv) < 2:
        say(f"cards {count.value}")
        return
    device = ctypes.c_int()
    check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    context = ctypes.c_void_p()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    address = ctypes.c_void_p()
    check(
        cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[1]))), "cuMemAlloc"
    )
    say("holds")
    signal.pause()


main()
