"""Times matrix products beside all-gathers and reduce-scatters, as FSDP has them: the collective is started, products run
on the current stream, then that waits for the collective.

Run one process a GPU (`torchrun --nproc-per-node N torch_overlap.py`). Rank 0 prints a JSON line for each collective, size,
number of products and way of issuing them: microseconds of one round, the slowest rank's, the median of batches. What runs is fixed, so that
lines of two runs can be compared (`overlap_ratios.py`).
OPS: which collectives, `all_gather,reduce_scatter` unless said otherwise; `all_gathers_of_4` and `reduce_scatters_of_4` are a group of
four of a quarter of the size each, as Megatron's buckets have them.
"""

import json
import os
import statistics

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

KIB, MIB = 1 << 10, 1 << 20
# Bytes of the whole collective, and the side of matrices whose product takes about as long on an H200.
SIZES = {64 * KIB: 1024, 256 * KIB: 1024, MIB: 1536, 4 * MIB: 2048, 16 * MIB: 2560, 64 * MIB: 4096}
PRODUCTS = (1, 4)
ROUNDS, BATCHES = 20, 15


class Round:
    """One collective, or a group of four, beside some products."""

    def __init__(self, name, size, products):
        self.calls = 4 if name.endswith("_of_4") else 1
        count = size // 2 // dist.get_world_size()
        shares = torch.zeros(count, device="cuda", dtype=torch.bfloat16).chunk(self.calls)
        wholes = torch.zeros(count * dist.get_world_size(), device="cuda", dtype=torch.bfloat16).chunk(self.calls)
        self.buffers = list(zip(shares, wholes))
        side = SIZES[size]
        self.left, self.right, self.product = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        self.name, self.products = name, products

    def start(self, **asynchronous):
        for share, whole in self.buffers:
            if self.name.startswith("all_gather"):
                work = dist.all_gather_into_tensor(whole, share, **asynchronous)
            else:
                work = dist.reduce_scatter_tensor(share, whole, **asynchronous)
        return work

    def issue(self):
        if self.calls == 1:
            work = self.start(async_op=True)
        else:
            with _coalescing_manager(device=self.left.device, async_ops=True) as work:
                self.start()
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.product)
        work.wait()

    def issue_all(self):
        for _ in range(ROUNDS):
            self.issue()


def captured(one):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one.issue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        one.issue_all()
    return graph


def batch_us(run, lined_up):
    """Microseconds of a round on this rank; the ranks begin together."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.all_reduce(lined_up)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / ROUNDS


def measure(run):
    """The median over batches of the slowest rank's time."""
    lined_up = torch.zeros(1, device="cuda")
    for _ in range(3):
        batch_us(run, lined_up)
    times = torch.tensor([batch_us(run, lined_up) for _ in range(BATCHES)], device="cuda", dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    for name in os.environ.get("OPS", "all_gather,reduce_scatter").split(","):
        for size in SIZES:
            for products in PRODUCTS:
                one = Round(name, size, products)
                one.issue_all()
                torch.cuda.synchronize()
                graph = captured(one)
                for mode, run in (("eager", one.issue_all), ("graph", graph.replay)):
                    us = measure(run)
                    if dist.get_rank() == 0:
                        print(json.dumps({"op": name, "bytes": size, "products": products, "mode": mode, "us": us}), flush=True)
                torch.cuda.synchronize()
                del graph, run  # which NCCL would wait for when the group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
