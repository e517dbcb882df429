#!/usr/bin/env python3
"""Times ncclMemAlloc, ncclMemFree, windows over such memory, and whole cycles of both, on two ranks with a GPU each.

    python3 scripts/measure/windows.py                    # NCCL: the libnccl.so.2 that the loader finds
    windlass run -- python3 scripts/measure/windows.py    # the same with Windlass

A cycle is: allocate, register, gather, wait, deregister, free. Each line is a figure: microseconds of the slower rank, as the first, the median
and the worst of the others; or what the cycles have added to the device's memory in use, to mappings and to mapped addresses, of the rank with more.
Windows need NCCL 2.27.3. NVLink multicast is as the environment says: NCCL_NVLS_ENABLE=0 has it off.
"""

import argparse
import ctypes
import multiprocessing
import multiprocessing.connection
import statistics
import time
from ctypes import byref, c_int, c_size_t, c_void_p

REPETITIONS, UINT8, SYMMETRIC = 50, 1, 1  # ncclUint8, NCCL_WIN_COLL_SYMMETRIC
UNITS = {"K": 10, "M": 20, "G": 30}


class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Library:
    """Functions whose answers other than 0 are errors."""

    def __init__(self, name):
        self.library = ctypes.CDLL(name)

    def __getattr__(self, function):
        def call(*arguments):
            code = getattr(self.library, function)(*arguments)
            if code != 0:
                raise SystemExit(f"windows: {function} answered {code}, expected 0")
        return call


class Rank:
    def __init__(self, rank, ranks, pipe, barrier):
        self.rank, self.ranks, self.barrier = rank, ranks, barrier
        self.nccl, self.cuda = Library("libnccl.so.2"), Library("libcuda.so.1")
        context = c_void_p()
        self.cuda.cuInit(0)
        self.cuda.cuDevicePrimaryCtxRetain(byref(context), rank)
        self.cuda.cuCtxSetCurrent(context)
        id = Id()
        if rank == 0:
            self.nccl.ncclGetUniqueId(byref(id))
            pipe.send(bytes(id))
        ctypes.memmove(byref(id), pipe.recv(), 128)
        self.communicator = c_void_p()
        self.nccl.ncclCommInitRank(byref(self.communicator), c_int(ranks), id, c_int(rank))

    def allocate(self, size):
        block = c_void_p()
        self.nccl.ncclMemAlloc(byref(block), c_size_t(size))
        return block

    def register(self, block, size):
        window = c_void_p()
        self.nccl.ncclCommWindowRegister(self.communicator, block, c_size_t(size), byref(window), c_int(SYMMETRIC))
        if not window:
            raise SystemExit("windows: ncclCommWindowRegister made no window: NCCL has none here (NCCL_WIN_ENABLE, NCCL_CUMEM_ENABLE)")
        return window

    def deregister(self, window):
        self.nccl.ncclCommWindowDeregister(self.communicator, window)

    def blocks(self, size):
        block, allocated = timed(self.allocate, size)
        _, freed = timed(self.nccl.ncclMemFree, block)
        return {"alloc": allocated, "free": freed, "alloc and free": allocated + freed}

    def windows(self, size):
        block = self.allocate(size)
        self.barrier.wait()
        window, registered = timed(self.register, block, size)
        _, deregistered = timed(self.deregister, window)
        self.nccl.ncclMemFree(block)
        return {"register": registered, "deregister": deregistered}

    def cycles(self, size):
        return {"whole cycle": timed(self.cycle, size)[1]}

    def cycle(self, size):
        block = self.allocate(size)
        window = self.register(block, size)
        own = c_void_p(block.value + self.rank * (size // self.ranks))
        self.nccl.ncclAllGather(own, block, c_size_t(size // self.ranks), c_int(UINT8), self.communicator, None)
        self.cuda.cuStreamSynchronize(None)
        self.deregister(window)
        self.nccl.ncclMemFree(block)

    def usage(self):
        """What may grow: bytes in use on the device, mappings, bytes of these."""
        self.barrier.wait()
        free, total = c_size_t(), c_size_t()
        self.cuda.cuMemGetInfo_v2(byref(free), byref(total))
        with open("/proc/self/maps") as file:
            ends = [line.split()[0].split("-") for line in file]
        return total.value - free.value, len(ends), sum(int(end, 16) - int(begin, 16) for begin, end in ends)

    def measure(self, size, cycles):
        """Microseconds by step, the first before growth counts: what is made only once is no growth. And what the cycles have added."""
        times = {}
        for work, repetitions in ((self.blocks, REPETITIONS), (self.windows, REPETITIONS), (self.cycles, cycles)):
            first = work(size)
            before = self.usage()
            steps = [first] + [work(size) for _ in range(repetitions)]
            after = self.usage()
            times |= {step: [taken[step] for taken in steps] for step in first}
        return times, [now - then for then, now in zip(before, after)]


def timed(act, *arguments):
    began = time.perf_counter_ns()
    given = act(*arguments)
    return given, (time.perf_counter_ns() - began) / 1e3


def run(rank, ranks, pipe, barrier, sizes, cycles):
    member = Rank(rank, ranks, pipe, barrier)
    for size in sizes:
        pipe.send(member.measure(size, cycles))
    member.nccl.ncclCommDestroy(member.communicator)


def size_of(text):
    shift = UNITS.get(text[-1:].upper(), 0)
    size = int(text[:-1] if shift else text) << shift
    if size <= 0 or size % 4096:
        raise argparse.ArgumentTypeError(f"{text}: expected a multiple of 4096")
    return size


def tell(size, results, cycles):
    for step in results[0][0]:
        first, *others = (max(repetition) for repetition in zip(*(times[step] for times, _ in results)))
        print(f"{step}, {size >> 10} KiB: first {first:.2f} us, median {statistics.median(others):.2f} us, worst {max(others):.2f} us, "
              f"{len(others)} repetitions")
    added = [max(of_ranks) for of_ranks in zip(*(added for _, added in results))]
    for name, more in zip(("bytes of device memory", "mappings", "bytes of mapped addresses"), added):
        print(f"{cycles} cycles of {size >> 10} KiB added: {more} {name}", flush=True)


def gathered(pipes):
    """What both ranks say. Raises EOFError as soon as one of them has ended."""
    said = {}
    while len(said) < len(pipes):
        for pipe in multiprocessing.connection.wait([pipe for pipe in pipes if pipe not in said]):
            said[pipe] = pipe.recv()
    return [said[pipe] for pipe in pipes]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2M,64M,1G", type=lambda text: [size_of(part) for part in text.split(",")], help="of blocks, by commas")
    parser.add_argument("--cycles", type=int, default=100)
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    pipes, barrier = [processes.Pipe() for _ in range(2)], processes.Barrier(2)
    ranks = [processes.Process(target=run, args=(rank, 2, pipe, barrier, options.sizes, options.cycles), daemon=True)
             for rank, (_, pipe) in enumerate(pipes)]
    for rank in ranks:
        rank.start()
    for _, pipe in pipes:
        pipe.close()
    try:
        id = pipes[0][0].recv()
        for pipe, _ in pipes:
            pipe.send(id)
        for size in options.sizes:
            tell(size, gathered([pipe for pipe, _ in pipes]), options.cycles)
    except EOFError:
        raise SystemExit("windows: a rank ended early") from None
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
