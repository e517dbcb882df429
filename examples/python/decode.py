r"""Tensor-parallel decoding as serving engines do it: layers of two matrix products and two all-reduces each, in one CUDA graph:

    NCCL_NVLS_ENABLE=0 WINDLASS_REPORT=text windlass run -- torchrun --nproc-per-node 2 decode.py

Nothing here is Windlass's own: the script is written for NCCL. It does not run on the simulator: PyTorch computes on GPUs.

Did it work? Rank 0 prints "sums right: True". In the report at the end, path native says that Windlass's kernel summed:

    ncclAllReduce                  native

Does it help? Rank 0 prints the mean time of every 50 steps, which "windlass compare" reads:

    windlass compare --metric 'step (\S+) ms' --metric-warmup 2 -- torchrun --nproc-per-node 2 decode.py

With --sleep 50 the communicator gives its memory back 50 times (ncclCommSuspend) and takes it again. The same graph must then give the same
bits, in the same time. NCCL alone has that from 2.29.7 on.
"""

import argparse
import ctypes
import os
import statistics
import time

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None  # read_options says so

TIMED = 50  # steps between two synchronizations
SETTLED_S = 5  # of replays before a median


def main():
    options = read_options()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    unused = used_mib()
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Each rank has a share of the columns of the first product and of the rows of the second: partial sums, which are added up.
    torch.manual_seed(rank)
    share = options.hidden // ranks
    kind = {"device": device, "dtype": torch.bfloat16}
    inner = [torch.randn(options.hidden, share, **kind) / options.hidden for _ in range(2 * options.layers)]
    outer = [torch.randn(share, options.hidden, **kind) / share for _ in range(2 * options.layers)]
    tokens = torch.ones(options.batch, options.hidden, **kind)
    state = tokens.clone()

    def step():
        state.copy_(tokens)
        for first, second in zip(inner, outer):
            partial = state @ first @ second
            dist.all_reduce(partial)
            state.add_(partial)

    # Once without a graph: kernels are loaded, and NCCL's communicator is there.
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    began = time.perf_counter()
    for number in range(1, options.steps + 1):
        graph.replay()
        if number % TIMED == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if rank == 0:
                print(f"step {(now - began) / TIMED * 1e3:.3f} ms")
            began = now

    # All ranks hold the same bits, and they are what a sum of the partial products is.
    everybody = [torch.empty_like(state) for _ in range(ranks)]
    dist.all_gather(everybody, state)
    right = all(torch.equal(state, other) for other in everybody) and bool(torch.isfinite(state).all())
    partial = tokens @ inner[0] @ outer[0]
    parts = [torch.empty_like(partial) for _ in range(ranks)]
    dist.all_gather(parts, partial)
    summed = partial.clone()
    dist.all_reduce(summed)
    exact = torch.stack([part.double() for part in parts]).sum(dim=0)
    right = right and bool((summed.double() - exact).abs().max() <= exact.abs().max() / 128)
    if options.sleep:
        right = sleep_and_wake(options.sleep, graph, state, device, unused) and right
    if rank == 0:
        print(f"{options.steps} steps of {2 * options.layers} all-reduces on {ranks} GPUs, sums right: {right}")
    # Before the communicator that it has captured.
    del graph
    dist.destroy_process_group()
    return not right


def sleep_and_wake(cycles, graph, state, device, unused):
    """Has the communicator sleep and wake; whether the graph gives the same bits each time."""
    communicator = ctypes.c_void_p(dist.group.WORLD._get_backend(device)._comm_ptr())

    def call(function, *arguments):
        code = getattr(ctypes.CDLL(None), function)(communicator, *arguments)
        if code != 0:
            raise RuntimeError(f"{function} answered {code}")

    def median_ms():
        # The GPU's clocks and its memory's temperature settle.
        began = time.perf_counter()
        while time.perf_counter() - began < SETTLED_S:
            for _ in range(TIMED):
                graph.replay()
            torch.cuda.synchronize()
        times = []
        for _ in range(200):
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)

    def cycle(sleeps):
        torch.cuda.synchronize()
        if sleeps:
            call("ncclCommSuspend", 1)
        asleep = used_mib()
        if sleeps:
            call("ncclCommResume")
        state.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return asleep, torch.equal(state, wanted)

    before, wanted, awake = median_ms(), state.clone(), used_mib()
    # A graph's kernels begin later once the process has used another stream, as most programs do, and as a sleep does (docs/sleep.md).
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(TIMED):
            wanted.clone()
    streams = median_ms()
    # The same without sleeps: what the rest of a cycle does to the time.
    waking = [cycle(sleeps=False) for _ in range(cycles)]
    control = median_ms()
    asleep = [cycle(sleeps=True) for _ in range(cycles)]
    after = median_ms()
    equal = all(equal for _, equal in waking + asleep)
    if dist.get_rank() == 0:
        print(f"memory of the GPU beside tensors: {unused:.0f} MiB before NCCL, {awake:.0f} awake, {asleep[-1][0]:.0f} asleep")
        print(f"median of 200 steps: {before:.3f} ms, {streams:.3f} ms since another stream was used")
        print(f"after {cycles} cycles without sleeps: {control:.3f} ms; after {cycles} with: {after:.3f} ms, same bits: {equal}")
    return equal


def used_mib():
    """The GPU's memory in use, without PyTorch's tensors."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**20


def read_options():
    """What the command line says; ends the program where the script cannot run."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--steps", type=int, default=500, help="tokens that are decoded [default: 500]")
    arguments.add_argument("--layers", type=int, default=32, help="layers of the model [default: 32]")
    arguments.add_argument("--hidden", type=int, default=4096, help="elements of a token's state [default: 4096]")
    arguments.add_argument("--batch", type=int, default=16, help="sequences at once [default: 16]")
    arguments.add_argument("--sleep", type=int, default=0, help="how often the communicator sleeps and wakes [default: 0]")
    options = arguments.parse_args()
    if torch is None:
        arguments.exit(1, "PyTorch is missing: pip install torch\n")
    if "LOCAL_RANK" not in os.environ:
        arguments.exit(1, "no LOCAL_RANK: start it with torchrun --nproc-per-node 2\n")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        arguments.exit(1, f"a GPU is needed for each process, and PyTorch sees {torch.cuda.device_count()}\n")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
