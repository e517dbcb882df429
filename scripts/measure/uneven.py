#!/usr/bin/env python3
"""Times gathers and reduce-scatters of uneven rows in CUDA graphs, as data-parallel attention issues them: a group with a broadcast, or a
reduce, for each rank (vLLM's and SGLang's PyNccl). Even rows are one all-gather or reduce-scatter.

    torchrun --nproc-per-node 2 scripts/measure/uneven.py > nccl.jsonl
    torchrun --nproc-per-node 2 scripts/measure/uneven.py --windows --name nccl-windows > windows.jsonl
    windlass run -- torchrun --nproc-per-node 2 scripts/measure/uneven.py --name windlass > windlass.jsonl
    python3 scripts/measure/uneven.py --verdict nccl.jsonl windows.jsonl windlass.jsonl

Rows are JSON lines. --windows has NCCL allocate the buffers and registers them as symmetric windows. Sums and gathers are checked once a shape.
NVLink multicast stays off.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
from pathlib import Path

BFLOAT16, SUM, SYMMETRIC, CALLS = 9, 0, 1, 16
# Rows of rank 0 for each row of the others: even, nearly, uneven, one rank without a batch.
SHARES = {"even": 1.0, "near": 0.75, "uneven": 0.25, "one idle": 0.0}


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,128,256,512", help="rows of all ranks but the first, by commas")
    parser.add_argument("--hidden", default="4096,7168", help="columns, by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--name", default="nccl", help="what rows call the library")
    parser.add_argument("--windows", action="store_true", help="buffers are symmetric windows")
    parser.add_argument("--verdict", nargs="+", type=Path, metavar="FILE", help="where Windlass is not ahead in rows of FILE...")
    return parser.parse_args()


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Nccl:
    """NCCL's functions, by the library that the process would load."""

    def __init__(self, torch, dist, device):
        self.library = ctypes.CDLL("libnccl.so.2")
        name = Id()
        if dist.get_rank() == 0:
            self.call("ncclGetUniqueId", ctypes.byref(name))
        told = [bytes(name)]
        dist.broadcast_object_list(told)
        self.communicator = ctypes.c_void_p()
        ranks, rank = ctypes.c_int(dist.get_world_size()), ctypes.c_int(dist.get_rank())
        torch.zeros(1, device=device)
        self.call("ncclCommInitRank", ctypes.byref(self.communicator), ranks, Id.from_buffer_copy(told[0]), rank)
        self.stream = lambda: ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} gave {code}, expected 0")

    def gather(self, out, own, sizes, row):
        if len(set(sizes)) == 1:
            return self.call("ncclAllGather", own, out, ctypes.c_size_t(sizes[0] * row), BFLOAT16, self.communicator, self.stream())
        self.each("ncclBroadcast", sizes, row, lambda offset: (own, ctypes.c_void_p(out.value + offset)), ())

    def scatter(self, out, all_rows, sizes, row):
        if len(set(sizes)) == 1:
            return self.call("ncclReduceScatter", all_rows, out, ctypes.c_size_t(sizes[0] * row), BFLOAT16, SUM, self.communicator, self.stream())
        self.each("ncclReduce", sizes, row, lambda offset: (ctypes.c_void_p(all_rows.value + offset), out), (SUM,))

    def each(self, function, sizes, row, buffers, more):
        self.call("ncclGroupStart")
        offset = 0
        for root, size in enumerate(sizes):
            self.call(function, *buffers(offset), ctypes.c_size_t(size * row), BFLOAT16, *more, root, self.communicator, self.stream())
            offset += size * row * 2
        self.call("ncclGroupEnd")

    def window(self, size):
        """A buffer that is a window."""
        address, window = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        self.call("ncclCommWindowRegister", self.communicator, address, ctypes.c_size_t(size), ctypes.byref(window), SYMMETRIC)
        return address


class Array:
    """Memory that is not PyTorch's, as a tensor."""

    def __init__(self, address, elements):
        self.__cuda_array_interface__ = {"data": (address.value, False), "shape": (elements,), "typestr": "<i2", "version": 2}


def measure(chosen, torch, dist):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nccl = Nccl(torch, dist, device)
    rows, columns = numbers(chosen.rows), numbers(chosen.hidden)
    most = max(rows) * max(columns) * ranks
    if chosen.windows:
        addresses = [nccl.window(2 * most) for _ in range(2)]
        whole, own = (torch.as_tensor(Array(address, most), device=device).view(torch.bfloat16) for address in addresses)
    else:
        whole, own = (torch.empty(most, dtype=torch.bfloat16, device=device) for _ in range(2))
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (whole, own)]
    for hidden in columns:
        for count in rows:
            for words, share in SHARES.items():
                sizes = [int(count * share), *[count] * (ranks - 1)]
                mine, total = sizes[rank] * hidden, sum(sizes) * hidden
                for op, step in [("gather", lambda: nccl.gather(addresses[0], addresses[1], sizes, hidden)),
                                 ("scatter", lambda: nccl.scatter(addresses[1], addresses[0], sizes, hidden))]:
                    own.fill_(rank + 1)
                    whole.fill_(rank + 1)
                    step()
                    torch.cuda.synchronize()
                    expected = torch.cat([torch.full((size * hidden,), root + 1.0) for root, size in enumerate(sizes)])
                    right = torch.equal(whole[:total].float().cpu(), expected) if op == "gather" else bool((own[:mine] == ranks * (ranks + 1) / 2).all())
                    us = timed(torch, dist, step, chosen.rounds)
                    if rank == 0:
                        row = {"library": chosen.name, "op": op, "rows": sizes, "shape": words, "hidden": hidden, "bytes": 2 * total}
                        print(json.dumps({**row, "us": us, "right": right}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def timed(torch, dist, step, rounds):
    """Microseconds of a call in a graph of CALLS."""
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 100 / CALLS)
    return round(statistics.median(times[1:]), 2)


def numbers(text):
    return [int(number) for number in text.split(",")]


def verdict(files):
    by = {}
    for row in (json.loads(line) for file in files for line in file.read_text().splitlines() if line.startswith("{")):
        by.setdefault((row["op"], row["shape"], row["hidden"], row["bytes"]), {}).setdefault(row["library"], []).append(row)
    wrong = [key for key, libraries in by.items() if not all(row["right"] for rows in libraries.values() for row in rows)]
    behind = []
    for key, libraries in sorted(by.items()):
        times = {name: statistics.median(row["us"] for row in rows) for name, rows in libraries.items()}
        others = [us for name, us in times.items() if name != "windlass"]
        if others and times.get("windlass", float("inf")) > min(others):
            behind.append((key, times))
    print(f"{len(by)} shapes, {len(wrong)} wrong {wrong or ''}, Windlass not ahead at {len(behind)}")
    for key, times in behind:
        print(*key, times)
    return 1 if wrong or behind else 0


def main():
    chosen = options()
    if chosen.verdict:
        sys.exit(verdict(chosen.verdict))
    if os.environ.setdefault("NCCL_NVLS_ENABLE", "0") != "0":
        sys.exit(f"NCCL_NVLS_ENABLE is {os.environ['NCCL_NVLS_ENABLE']!r}, expected '0': NVLink multicast must stay off here")
    if "LOCAL_RANK" not in os.environ:
        sys.exit("no LOCAL_RANK: start it with torchrun --nproc-per-node 2")
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        sys.exit("skipped: PyTorch is not installed")
    if torch.cuda.device_count() < 2:
        sys.exit(f"skipped: PyTorch sees {torch.cuda.device_count()} GPUs, expected two or more")
    measure(chosen, torch, dist)


if __name__ == "__main__":
    main()
