"""PyTorch over NCCL's symmetric memory, one process a GPU: a MemPool on ncclMemAlloc, registered as windows, and an all-reduce of its
buffers in a CUDA graph; then all of it given back, and so again. Says what each step takes in each round.

    NCCL_NVLS_ENABLE=0 WINDLASS_REPORT=text windlass run -- torchrun --nproc-per-node 2 mem_pool.py

Nothing here is Windlass's own: the script is written for NCCL (2.28.3 and later, PyTorch 2.9 and later for windows). It does not run on
the simulator: PyTorch computes on GPUs.

Did it work? Rank 0 prints "0 wrong", and from round 2 on alloc and register take less time than in round 1. Two lines near the top of
each process's report count what was found again:

    pool: hits
    windows: hits

With more rounds (--rounds 1000), "windlass stats" in another terminal shows a line for each process while they run.
"""

import argparse
import gc
import os
import pathlib
import subprocess
import tempfile
import time

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None  # read_options says so

REPLAYS = 3
SIZES = (4 << 20, 8 << 20, 16 << 20)  # elements; from 10 MiB on PyTorch makes each tensor a segment of its own

# ncclMemAlloc as PyTorch's pluggable allocators call it. NCCL is found by its soname: the one that PyTorch has loaded. A memory of
# null makes PyTorch say that there is none left.
PLUG = r"""
#include <stddef.h>
extern int ncclMemAlloc(void** pointer, size_t bytes);
extern int ncclMemFree(void* pointer);

void* plug_alloc(size_t bytes, int device, void* stream) {
  void* pointer = NULL;
  (void)device, (void)stream;
  return ncclMemAlloc(&pointer, bytes) == 0 ? pointer : NULL;
}

void plug_free(void* pointer, size_t bytes, int device, void* stream) {
  (void)bytes, (void)device, (void)stream;
  if (pointer) ncclMemFree(pointer);
}
"""


def main():
    options = read_options()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)  # the communicator is made here: pools are registered with it
    dist.all_reduce(torch.zeros(1, device=device))  # what NCCL does once is no part of a round
    torch.cuda.synchronize()
    backend = dist.group.WORLD._get_backend(device)
    allocator, kind = find_allocator(backend)
    say(f"PyTorch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {dist.get_world_size()} GPUs, {kind}")

    say(f"{'rank 0, ms':12}" + "".join(f"{name:>12}" for name in ("alloc", "register", "capture", "replays", "deregister", "free")))
    wrong = 0
    for number in range(options.rounds):
        times, wrong_here = run_round(backend, allocator, device)
        wrong += wrong_here
        say(f"round {number + 1:<6}" + "".join(f"{taken:12.3f}" for taken in times))
    total = torch.tensor([wrong], device=device)
    dist.all_reduce(total)
    say(f"{options.rounds} rounds of {len(SIZES)} buffers: {int(total)} wrong")
    dist.destroy_process_group()
    return int(total) != 0


def read_options():
    """What the command line says; ends the program where the script cannot run."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--rounds", type=int, default=6, help="lives of a pool [default: 6]")
    options = arguments.parse_args()
    if torch is None:
        arguments.exit(1, "PyTorch is missing: pip install torch\n")
    if "LOCAL_RANK" not in os.environ:
        arguments.exit(1, "no LOCAL_RANK: start it with torchrun --nproc-per-node 2\n")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        arguments.exit(1, f"a GPU is needed for each process, and PyTorch sees {torch.cuda.device_count()}\n")
    return options


def run_round(backend, allocator, device):
    """A pool's life, from its first segment to its last. Returns the times of its steps in milliseconds, and how many buffers have wrong sums."""
    clock = Clock()
    # The same tensors in the same order on all ranks: buffers of a collective have to lie at the same offset of a window everywhere.
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool):
        buffers = [torch.empty(size, device=device) for size in SIZES]
    clock.step()

    register(backend, pool)  # on all ranks, in the same order, outside of captures
    clock.step()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads, like the watchdog, may call CUDA meanwhile
        for buffer in buffers:
            dist.all_reduce(buffer)
    clock.step()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    for place, buffer in enumerate(buffers):
        buffer.fill_(rank + place + 1)
    clock.skip()
    for _ in range(REPLAYS):
        graph.replay()
    clock.step()
    # In place: the first replay sums what ranks had, each further one what is equal on all ranks by then.
    sums = [ranks * (ranks - 1) // 2 + ranks * (place + 1) for place in range(len(SIZES))]
    wrong = sum(bool((buffer != total * ranks ** (REPLAYS - 1)).any()) for buffer, total in zip(buffers, sums))

    # Graphs first; then windows, once no rank uses them any more; then memory.
    graph.reset()
    del graph
    gc.collect()
    torch.cuda.synchronize()
    dist.barrier()
    clock.skip()
    backend.deregister_mem_pool(pool)
    clock.step()
    del buffer, buffers
    del pool
    torch.cuda.empty_cache()
    clock.step()
    return clock.times, wrong


class Clock:
    """Milliseconds of steps, each with the work that it left to the GPU."""

    def __init__(self):
        self.times = []
        self.skip()

    def skip(self):
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def step(self):
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.times.append((now - self.start) * 1e3)
        self.start = now


def register(backend, pool):
    """As windows; PyTorch before 2.9 knows local registrations alone."""
    try:
        backend.register_mem_pool(pool, symm=True)
    except TypeError:
        backend.register_mem_pool(pool)


def find_allocator(backend):
    """NCCL's allocator, which PyTorch refuses on a device without multicast; there one of our own, as vLLM and SGLang have it."""
    try:
        return backend.mem_allocator, "PyTorch's own allocator of NCCL memory"
    except (AttributeError, RuntimeError):
        return compiled_allocator(), "an allocator of NCCL memory compiled here"


def compiled_allocator():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mem_pool-"))  # each process its own; the library stays open
    source, library = folder / "plug.c", folder / "plug.so"
    source.write_text(PLUG)
    nccl = mapped_nccl()
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", str(source), "-o", str(library), str(nccl)]
    subprocess.run(command, check=True)
    return torch.cuda.memory.CUDAPluggableAllocator(str(library), "plug_alloc", "plug_free").allocator()


def mapped_nccl():
    """The file of the NCCL that this process has: only its soname, libnccl.so.2, comes into what is linked with it."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libnccl.so.2" in path or "libwindlass.so" in path:
            return path
    raise RuntimeError("no libnccl.so.2 is loaded")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
